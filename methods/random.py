"""Random: the floor of every comparison. Each step reads tokens drawn at random for each KV head; nothing is evicted.

What is drawn depends on nothing but the seed, the layer and the position of the current token in its own text, so it is
the same on every device, in every batch, and whatever ran before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, top_slots


@dataclass
class Random(Method):
    """current: the current token is always read, otherwise it is drawn like any other. seed: of the draws."""

    current: bool = True
    seed: int = 0

    notes: ClassVar[dict[str, str]] = {"current": "ours: always read, since every method's step has just made it"}

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError.of("method.seed", self.seed, "must be at least 0")

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        assert layer.budget is not None
        positions = layer.positions[:, 0, -1].tolist()  # of each row's current token: padding does not count
        drawn = [self._draw(layer, position) for position in positions]
        scores = torch.stack(drawn).to(layer.device)
        return top_slots(scores, layer, layer.budget, recent=int(self.current))[:, :, None]

    def _draw(self, layer: KVLayer, position: int) -> Tensor:
        """A random number for each KV head and token up to `position`, at the end of the row: [H, n] float32."""
        draws = np.random.default_rng((self.seed, layer.index, position)).random(
            (layer.heads, position + 1), np.float32
        )
        return torch.nn.functional.pad(torch.from_numpy(draws), (layer.length - position - 1, 0))
