"""A negative result of FASA's paper (arXiv 2602.03152, D.2): the scores that predict tokens, as weights of attention.

FASA-C's choice of tokens, but their weights are the softmax of the TIP scores, the partial sums over the dominant
chunks, instead of the exact logits. The paper reports that this fails, without a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import top_slots
from fasa_bench.methods.fasa import FasaC
from fasa_bench.segments import product


@dataclass
class FasaTip(FasaC):
    """attend_with: tip for the scores' softmax, exact for FASA-C's attention."""

    attend_with: Literal["tip", "exact"] = "tip"

    padding: ClassVar[bool] = False
    notes: ClassVar[dict[str, str]] = FasaC.notes | {
        "attend_with": "paper exact, tip as an ablation without details; ours tip: scores times the head's own scale",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_granularity == "kv_head":
            raise UserError.of("method.token_granularity", "kv_head", "must be query_head: weights are of one head")

    @property
    def parallel(self) -> bool:
        return self.attend_with == "exact"

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        if self.attend_with == "exact":
            super().prefill(layer, query)

    def step(self, layer: KVLayer, query: Tensor) -> tuple[Tensor, int] | None:
        if self.attend_with == "exact":
            return super().step(layer, query)
        assert layer.budget is not None
        scores = self.scores(layer, query, None)[:, :, 0]
        slots = top_slots(scores, layer, layer.budget, sinks=self.sinks, recent=self.recent)
        weights = torch.softmax(scores.gather(2, slots).float() * layer.scale, dim=-1)
        values = layer.gather(slots)[1]
        return product(weights[:, :, None].to(query.dtype), values).transpose(1, 2), layer.budget
