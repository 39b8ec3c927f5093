"""From products of queries and keys to attention weights, as the layer's model computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fasa_bench.cache import KVLayer


def scaled(layer: KVLayer, products: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits: products times the layer's scale, softly capped where the model does so (Gemma 2: c * tanh(x / c)).

    With ALiBi, what it adds by position. positions: those of the tokens [b, 1 or Hq, n], if not of all that are held.
    """
    return biased(layer, capped(layer, products * layer.scale), 1.0, positions)


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


def biased(layer: KVLayer, scores: Tensor, scale: float, positions: Tensor | None = None) -> Tensor:
    """Scores, and what ALiBi adds to a logit, in scores of which `scale` makes logits: [b, Hq, ..., n], the same shape.

    positions: see `scaled`. Without slopes the scores themselves.
    """
    bias = position_bias(layer, positions)
    return scores if bias is None else scores + bias.unflatten(1, (-1, *[1] * (scores.dim() - 3))) / scale


def position_bias(layer: KVLayer, positions: Tensor | None = None) -> Tensor | None:
    """What ALiBi adds to the logits of tokens at these positions [b, 1 or Hq, n]: [b, Hq, n] float32; None without.

    ALiBi (Press et al., arXiv 2108.12409) takes a head's slope times the distance off each logit. A softmax does not
    notice what is added to all logits of a query, so the distance to the last of the tokens does for every query.
    """
    if layer.slopes is None:
        return None
    positions = layer.positions if positions is None else positions
    distances = positions[..., -1:] - positions
    slopes = layer.slopes.to(distances.device)
    return -slopes[:, None] * distances.repeat_interleave(len(slopes) // distances.shape[1], dim=1)
