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
from fasa_bench.method import Method, resolve_count, top_slots

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

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        if self.reallocation and layer.budget is not None and layer.index not in self.dense_layers:
            values = layer.values if layer.real is None else layer.values.masked_fill(~layer.real[..., None], 0)
            layer.state["value_sum"] = values.sum(2, dtype=torch.float32)

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        assert layer.budget is not None
        logits, _ = approximate_logits(layer, query, resolve_count("method.rank", self.rank, query.shape[-1]))
        local = self.local if isinstance(self.local, int) else int(self.local * (layer.budget - 1))
        grouped = logits.unflatten(1, (layer.heads, -1))  # [b, H, G, n]
        slots = top_slots(grouped.sum(2), layer, layer.budget, recent=local + 1)
        if self.reallocation:
            chosen = slots[:, :, None].expand(-1, -1, grouped.shape[2], -1)
            layer.state["alpha"] = torch.softmax(grouped, dim=-1).gather(3, chosen).sum(-1).flatten(1)
        return slots[:, :, None]

    def combine(self, layer: KVLayer, query: Tensor, output: Tensor) -> Tensor:
        if not self.reallocation:
            return output
        alpha, mean = layer.state["alpha"][:, None, :, None], mean_value(layer)
        mean = mean.repeat_interleave(output.shape[2] // mean.shape[1], dim=1)[:, None]
        return (alpha * output + (1 - alpha) * mean).to(output.dtype)

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor) -> None:
        if "value_sum" in layer.state:
            layer.state["value_sum"] = layer.state["value_sum"] + _newest_value(layer)


def approximate_logits(layer: KVLayer, query: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Logits from `rank` components of the query: [b, Hq, 1, d] -> [b, Hq, n] float32, components [b, H, rank].

    The query heads of a KV head share the components where the sum of their magnitudes is largest. The scale of the
    logits is corrected by the share of the query's magnitude that they cover. Padding gets the least number.
    """
    magnitude = query.float().abs()
    grouped = magnitude[:, :, 0].unflatten(1, (layer.heads, -1)).sum(2)
    components = grouped.topk(rank, dim=-1).indices
    mask = torch.zeros_like(grouped).scatter(2, components, 1.0)
    mask = mask.repeat_interleave(query.shape[1] // layer.heads, dim=1)[:, :, None]
    coverage = (magnitude * mask).sum(-1) / magnitude.sum(-1)
    # a component that is not chosen is 0 in the query and adds exactly nothing: one product for all heads
    logits = layer.dot(query * mask.to(query.dtype))[:, :, 0].float() * layer.scale / coverage.sqrt()
    if layer.real is not None:
        logits = logits.masked_fill(~layer.real, torch.finfo(logits.dtype).min)
    return logits, components


def mean_value(layer: KVLayer) -> Tensor:
    """Mean of the values of all tokens held: [b, H, d] float32. The sum leaves out the current one until `decoded`."""
    count = layer.length if layer.real is None else layer.real.sum(-1, keepdim=True)
    return (layer.state["value_sum"] + _newest_value(layer)) / count


def _newest_value(layer: KVLayer) -> Tensor:
    """[b, H, d] float32."""
    slot = torch.full((layer.batch, 1, 1), layer.length - 1, device=layer.device)
    return layer.gather(slot)[1][:, :, 0].float()
