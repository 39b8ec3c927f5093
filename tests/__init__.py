"""Without a GPU the kernels' tests run in Triton's interpreter, which must be chosen before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
