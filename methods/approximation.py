"""SparQ's arithmetic: approximate logits, and the mean of all values."""

from __future__ import annotations

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.method import hidden
from fasa_bench.softmax import biased, capped, weights


def approximate_logits(layer: KVLayer, query: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Logits from `rank` components of the query: [b, Hq, 1, d] -> [b, Hq, n] float32, components [b, H, rank]."""
    logits, components = many_logits(layer, query, rank, None if layer.real is None else layer.real[:, :, None])
    return logits[:, :, 0], components[:, :, 0]


def many_logits(layer: KVLayer, query: Tensor, rank: int, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same for [b, Hq, q, d]: [b, Hq, q, n] and [b, H, q, rank]; visible [b, 1, q, n], None for all.

    The query heads of a KV head share the components where the sum of their magnitudes is largest. The scale of the
    logits is corrected by the share of the query's magnitude that they cover. What is hidden gets the least number.
    """
    magnitude = query.float().abs()
    grouped = magnitude.unflatten(1, (layer.heads, -1)).sum(2)
    components = grouped.topk(rank, dim=-1).indices
    mask = torch.zeros_like(grouped).scatter(-1, components, 1.0)
    mask = mask.repeat_interleave(query.shape[1] // layer.heads, dim=1)
    coverage = (magnitude * mask).sum(-1, keepdim=True) / magnitude.sum(-1, keepdim=True)
    # a component that is not chosen is 0 in the query and adds exactly nothing: one product for all heads
    logits = capped(layer, layer.dot(query * mask.to(query.dtype)).float().mul_(layer.scale / coverage.sqrt()))
    logits = biased(layer, logits, 1.0)
    return logits if visible is None else hidden(logits, visible, torch.finfo(logits.dtype).min), components


def covered(layer: KVLayer, logits: Tensor, read: Tensor) -> Tensor:
    """The weight of what attention over some tokens covers: these, and a head's sink, which is always part of it.

    logits [b, Hq, ..., n], and which tokens are read, 0 or 1, broadcast to them -> [b, Hq, ...].
    """
    found = weights(layer, logits)
    share = (found * read).sum(-1)
    return share if layer.sinks is None else share + 1 - found.sum(-1)


def mean_value(layer: KVLayer) -> Tensor:
    """Mean of the values of all tokens held: [b, H, d] float32."""
    return mean_values(layer, 1)[:, :, 0]


def mean_values(layer: KVLayer, new: int) -> Tensor:
    """Mean of all values up to each of the newest tokens, which the sum leaves out until `decoded`: [b, H, new, d]."""
    held = layer.positions[:, :1] >= 0
    count = held.cumsum(-1)[..., -new:, None]
    return (layer.state["value_sum"][:, :, None] + newest_values(layer, new).cumsum(2)) / count


def newest_values(layer: KVLayer, new: int) -> Tensor:
    """[b, H, q, d] float32."""
    slots = torch.arange(layer.length - new, layer.length, device=layer.device).expand(layer.batch, 1, -1)
    return layer.gather(slots)[1].float()
