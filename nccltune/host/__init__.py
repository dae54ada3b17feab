"""What this host is: its GPUs, its NCCL, and whether a profile was made for it."""
