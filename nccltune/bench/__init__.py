"""Time all-reduces on real GPUs as SGLang runs them: rank processes, NCCL binding, data check."""
