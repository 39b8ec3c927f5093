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
    speed: ClassVar[Literal["physical", "simulated"]] = "simulated"  # the torch path multiplies whole keys
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
        self._mask = chunk_mask(agreement, units, count, model.rope.head_dim)
        self._masks: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}

    def smallest_budget(self) -> int:
        return self.sinks + max(self.recent, 1)

    def always(self, layer: KVLayer) -> tuple[int, int]:
        return self.sinks, self.recent

    def scores(self, layer: KVLayer, query: Tensor, visible: Tensor | None) -> Tensor:
        # a dimension of no chosen chunk is 0 in the query and adds exactly nothing: one product for all heads
        scores = layer.dot(query * self._mask_for(layer, query))
        return group_softmax(scores, layer, visible) if self.token_granularity == "kv_head" else scores

    def _mask_for(self, layer: KVLayer, query: Tensor) -> Tensor:
        """The layer's mask [Hq, 1, d] where and in the type the query is; a copy is made once."""
        key = (layer.index, query.device, query.dtype)
        if key not in self._masks:
            self._masks[key] = self._mask[layer.index, :, None].to(query.device, query.dtype)
        return self._masks[key]


def chunk_mask(agreement: Tensor, units: Tensor, count: int, head_dim: int) -> Tensor:
    """1 on the dimensions of the `count` chunks with the highest agreement: [layers, Hq, chunks] -> [layers, Hq, d]."""
    best = agreement.topk(count, dim=-1).indices
    dims = units[best].flatten(2)
    return torch.zeros(*agreement.shape[:2], head_dim).scatter(2, dims, 1.0)
