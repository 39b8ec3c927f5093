"""Examples that are measured instead of answered: full KV decodes them, and a recorder looks on.

A `Shadow` goes along with such a decode and tells what a method would have read at each step. So all methods are judged
by the same queries, those of the full-KV model, and none by what its own earlier mistakes made of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fasa_bench.attention import attend
from fasa_bench.cache import KVLayer
from fasa_bench.method import Method, Observation

if TYPE_CHECKING:
    from fasa_bench.runner import Job
    from fasa_bench.session import Prefilled
    from fasa_bench.task import Example


class Recorder(Method):
    """Reads everything, as full KV does, and measures on the way. One belongs to one example."""

    takes_budget: ClassVar[bool] = False

    def found(self) -> tuple[dict[str, Any], bytes]:
        """Numbers for `Task.score`, and the content of the file that is kept beside the rows."""
        raise NotImplementedError


class Study:
    """What the examples of a task have measured; one object serves all of them. folder: of its files in a run."""

    folder: str

    def observes(self) -> Observation:
        """What is to be recorded of the prompt pass."""
        return Observation()

    def recorder(self, job: Job, example: Example, prefilled: Prefilled) -> Recorder:
        raise NotImplementedError

    def file(self, example: Example) -> str:
        return f"{self.folder}/{example.id}.safetensors"


class Shadow:
    """What a method would read at the steps of a full-KV decode: batch of one, without padding.

    budgets: of each layer, by its index. A method that evicts works on a cache of its own, which gets every new
    token; one that selects looks at the whole cache anew at each step.
    """

    def __init__(self, method: Method, budgets: Mapping[int, int | None]) -> None:
        self.method, self.budgets = method, budgets
        self._evicted: dict[int, KVLayer] = {}
        self._state: dict[int, dict[str, Tensor]] = {}

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        """After the prompt pass. query: its last queries, as many as some method observes, or None."""
        twin, window = self._view(layer), self.method.observes().window
        self.method.prefill(twin, query[:, :, -window:] if window and query is not None else None)
        self._keep(layer, twin)

    def step(self, layer: KVLayer, query: Tensor) -> Tensor:
        """After the token of a step has come into the layer: which tokens are read for it, [Hq, n] bool."""
        twin = self._evicted.get(layer.index)
        if twin is None:
            twin = self._view(layer)
        else:
            twin.append(layer.keys[:, :, -1:], layer.values[:, :, -1:], layer.positions[:, 0, -1:])
        chooses = twin.budget is not None and twin.length > twin.budget
        slots = self.method.select(twin, query) if chooses and twin.index not in self.method.dense_layers else None
        weights = attend(twin, query, slots, self.method.ragged)[1] if self.method.uses_weights else None
        read = self._read(twin, slots, layer.length)
        self.method.decoded(twin, query, weights)
        self._keep(layer, twin)
        return read.repeat_interleave(query.shape[1] // len(read), dim=0)

    def _view(self, layer: KVLayer) -> KVLayer:
        """The whole cache, as the method is to see it."""
        twin = layer.fork()
        twin.budget = self.budgets[layer.index]
        twin.state = self._state.get(layer.index, {})
        return twin

    def _keep(self, layer: KVLayer, twin: KVLayer) -> None:
        twin.prompt_queries = twin.prompt_mass = None
        self._state[layer.index] = twin.state
        if twin.length < layer.length:
            self._evicted[layer.index] = twin

    def _read(self, twin: KVLayer, slots: Tensor | None, tokens: int) -> Tensor:
        """[1, H or Hq, tokens] of what is read; positions are slots of the whole cache."""
        if slots is None:
            positions = twin.positions[0]
        else:
            slots = slots[:, :, 0]
            positions = twin.positions_of(slots.clamp(min=0))[0].masked_fill(slots[0] < 0, tokens)  # -1: nothing
        read = torch.zeros(len(positions), tokens + 1, dtype=torch.bool, device=positions.device)
        return read.scatter(1, positions, True)[:, :tokens]
