"""The Triton sources on the CPU. Triton decides when a kernel is defined whether to interpret it."""

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "run with TRITON_INTERPRET=1"
