"""From products of queries and keys to attention weights, as the layer's model computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fasa_bench.cache import KVLayer


def scaled(layer: KVLayer, products: Tensor) -> Tensor:
    """Logits: products times the layer's scale, softly capped where the model does so (Gemma 2: c * tanh(x / c))."""
    return capped(layer, products * layer.scale)


def capped(layer: KVLayer, logits: Tensor) -> Tensor:
    return logits if layer.cap is None else layer.cap * torch.tanh(logits / layer.cap)


def weights(layer: KVLayer, logits: Tensor) -> Tensor:
    """Softmax over the last dimension: [b, Hq, ..., n] -> the same, float32.

    With sinks (GPT-OSS) each head has one more logit, which stands for no token: its weights sum to less than 1.
    """
    if layer.sinks is None:
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    sinks = layer.sinks.float().view(-1, *[1] * (logits.dim() - 2)).expand(*logits.shape[:-1], 1)
    return torch.softmax(torch.cat([logits.float(), sinks], dim=-1), dim=-1)[..., :-1]
