"""Settings that must be there before anything imports torch or Triton."""

import os

# One thread, in the programs that the tests start as well: the tensors are tiny, and threads that wait for each other
# by spinning make a busy machine many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():  # the kernels' tests then run in Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
