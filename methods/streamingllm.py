"""StreamingLLM: keep the first tokens (attention sinks) and the newest ones, drop what lies between.

Source: mit-han-lab/streaming-llm, streaming_llm/kv_cache.py and pos_shift/modify_llama.py; sizes of the FASA paper
(B.1): 8 sinks and budget - 8 newest tokens, the current one included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, top_mask, top_slots

if TYPE_CHECKING:
    from fasa_bench.calibration import Calibration
    from fasa_bench.models import Model


@dataclass
class StreamingLLM(Method):
    """start: number of sinks. positions: "original" keeps every key at its place in the text; "cache" (the original
    implementation) counts positions inside the cache, so that the sinks stay right in front of the window.
    """

    start: int = 8
    positions: Literal["original", "cache"] = "original"

    notes: ClassVar[dict[str, str]] = {
        "start": "paper and ours 8, official code 4; official code reads budget + 1 tokens at a step, ours the budget",
        "positions": "official code: cache; FASA's authors' code and kvpress: original, our default",
    }

    def __post_init__(self) -> None:
        if self.start < 0:
            raise UserError.of("method.start", self.start, "must be at least 0")

    def prepare(self, model: Model, calibration: Calibration) -> None:
        if self.positions == "cache":
            self._rope = model.rope
            if self._rope.scaled:
                raise UserError.of("method.positions", "cache", "this model's frequencies depend on the length")
            if not self._rope.pairs:
                raise UserError.of("method.positions", "cache", "this model has no RoPE that could be turned")

    @property
    def parallel(self) -> bool:
        return self.positions == "original"

    def smallest_budget(self) -> int:
        return self.start + 1

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        self._evict(layer)

    def reads(self, layer: KVLayer, query: Tensor, visible: Tensor) -> Tensor:
        assert layer.budget is not None
        rank = visible.cumsum(-1)
        return top_mask(rank.float(), visible, layer.budget, sinks=self.start)

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        self._evict(layer)

    def _evict(self, layer: KVLayer) -> None:
        """Make room for the next token: the step that reads it must not read more than the budget."""
        if layer.budget is None or layer.index in self.dense_layers or layer.length < layer.budget:
            return
        if self.positions == "cache" and "sinks" not in layer.state:
            if layer.padded:
                raise UserError.of("method.positions", "cache", "padded batches keep original positions only")
            if layer.expansion is not None:
                raise UserError.of("method.positions", "cache", "a cache of latents keeps original positions only")
            layer.state["sinks"] = layer.keys[:, :, : self.start].clone()
        layer.keep(sinks_and_newest(layer, self.start, layer.budget - 1 - self.start))
        if self.positions == "cache":  # always from the original keys: repeated turning would add up errors
            evicted = layer.seen - layer.length
            layer.keys[:, :, : self.start] = self._rope.rotate(layer.state["sinks"], evicted)


def sinks_and_newest(layer: KVLayer, start: int, recent: int) -> Tensor:
    """Slots of the first `start` and the last `recent` real tokens of the cache: [b, 1, start + recent]."""
    return top_slots(layer.positions.float(), layer, start + recent, sinks=start)
