"""A random text of one attention layer, with plain-Python attention, for tests against loops."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fasa_bench.attention import attend, column_mass
from fasa_bench.cache import KVLayer
from fasa_bench.method import Method

HEADS, KV_HEADS, DIM = 4, 2, 8


class Text:
    """Random queries [Hq, n, d], keys and values [H, n, d]; the products are large enough for a peaked softmax."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.q = torch.randn(HEADS, tokens, DIM, generator=draw) * 2
        self.k, self.v = torch.randn(2, KV_HEADS, tokens, DIM, generator=draw)
        self.tokens = tokens

    def logit(self, head: int, query: int, key: int) -> float:
        return float(self.q[head, query] @ self.k[head // (HEADS // KV_HEADS), key]) * DIM**-0.5

    def weights(self, head: int, query: int, keys: list[int]) -> dict[int, float]:
        exponentials = {key: math.exp(self.logit(head, query, key)) for key in keys}
        return {key: value / sum(exponentials.values()) for key, value in exponentials.items()}

    def append(self, layer: KVLayer, start: int, end: int) -> None:
        layer.append(self.k[None, :, start:end], self.v[None, :, start:end], torch.arange(start, end)[None])

    def prompt(self, tokens: int, budget: int) -> KVLayer:
        layer = KVLayer(5)
        layer.scale, layer.budget = DIM**-0.5, budget
        self.append(layer, 0, tokens)
        layer.prompt_mass = column_mass(layer, self.q[None, :, :tokens], torch.arange(tokens)[None])
        return layer

    def step(self, method: Method, layer: KVLayer, token: int) -> Tensor:
        """One decode step as the engine takes it; the slots that were read, [heads, m]."""
        assert layer.budget is not None
        self.append(layer, token, token + 1)
        query = self.q[None, :, token : token + 1]
        slots = method.select(layer, query) if layer.length > layer.budget else None
        _, weights, _ = attend(layer, query, slots, method.ragged)
        method.decoded(layer, query, weights)
        return torch.arange(layer.length)[None] if slots is None else slots[0, :, 0]
