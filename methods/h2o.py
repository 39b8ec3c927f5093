"""H2O: keep the tokens that have received the most attention so far (heavy hitters) and the newest ones.

Source: FMInference/H2O, h2o_hf/utils_real_drop/modify_llama.py (arXiv 2306.14048). A token's score is the sum of the
softmax weights that it got from all prompt queries (causal) and from all decode steps; what is evicted loses its score.
The official simulation by a mask is h2o_mask_sim.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torch.nn.functional import pad

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, Observation, resolve_count, top_slots


@dataclass
class H2O(Method):
    """recent: newest tokens that always stay, the current one included: a number, or a share of the budget.

    interval: evict every so many steps; the cache grows by as many tokens in between. None: after the prompt only.
    heads: kv_head keeps one set of tokens per KV head, query_head one per query head, each with its own copy of keys
    and values. group: how scores of the query heads of a KV head become one.
    """

    recent: int | float = 0.5
    interval: int | None = 1
    heads: Literal["kv_head", "query_head"] = "kv_head"
    group: Literal["sum", "mean", "max"] = "sum"

    uses_weights: ClassVar[bool] = True
    notes: ClassVar[dict[str, str]] = {
        "recent": "official ratio heavy = recent, ours too; official code reads budget + 1 tokens, ours the budget; "
        "KVCache-Factory: the newest 8",
        "interval": "official code every step; KVCache-Factory once, after the prompt",
        "heads": "official code per head, MHA only; KVCache-Factory both; ours per KV head",
        "group": "not in the official code; KVCache-Factory mean or max; SparQ's repository mean; ours sum (= mean)",
    }

    def __post_init__(self) -> None:
        if self.recent <= 0 or (isinstance(self.recent, float) and self.recent > 1):
            raise UserError.of("method.recent", self.recent, "must be at least 1 token or a share in (0, 1]")
        if self.interval is not None and self.interval < 1:
            raise UserError.of("method.interval", self.interval, "must be at least 1, or null for never")

    def observes(self) -> Observation:
        return Observation(mass=True)

    def smallest_budget(self) -> int:
        return max(self.recent if isinstance(self.recent, int) else 1, 2)  # what stays, and the current token

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        if layer.budget is None or layer.index in self.dense_layers:
            return
        if layer.padded and self.interval not in (1, None):
            raise UserError.of("method.interval", self.interval, "prompts of different lengths need 1 or null")
        assert layer.prompt_mass is not None
        layer.state["mass"] = layer.prompt_mass
        if layer.length >= layer.budget:
            self.evict(layer)

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        if layer.budget is None or layer.index in self.dense_layers:
            return
        assert weights is not None
        layer.state["mass"] = self.add(layer, pad(layer.state["mass"], (0, 1)), weights)
        if self.interval is not None and layer.length >= layer.budget - 1 + self.interval:
            self.evict(layer)

    def add(self, layer: KVLayer, mass: Tensor, weights: Tensor) -> Tensor:
        """Scores [b, Hq, n] after a step whose weights [b, Hq, m] are over the tokens that were read: all, here."""
        return mass + weights

    def evict(self, layer: KVLayer) -> None:
        """Make room for the next token: the step that reads it must not read more than the budget."""
        slots, mass = self.survivors(layer)
        layer.keep(slots)
        layer.state["mass"] = mass

    def survivors(self, layer: KVLayer) -> tuple[Tensor, Tensor]:
        """Heavy hitters and newest tokens, ascending [b, H or Hq, budget - 1], and their scores [b, Hq, budget - 1]."""
        assert layer.budget is not None
        slots = top_slots(self.scores(layer), layer, layer.budget - 1, recent=self.recent_of(layer.budget) - 1)
        mass = layer.state["mass"]
        return slots, mass.gather(2, per_query_head(slots, mass.shape[1]))

    def scores(self, layer: KVLayer) -> Tensor:
        """By which tokens are compared: [b, H or Hq, n]."""
        mass = layer.state["mass"]  # per query head: the maximum over a group needs the single sums
        if self.heads == "query_head":
            return mass
        grouped = mass.unflatten(1, (layer.heads, -1))
        return grouped.amax(2) if self.group == "max" else getattr(grouped, self.group)(2)

    def recent_of(self, budget: int) -> int:
        """Newest tokens of a step, the current one included."""
        return resolve_count("method.recent", self.recent, budget)


def per_query_head(slots: Tensor, query_heads: int) -> Tensor:
    """[b, H or Hq, m] -> [b, Hq, m]."""
    return slots.repeat_interleave(query_heads // slots.shape[1], dim=1)
