"""Oracle: the tokens with the largest exact attention logits, chosen anew by each query head at each step.

An upper bound for selection, not a method to deploy: it reads every key to choose (paper B.1; authors' code, Llama
path: pre-softmax logits, per query head, the current token a candidate).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.method import Method, top_slots


@dataclass
class Oracle(Method):
    speed: ClassVar[Literal["physical", "simulated"]] = "simulated"

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        assert layer.budget is not None
        return top_slots(logits(layer, query), layer, layer.budget)[:, :, None]


def logits(layer: KVLayer, query: Tensor) -> Tensor:
    """Unscaled attention logits of every query head over the layer: [b, Hq, 1, d] -> [b, Hq, n]."""
    keys = layer.keys
    grouped = query.reshape(keys.shape[0], keys.shape[1], -1, keys.shape[3])
    return torch.matmul(grouped, keys.transpose(-1, -2)).flatten(1, 2)
