"""What SnapKV and R-KV share: cached tokens are judged by the last queries, at the prompt's end and every so often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, Observation
from fasa_bench.softmax import scaled


@dataclass
class WindowEviction(Method):
    """Keeps the newest `window` tokens and the best of the older ones, the *past*; budget - 1 tokens are left.

    window: the newest tokens, whose queries judge the past; part of the budget. kernel: neighbours that one score is
    pooled over, odd. interval: generated tokens between two evictions, so that a step reads up to budget + interval - 1
    tokens; None evicts once, after the prompt.
    """

    window: int = 32
    kernel: int = 7
    interval: int | None = 128

    padding: ClassVar[bool] = False  # rows of different lengths would have to evict at different steps

    def __post_init__(self) -> None:
        for key in ("window", "kernel", "interval"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise UserError.of(f"method.{key}", value, "must be at least 1")
        if self.kernel % 2 == 0:
            raise UserError.of("method.kernel", self.kernel, "must be odd")

    def observes(self) -> Observation:
        return Observation(window=self.window)

    def smallest_budget(self) -> int:
        return self.window + 2  # a token of the past and the current one; the official codes insist on it too

    def scores(self, layer: KVLayer, queries: Tensor) -> Tensor:
        """Worth of the past tokens by the window's queries [b, Hq, w, d]: [b, H or Hq, n - w] float32."""
        raise NotImplementedError

    def full(self, layer: KVLayer) -> bool:
        """The prompt holds more than may stay."""
        assert layer.budget is not None
        return layer.length >= layer.budget

    def due(self, layer: KVLayer, interval: int) -> bool:
        """It is time to evict again, after a step."""
        assert layer.budget is not None
        return layer.length >= layer.budget - 1 + interval

    def evict(self, layer: KVLayer, queries: Tensor) -> None:
        layer.keep(best_and_window(self.scores(layer, queries), layer).sort(dim=-1).values)

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        if layer.budget is None or layer.index in self.dense_layers:
            return
        assert query is not None
        if self.full(layer):
            self.evict(layer, query)
        if self.interval is not None:
            layer.state["queries"] = query.clone()  # not a view of what other methods observe

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        if self.interval is None or "queries" not in layer.state:
            return
        queries = layer.state["queries"]
        oldest = max(queries.shape[2] + 1 - self.window, 0)  # a short prompt leaves room
        queries = layer.state["queries"] = torch.cat([queries[:, :, oldest:], query], dim=2)
        if self.due(layer, self.interval):
            self.evict(layer, queries)


def best_and_window(scores: Tensor, layer: KVLayer) -> Tensor:
    """Slots of the best past tokens, best first, then of the window, budget - 1 in all: [b, heads, past] -> [.., m]."""
    assert layer.budget is not None
    past = scores.shape[-1]
    best = scores.topk(layer.budget - 1 - (layer.length - past), dim=-1).indices
    window = torch.arange(past, layer.length, device=best.device)
    return torch.cat([best, window.expand(*best.shape[:2], -1)], dim=-1)


def window_logits(layer: KVLayer, queries: Tensor) -> tuple[Tensor, int]:
    """Scaled logits of the window's queries over the whole cache [b, Hq, w, n] float32, and the length of the past."""
    return scaled(layer, layer.dot(queries).float()), layer.length - queries.shape[2]


def group_max_importance(layer: KVLayer, queries: Tensor) -> Tensor:
    """R-KV's importance, before pooling [b, H, past]: mean over the window of a softmax over the past alone.

    The logits of a KV head are the largest ones of its query heads.
    """
    logits, past = window_logits(layer, queries)
    return torch.softmax(logits[..., :past].unflatten(1, (layer.heads, -1)).amax(2), dim=-1).mean(2)


def max_pool(scores: Tensor, kernel: int) -> Tensor:
    """The largest score among `kernel` neighbours, at both ends among fewer: [b, heads, n] -> [b, heads, n]."""
    return max_pool1d(scores, kernel, stride=1, padding=kernel // 2)
