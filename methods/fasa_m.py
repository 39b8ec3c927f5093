"""FASA-M: FASA-C's choice from a cache of which only the dominant key dimensions stay on the device.

Paper: arXiv 2602.03152, Sec. 4.3 and D.1, Eq. 10. The other key dimensions and the values of all tokens lie in the
host's memory; what a step attends to is fetched. The paper suggests prefetching and evaluates none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.methods.fasa import FasaC
from fasa_bench.near import Prefetch


@dataclass
class FasaM(FasaC):
    """prefetch: which rows are on the device before they are chosen. last_step: those of the layer's last choice, kept
    there; next_layer: the same, but fetched anew while the layer before computes; none.
    """

    prefetch: Prefetch = "last_step"

    notes: ClassVar[dict[str, str]] = FasaC.notes | {
        "prefetch": "paper suggests prefetching and evaluates none; changes no output, only what is moved and held",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend == "triton":
            raise UserError.of("method.backend", "triton", "must be auto, torch or cpp: Triton's cannot offload")

    def step(self, layer: KVLayer, query: Tensor) -> None:
        if not layer.is_split:  # a prompt of fewer tokens than the budget: until now everything was read
            self._split(layer)

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        after = layer.after()
        if after is not None:
            after.prefetch()

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        slots = self._kernels.select(layer, query, self._layers[layer.index].on(query))
        return super().select(layer, query) if slots is None else slots

    def _split(self, layer: KVLayer, offload: Prefetch | None = None) -> None:
        if layer.packing.bits < 16:
            raise UserError.of("cache.bits", layer.packing.bits, f"must be 16: {self.name} offloads no packed rows")
        super()._split(layer, self.prefetch)
