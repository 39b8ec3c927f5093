"""FASA: predict the important tokens with a few frequency chunks (TIP), attend to them exactly (FAC).

Paper: arXiv 2602.03152, Sec. 4, Alg. 1. Offline, contextual agreement (CA) ranks the frequency chunks (FCs) of each
query head; at each step the best `n_tip` of them score all cached tokens, and the head attends to the best `budget`
tokens at their original positions. This is FASA-C: the cache stays whole on the device and less of it is read.
fasa_c and fasa are the paper's settings; fasa_plus is ours: FCs and tokens shared by the query heads of a KV head, and
the newest tokens always among the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.clock import stage
from fasa_bench.errors import UserError
from fasa_bench.method import TopTokens, group_softmax, resolve_count
from fasa_bench.rope import Pairing

if TYPE_CHECKING:
    from fasa_bench.calibration import Calibration
    from fasa_bench.models import Model

Granularity = Literal["query_head", "kv_head"]


@dataclass
class FasaC(TopTokens):
    """n_tip: frequency chunks per head, a number or a share of all. pairing: which dimensions make a chunk.

    fc_granularity: kv_head averages CA over the query heads of a KV head, which then use the same chunks.
    token_granularity: kv_head lets them read the same tokens, chosen by the mean softmax of their TIP scores.
    sinks, recent: first and newest tokens that are always among the budget.
    """

    n_tip: int | float = 0.25
    pairing: Pairing = "rope"
    fc_granularity: Granularity = "query_head"
    token_granularity: Granularity = "query_head"
    sinks: int = 0
    recent: int = 0

    uses_calibration: ClassVar[bool] = True
    notes: ClassVar[dict[str, str]] = {
        "n_tip": "paper and authors' code 16 of 64 chunks (25 %), ours 25 %",
        "pairing": "paper and ours: dimensions that rotate together; authors' code: adjacent ones on every model",
        "fc_granularity": "paper and authors' code per query head; fasa_plus per KV head",
        "token_granularity": "paper and authors' code per query head; fasa_plus per KV head",
        "sinks": "paper and authors' code none",
        "recent": "paper and authors' code none (the current token is a candidate); fasa_plus 16",
        "dense_layers": "authors' code keeps layer 0 dense on Llama; the paper does not say so; ours none",
    }

    def __post_init__(self) -> None:
        for key in ("sinks", "recent"):
            if getattr(self, key) < 0:
                raise UserError.of(f"method.{key}", getattr(self, key), "must be at least 0")

    def prepare(self, model: Model, calibration: Calibration) -> None:
        units = model.rope.units(self.pairing)
        count = resolve_count("method.n_tip", self.n_tip, len(units))
        agreement = calibration.agreement(model, self.pairing)  # [layers, Hq, chunks]
        if self.fc_granularity == "kv_head":
            heads = model.config.num_key_value_heads
            shared = agreement.unflatten(1, (heads, -1)).mean(2, keepdim=True)
            agreement = shared.expand(-1, -1, agreement.shape[1] // heads, -1).flatten(1, 2)
        self._layers = [
            Dominant.of(mask, model.config.num_key_value_heads)
            for mask in chunk_mask(agreement, units, count, model.rope.head_dim)
        ]

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        if layer.budget is not None and layer.index not in self.dense_layers:
            dominant = self._layers[layer.index]
            layer.split(dominant.order, dominant.lead)

    def smallest_budget(self) -> int:
        return self.sinks + max(self.recent, 1)

    def always(self, layer: KVLayer) -> tuple[int, int]:
        return self.sinks, self.recent

    def scores(self, layer: KVLayer, query: Tensor, visible: Tensor | None) -> Tensor:
        with stage("tip"):
            dominant = self._layers[layer.index].on(query)
            if layer.is_split:
                products = layer.lead_dot(layer.query_parts(query)[0] * dominant.lead_mask)
            else:
                products = layer.lead_dot(query * dominant.mask)
            if self.token_granularity == "query_head":
                return products.flatten(3)[..., : layer.length]
            return shared_worth(products, layer, visible)


class Dominant:
    """What the TIP of one layer reads: the dimensions of its heads' chunks, mask [Hq, 1, d] with 1 on them.

    order [H, d], lead: those that any query head of a KV head uses come first; as many in each KV head as the one with
    the most needs. lead_mask [Hq, 1, lead]: the mask in that order. A dimension that a head does not use is 0 in its
    query and adds exactly nothing, so that one product serves all heads.
    """

    def __init__(self, mask: Tensor, order: Tensor, lead: int) -> None:
        self.mask, self.order, self.lead = mask, order, lead
        heads = len(order)
        ordered = mask.unflatten(0, (heads, -1)).gather(3, order[:, None, None].expand(-1, len(mask) // heads, -1, -1))
        self.lead_mask = ordered.flatten(0, 1)[..., :lead]

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


def shared_worth(products: Tensor, layer: KVLayer, visible: Tensor | None) -> Tensor:
    """Mean over a KV head's query heads of the softmax of their scores: [b, Hq, q, B, C] -> [b, H, q, n] float32."""
    n = layer.length
    if visible is not None or layer.padded or products.dtype != torch.float32:
        return group_softmax(products.flatten(3)[..., :n], layer, visible)
    # the same in place and in the blocks' own layout: the scores of a long context are the largest thing of a step
    blocks, block = products.shape[-2:]
    products[..., -1, n - (blocks - 1) * block :] = -torch.inf
    products -= products.amax((3, 4), keepdim=True)
    products.mul_(layer.scale).exp_()
    products /= products.sum((3, 4), keepdim=True)
    return products.unflatten(1, (layer.heads, -1)).mean(2).flatten(3)[..., :n]


def chunk_mask(agreement: Tensor, units: Tensor, count: int, head_dim: int) -> Tensor:
    """1 on the dimensions of the `count` chunks with the highest agreement: [layers, Hq, chunks] -> [layers, Hq, d]."""
    best = agreement.topk(count, dim=-1).indices
    dims = units[best].flatten(2)
    return torch.zeros(*agreement.shape[:2], head_dim).scatter(2, dims, 1.0)
