"""TOVA: after each step, drop the token that the newest query attended to least.

Source: Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv 2401.06104), Sec. 4; schwartz-lab-NLP/TOVA,
src/tova_cache.py and src/convert_models/llama_custom.py. The attention weights of the last query are averaged over all
query heads of a layer, so that its heads keep one and the same set of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, Observation, group_softmax, top_slots


@dataclass
class Tova(Method):
    """recent: that many newest tokens are never dropped. With 0 every token may go, the newest too."""

    recent: int = 0

    uses_weights: ClassVar[bool] = True
    notes: ClassVar[dict[str, str]] = {
        "recent": "official code and ours 0: the newest token is a candidate like any other; kvpress 1. "
        "Official code reads cache_size + 1 tokens at a step, ours the budget",
    }

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise UserError.of("method.recent", self.recent, "must be at least 0")

    def observes(self) -> Observation:
        return Observation(window=1)

    def smallest_budget(self) -> int:
        return max(self.recent, 1) + 1  # what stays, and the current token

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        assert query is not None
        if self._full(layer):
            # heads of equal groups: the mean of the groups' means is the mean of the heads
            self._drop(layer, group_softmax(layer.dot(query)[:, :, -1], layer))

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        if self._full(layer):
            assert weights is not None
            self._drop(layer, weights)

    def _full(self, layer: KVLayer) -> bool:
        return layer.budget is not None and layer.length >= layer.budget and layer.index not in self.dense_layers

    def _drop(self, layer: KVLayer, weights: Tensor) -> None:
        """Keep the budget - 1 tokens with the largest mean weight, [b, heads, n]: there is room for the next one."""
        assert layer.budget is not None
        layer.keep(top_slots(weights.mean(1, keepdim=True), layer, layer.budget - 1, recent=self.recent))
