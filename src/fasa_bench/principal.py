"""Principal axes of keys: the orthonormal basis in which few components carry most of their variance (for Loki)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Rotary = Literal["post", "pre"]  # keys as they are cached, or as they were before RoPE turned them


def principal_axes(keys: Tensor) -> Tensor:
    """Axes of each head's keys about their mean, as columns, largest variance first: [H, n, d] -> [H, d, d] float32."""
    centred = keys.double() - keys.double().mean(1, keepdim=True)
    # eigh sorts by ascending eigenvalue
    return torch.linalg.eigh(centred.transpose(1, 2) @ centred).eigenvectors.flip(-1).float()
