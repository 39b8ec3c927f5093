"""R-KV: keep what is important to the last queries and not a repetition of other tokens.

Paper: arXiv 2505.24133; official code: Zefan-Cai/R-KV, rkv/compression/r1_kv.py, rkv/utils.py and rkv/modeling.py.
Importance is the max-pooled attention of the last `window` queries, redundancy the mean cosine similarity of a key to
all others; every `interval` tokens the best by mix_lambda * importance - (1 - mix_lambda) * redundancy stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.methods.window import WindowEviction, best_and_window, group_max_importance, max_pool

ROWS = 128  # keys compared with all others at a time: a prompt's similarities are never held at once


@dataclass
class RKV(WindowEviction):
    """mix_lambda: weight of importance. threshold: cosine from which two keys repeat each other. retain: the neighbour
    that a key's repetitions do not count against, the last or the first one. retain_ratio: with `first`, that share of
    the cached tokens further on. order: how kept tokens lie in the cache, which decides on neighbours and on "last"
    from the second eviction on: by position in the text, or by score, as official.
    """

    window: int = 8
    mix_lambda: float = 0.1
    threshold: float = 0.5
    retain: Literal["last", "first"] = "last"
    retain_ratio: float = 0.0
    order: Literal["position", "score"] = "position"

    notes: ClassVar[dict[str, str]] = {
        "mix_lambda": "paper, README and ours 0.1; official default 0.07",
        "interval": "official: tokens since the program started, or a newline; ours: the sequence's own tokens",
        "retain_ratio": "official first is 0, first_percent > 0; official last_percent is the same as last",
        "order": "official: by score, so that pooling mixes tokens far apart in the text; ours by position",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("mix_lambda", "retain_ratio"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError.of(f"method.{key}", getattr(self, key), "must be from 0 to 1")

    def full(self, layer: KVLayer) -> bool:
        assert layer.budget is not None
        return layer.length >= layer.budget - (self.order == "score")  # official: sorts even if nothing has to go

    def due(self, layer: KVLayer, interval: int) -> bool:
        return (layer.seen - 1) % interval == 0 and self.full(layer)  # official: the step after a full interval

    def evict(self, layer: KVLayer, queries: Tensor) -> None:
        slots = best_and_window(self.scores(layer, queries), layer)
        layer.keep(slots if self.order == "score" else slots.sort(dim=-1).values)

    def scores(self, layer: KVLayer, queries: Tensor) -> Tensor:
        importance = max_pool(group_max_importance(layer, queries), self.kernel)
        repeated = redundancy(layer.keys, self.threshold, self.retain, self.retain_ratio)[..., : importance.shape[-1]]
        return self.mix_lambda * importance - (1 - self.mix_lambda) * repeated


def redundancy(keys: Tensor, threshold: float, retain: str = "last", retain_ratio: float = 0.0) -> Tensor:
    """Softmax over all tokens of their keys' mean cosine similarity to all others: [b, H, n, d] -> [b, H, n] float32.

    Each token spares one token that it resembles (cosine above the threshold), the last or first one; if there is
    none it spares slot 0, as official.
    """
    n = keys.shape[2]
    unit = keys.float()
    unit = unit / (unit.norm(dim=-1, keepdim=True) + 1e-8)
    slots = torch.arange(n, device=keys.device)
    total = torch.zeros_like(unit[..., 0])
    for start in range(0, n, ROWS):
        similar = unit[:, :, start : start + ROWS] @ unit.transpose(-1, -2)
        similar.diagonal(start, -2, -1).zero_()
        alike = torch.where(similar > threshold, slots, 0)
        if retain == "last":
            spared = alike.amax(-1, keepdim=True)
        else:
            spared = alike.kthvalue(max(1, int(n * retain_ratio)), dim=-1, keepdim=True).values
        total += similar.scatter_(-1, spared, 0.0).sum(-2)
    return torch.softmax(total / n, dim=-1)
