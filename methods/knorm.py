"""L2 norm: keep the tokens whose keys are shortest.

Source: Devoto et al. 2024, "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430);
alessiodevoto/l2compress, cache.py. Keys with a small norm tend to receive much attention, so no query is needed to
choose. RoPE turns keys without changing their norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, top_slots


@dataclass
class KNorm(Method):
    """recent: that many newest tokens are kept whatever their norm. interval: decode steps from one eviction to the
    next, in which the cache grows.
    """

    recent: int = 0
    interval: int = 1

    notes: ClassVar[dict[str, str]] = {
        "recent": "official code, kvpress and ours 0",
        "interval": "official code and ours: after every token, official down to a share (0.98) of what is cached once "
        "there are 1,000 tokens, ours down to the budget; kvpress: after the prompt only",
        "dense_layers": "official scripts 0 and 1, some also 2 or 12; ours 0 and 1; kvpress none",
    }

    def __post_init__(self) -> None:
        for key, least in (("recent", 0), ("interval", 1)):
            if getattr(self, key) < least:
                raise UserError.of(f"method.{key}", getattr(self, key), f"must be at least {least}")

    def smallest_budget(self) -> int:
        return max(self.recent, 1) + 1  # what stays, and the current token

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        self._evict(layer, after=1)

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        self._evict(layer, after=self.interval)

    def _evict(self, layer: KVLayer, after: int) -> None:
        """Back to budget - 1 tokens when so many more are there: the next step then reads the budget."""
        if layer.budget is None or layer.index in self.dense_layers or layer.length < layer.budget - 1 + after:
            return
        norms = layer.keys.float().norm(dim=-1)  # [b, H, n]; float: squares overflow half precision
        layer.keep(top_slots(-norms, layer, layer.budget - 1, recent=self.recent))
