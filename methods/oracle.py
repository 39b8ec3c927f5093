"""Oracle: the tokens with the largest exact attention logits, chosen anew by each query head at each step.

An upper bound for selection, not a method to deploy: it reads every key to choose (paper B.1; authors' code, Llama
path: pre-softmax logits, per query head, the current token a candidate).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.method import TopTokens
from fasa_bench.softmax import biased


@dataclass
class Oracle(TopTokens):
    speed: ClassVar[Literal["physical", "simulated"]] = "simulated"

    def scores(self, layer: KVLayer, query: Tensor, visible: Tensor | None) -> Tensor:
        return biased(layer, layer.dot(query), layer.scale)
