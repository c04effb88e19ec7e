"""Compilation for GPUs that are not here. Triton decides when a kernel is defined whether to interpret it."""

import os

assert os.environ.get("TRITON_INTERPRET", "0") == "0", "run without TRITON_INTERPRET: nothing interpreted is compiled"

# a launcher that leaves the fusion of products and sums to Triton misses a bar, instead of a warning once a process
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
