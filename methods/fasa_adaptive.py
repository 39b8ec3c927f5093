"""FASA with chunks and tokens where they are needed, at the same mean cost: not in the paper, which has them uniform.

The number of chunks of a head follows its curve of contextual agreement, and the number of tokens of a head at a step
the distribution of its predicted weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import best_mask, hidden, resolve_count, top_mask
from fasa_bench.methods.dominant import Dominant, kv_heads_of, mean_of_group
from fasa_bench.methods.fasa import FasaC

if TYPE_CHECKING:
    from fasa_bench.calibration import Calibration
    from fasa_bench.models import Model

NTipRule = Literal["uniform", "coverage", "agreement"]


@dataclass
class FasaAdaptive(FasaC):
    """n_tip_rule: uniform; coverage: every head gets as many of its best chunks as hold one share of the head's summed
    agreement, the same for all heads, so that heads whose agreement is spread out get more; agreement: the chunks with
    the highest agreement of all heads and layers. `n_tip` is then the mean over all heads.

    budget_rule: fixed; mass: of the weights that TIP predicts at a step for all heads of a layer, the largest are read,
    budget x heads of them, but each head's best `least` x budget in any case.
    """

    n_tip_rule: NTipRule = "coverage"
    budget_rule: Literal["fixed", "mass"] = "mass"
    least: float = 0.25

    speed: ClassVar[Literal["physical", "simulated"]] = "simulated"  # rows of the widest head are gathered for all
    ragged: ClassVar[bool] = True
    padding: ClassVar[bool] = False
    notes: ClassVar[dict[str, str]] = FasaC.notes | {
        "n_tip_rule": "paper and authors' code uniform",
        "budget_rule": "paper and authors' code fixed",
        "least": "ours: a quarter of the budget is every head's own",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.least <= 1:
            raise UserError.of("method.least", self.least, "must be a share of the budget in [0, 1]")

    def prepare(self, model: Model, calibration: Calibration) -> None:
        super().prepare(model, calibration)
        if self.n_tip_rule == "uniform":
            return
        units, kv_heads = model.rope.units(self.pairing), kv_heads_of(model.config)
        agreement = calibration.agreement(model, self.pairing)
        heads = agreement.shape[1]
        if self.fc_granularity == "kv_head":
            agreement = mean_of_group(agreement, kv_heads)
        chosen = spread(agreement, resolve_count("method.n_tip", self.n_tip, len(units)), self.n_tip_rule)
        chosen = chosen.repeat_interleave(heads // chosen.shape[1], dim=1)
        dims = units.flatten() % (model.rope.head_dim + 1)  # none goes behind the last
        mask = torch.zeros(*chosen.shape[:2], model.rope.head_dim + 1)
        mask[..., dims] = chosen.repeat_interleave(units.shape[1], dim=-1).float()
        dominant = [Dominant.of(layer, kv_heads) for layer in mask[..., :-1]]
        self._layers = dict(zip(model.rope.layers, dominant, strict=True))

    def step(self, layer: KVLayer, query: Tensor) -> tuple[Tensor, int] | None:
        return super().step(layer, query) if self.budget_rule == "fixed" else None

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        if self.budget_rule == "fixed":
            return super().select(layer, query)
        everything = torch.ones(1, 1, 1, layer.length, dtype=torch.bool, device=query.device)
        read = self.reads(layer, query, everything)[:, :, 0]
        counts = read.sum(-1, keepdim=True)
        slots = (~read).byte().sort(dim=-1, stable=True).indices[..., : int(counts.max())]  # those that are read first
        rank = torch.arange(slots.shape[-1], device=slots.device)
        return slots.masked_fill(rank >= counts, -1).sort(dim=-1).values[:, :, None]

    def reads(self, layer: KVLayer, query: Tensor, visible: Tensor) -> Tensor:
        if self.budget_rule == "fixed":
            return super().reads(layer, query, visible)
        assert layer.budget is not None
        weights = self.scores(layer, query, visible)
        if not (self.token_granularity == "kv_head" and self.share == "softmax"):  # scores of tokens, not weights yet
            weights = torch.softmax(hidden(weights.float() * layer.scale, visible), dim=-1)
        weights = hidden(weights, visible, -1.0)
        sure = max(self.smallest_budget(), round(self.least * layer.budget))
        own = top_mask(weights, visible, sure, sinks=self.sinks, recent=self.recent)
        together = weights.masked_fill(own, 2.0).transpose(1, 2).flatten(2)  # [b, q, heads * n]
        read = best_mask(together, layer.budget * weights.shape[1])
        return read.unflatten(2, (weights.shape[1], -1)).transpose(1, 2) & visible


def spread(agreement: Tensor, mean: int, rule: NTipRule) -> Tensor:
    """Which chunks each head gets, `mean` a head on average and one at least: [layers, heads, chunks] -> bool."""
    best, order = agreement.sort(dim=-1, descending=True)
    # what a head's better chunks hold of its agreement already, or how far a chunk is from full agreement
    need = (best.cumsum(-1) - best) / best.sum(-1, keepdim=True).clamp(min=1e-9) if rule == "coverage" else 1 - best
    need[..., 0] = -1.0  # each head's best chunk in any case
    chosen = best_mask(-need.flatten(), mean * agreement.shape[0] * agreement.shape[1]).view_as(need)
    return torch.zeros_like(chosen).scatter(-1, order, chosen)
