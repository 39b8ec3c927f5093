"""The key dimensions that FASA's token prediction reads, laid out for the split cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.softmax import biased
from fasa_bench.split import in_one


def kv_heads_of(config: Any) -> int:
    """KV heads of a layer: as many as query heads where the config of a family knows no other number."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def dominant_dimensions(agreement: Tensor, units: Tensor, count: int, kv_heads: int, head_dim: int) -> list[Dominant]:
    """For each of the layers, the dimensions of the `count` chunks with the highest agreement [layers, Hq, chunks].

    units [chunks, s]: the dimensions of each chunk, -1 for none.
    """
    return [Dominant.of(mask, kv_heads) for mask in chunk_mask(agreement, units, count, head_dim)]


class Dominant:
    """What the TIP of one layer reads: the dimensions of its heads' chunks, mask [Hq, 1, d] with 1 on them.

    order [H, d], lead: those that any query head of a KV head uses come first; as many in each KV head as the one with
    the most needs. lead_mask [Hq, 1, lead]: the mask in that order. A dimension that a head does not use is 0 in its
    query and adds exactly nothing, so that one product serves all heads. shared: every head uses all that lead.
    """

    def __init__(self, mask: Tensor, order: Tensor, lead: int) -> None:
        self.mask, self.order, self.lead = mask, order, lead
        heads = len(order)
        ordered = mask.unflatten(0, (heads, -1)).gather(3, order[:, None, None].expand(-1, len(mask) // heads, -1, -1))
        self.lead_mask = ordered.flatten(0, 1)[..., :lead].contiguous()
        self.shared = bool(self.lead_mask.all())

    @classmethod
    def of(cls, mask: Tensor, kv_heads: int) -> Dominant:
        """mask [Hq, d]."""
        used = mask.unflatten(0, (kv_heads, -1)).amax(1)
        return cls(mask[:, None], used.argsort(dim=1, descending=True, stable=True), int(used.sum(1).max()))

    def on(self, query: Tensor) -> Dominant:
        """Itself, its masks in the type and on the device of a query."""
        if self.mask.dtype != query.dtype or self.mask.device != query.device:
            self.mask = self.mask.to(query.device, query.dtype)
            self.lead_mask = self.lead_mask.to(query.device, query.dtype)
        return self

    def products(self, layer: KVLayer, query: Tensor, position_bias: bool) -> Tensor:
        """Of the dominant dimensions of queries [b, Hq, q, d] with all keys, as KVLayer.lead_dot gives them.

        position_bias: with ALiBi's, where the model has it.
        """
        if not layer.is_split:
            products = layer.lead_dot(query * self.mask)
        elif self.shared:
            products = layer.lead_dot(layer.query_parts(query)[0], whole=query.shape[2] == 1)
        else:
            products = layer.lead_dot(layer.query_parts(query)[0] * self.lead_mask)
        if position_bias and layer.slopes is not None:
            return biased(layer, in_one(products, layer.length), layer.scale)[None]
        return products


def chunk_mask(agreement: Tensor, units: Tensor, count: int, head_dim: int) -> Tensor:
    """1 on the dimensions of the `count` chunks with the highest agreement: [layers, Hq, chunks] -> [layers, Hq, d]."""
    best = agreement.topk(count, dim=-1).indices
    dims = units[best].flatten(2) % (head_dim + 1)  # none goes behind the last
    return torch.zeros(*agreement.shape[:2], head_dim + 1).scatter(2, dims, 1.0)[..., :head_dim]


def mean_of_group(agreement: Tensor, kv_heads: int) -> Tensor:
    """Agreement of the query heads of a KV head, averaged: [layers, Hq, chunks] -> [layers, H, chunks]."""
    return agreement.unflatten(1, (kv_heads, -1)).mean(2)


def highest_of_group(products: Tensor, kv_heads: int) -> Tensor:
    """The highest score that one of the query heads of a KV head gives: [B, b, Hq, q, C] -> [B, b, H, q, C]."""
    grouped = products.unflatten(2, (kv_heads, -1))
    if grouped.shape[4] == 1:  # twice as fast without a dimension of 1 on the way
        return grouped.squeeze(4).amax(3).unsqueeze(3)
    return grouped.amax(3)
