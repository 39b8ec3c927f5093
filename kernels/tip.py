"""TIP: score every cached token with the dominant frequency chunks only (FASA, Alg. 1, token importance prediction)."""

from __future__ import annotations

import torch
from torch import Tensor


def tip_scores(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Query-key products over the chosen dimensions of each query head, post-RoPE, without scale or softmax.

    query [b, Hq, 1, d], keys [b, H, n, d], mask [Hq, d] (1 for a dimension of a chosen chunk, else 0) -> [b, Hq, n].
    The plain-torch reference: a dimension that is not chosen is 0 in the query and adds exactly nothing, so heads
    with different choices share one product. It still reads whole keys; what it saves is shown by the split cache.
    """
    grouped = (query[:, :, 0] * mask).unflatten(1, (keys.shape[1], -1))
    return torch.matmul(grouped, keys.transpose(-1, -2)).flatten(1, 2)
