"""H2O's simulation: every token stays in memory, those that H2O would evict are not read.

Source: FMInference/H2O, h2o_hf/utils_hh/modify_llama.py. It is one token off against the version that really evicts:
the mask for the next step has a column for the coming token, so that the oldest of the recent tokens is not read for
one step; it keeps its score and competes again at the next. So a step reads one token less than the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.methods.h2o import H2O, per_query_head


@dataclass
class H2OMaskSim(H2O):
    """The fields of H2O, except that the mask is made anew at every step."""

    speed: ClassVar[Literal["physical", "simulated"]] = "simulated"  # holds and scores what it claims to evict
    padding: ClassVar[bool] = False  # a shorter row would be masked too early; official: a batch of one

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interval != 1:
            raise UserError.of("method.interval", self.interval, "the simulation evicts every step (1)")

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        return layer.state["slots"][:, :, None]

    def add(self, layer: KVLayer, mass: Tensor, weights: Tensor) -> Tensor:
        if weights.shape[2] == layer.length:
            return mass + weights
        return mass.scatter_add(2, per_query_head(layer.state["slots"], mass.shape[1]), weights)

    def evict(self, layer: KVLayer) -> None:
        assert layer.budget is not None
        slots, mass = self.survivors(layer)
        zeros = torch.zeros_like(layer.state["mass"])
        layer.state["mass"] = zeros.scatter(2, per_query_head(slots, mass.shape[1]), mass)
        coming = slots.new_full((*slots.shape[:2], 1), layer.length)
        heavy = layer.budget - self.recent_of(layer.budget)
        layer.state["slots"] = torch.cat([slots[..., :heavy], slots[..., heavy + 1 :], coming], dim=2)
