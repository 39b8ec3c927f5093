"""SparQ: approximate logits from the largest components of the query choose the tokens that are read exactly.

Source: graphcore-research/llm-inference-research, llminference/methods/ann_attention.py; Algorithm 1 of the paper
(arXiv 2312.04985) where a KV head has one query head. What is not read gets the mean value in its stead: the output
is alpha * attention + (1 - alpha) * mean of all values, alpha the approximate weight of the tokens that are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, resolve_count, top_mask, top_slots
from fasa_bench.methods.approximation import covered, many_logits, mean_values, newest_values

if TYPE_CHECKING:
    from fasa_bench.calibration import Calibration
    from fasa_bench.models import Model


@dataclass
class SparQ(Method):
    """rank: components of the query that score (the paper's r), a number or a share of the head dimension.

    local: newest tokens before the current one that are always read, with it, inside the budget: a number, or a share
    of the budget without the current token. reallocation: give the mean value the weight that is not read.
    """

    rank: int | float = 0.25
    local: int | float = 0.25
    reallocation: bool = True

    speed: ClassVar[Literal["physical", "simulated"]] = "simulated"  # the torch path multiplies whole keys
    notes: ClassVar[dict[str, str]] = {
        "rank": "authors' runs 8 to 64 of 128; FASA's paper does not state it; ours 25 %, what FASA reads to score",
        "local": "authors' runs a quarter of k, no default in their code; FASA's paper does not state it; ours 25 %",
        "reallocation": "authors' runs with and without, the paper's algorithm with; ours with",
    }

    def __post_init__(self) -> None:
        if self.local < 0 or (isinstance(self.local, float) and self.local > 1):
            raise UserError.of("method.local", self.local, "must be at least 0 tokens or a share in [0, 1]")

    def prepare(self, model: Model, calibration: Calibration) -> None:
        resolve_count("method.rank", self.rank, model.rope.head_dim)

    def smallest_budget(self) -> int:
        return 1 + (self.local if isinstance(self.local, int) else 0)

    @property
    def parallel(self) -> bool:
        return True

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        if self.reallocation and layer.budget is not None and layer.index not in self.dense_layers:
            values = layer.values if layer.real is None else layer.values.masked_fill(~layer.real[..., None], 0)
            layer.state["value_sum"] = values.sum(2, dtype=torch.float32)

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        visible = None if layer.real is None else layer.real[:, :, None]
        grouped = self._grouped(layer, query, visible)[:, :, :, 0]  # [b, H, G, n]
        slots = top_slots(grouped.sum(2), layer, self._budget(layer), recent=self._recent(layer))
        if self.reallocation:
            read = torch.zeros_like(grouped[:, :, 0]).scatter(2, slots, 1.0)
            read = read.repeat_interleave(grouped.shape[2], dim=1)
            layer.state["alpha"] = covered(layer, grouped.flatten(1, 2), read)[..., None]
        return slots[:, :, None]

    def reads(self, layer: KVLayer, query: Tensor, visible: Tensor) -> Tensor:
        grouped = self._grouped(layer, query, visible)
        read = top_mask(grouped.sum(2), visible, self._budget(layer), recent=self._recent(layer))
        if self.reallocation:
            heads = read.float().repeat_interleave(grouped.shape[2], dim=1)  # a product with bool is slower
            layer.state["alpha"] = covered(layer, grouped.flatten(1, 2), heads)
        return read

    def combine(self, layer: KVLayer, query: Tensor, output: Tensor) -> Tensor:
        if not self.reallocation:
            return output
        alpha = layer.state["alpha"].transpose(1, 2)[..., None]  # [b, q, Hq, 1]
        mean = mean_values(layer, query.shape[2]).transpose(1, 2)
        mean = mean.repeat_interleave(output.shape[2] // mean.shape[2], dim=2)
        return (alpha * output + (1 - alpha) * mean).to(output.dtype)

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        if "value_sum" in layer.state:
            layer.state["value_sum"] = layer.state["value_sum"] + newest_values(layer, query.shape[2]).sum(2)

    def _grouped(self, layer: KVLayer, query: Tensor, visible: Tensor | None) -> Tensor:
        """Approximate logits by KV head: [b, H, G, q, n] float32."""
        rank = resolve_count("method.rank", self.rank, query.shape[-1])
        return many_logits(layer, query, rank, visible)[0].unflatten(1, (layer.heads, -1))

    def _budget(self, layer: KVLayer) -> int:
        assert layer.budget is not None
        return layer.budget

    def _recent(self, layer: KVLayer) -> int:
        """Newest tokens that are always read, the current one included."""
        return 1 + (self.local if isinstance(self.local, int) else int(self.local * (self._budget(layer) - 1)))
