"""Find, prove and keep the NCCL settings that make SGLang's speculative decoding fastest."""

__version__ = "0.1.0"
