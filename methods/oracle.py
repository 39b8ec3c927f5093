"""Oracle: the tokens with the largest exact attention logits, chosen anew by each query head at each step.

An upper bound for selection, not a method to deploy: it reads every key to choose (paper B.1; authors' code, Llama
path: pre-softmax logits, per query head, the current token a candidate).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.method import Method, top_slots


@dataclass
class Oracle(Method):
    speed: ClassVar[Literal["physical", "simulated"]] = "simulated"

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        assert layer.budget is not None
        return top_slots(layer.dot(query)[:, :, 0], layer, layer.budget)[:, :, None]
