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
from fasa_bench.method import TopTokens


@dataclass
class Random(TopTokens):
    """current: the current token is always read, otherwise it is drawn like any other. seed: of the draws."""

    current: bool = True
    seed: int = 0

    notes: ClassVar[dict[str, str]] = {"current": "ours: always read, since every method's step has just made it"}

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise UserError.of("method.seed", self.seed, "must be at least 0")

    def always(self, layer: KVLayer) -> tuple[int, int]:
        return 0, int(self.current)

    def scores(self, layer: KVLayer, query: Tensor, visible: Tensor | None) -> Tensor:
        current = layer.positions[:, 0, -query.shape[2] :].tolist()  # of each row's own text: padding does not count
        drawn = [
            torch.stack([self._draw(layer, position, len(row) - 1 - i) for i, position in enumerate(row)], dim=1)
            for row in current
        ]
        return torch.stack(drawn).to(layer.device)

    def _draw(self, layer: KVLayer, position: int, later: int) -> Tensor:
        """A random number for each KV head and token up to `position`, before the `later` last ones: [H, n] float32."""
        draws = np.random.default_rng((self.seed, layer.index, position)).random(
            (layer.heads, position + 1), np.float32
        )
        return torch.nn.functional.pad(torch.from_numpy(draws), (layer.length - later - position - 1, later))
