"""FASA: predict the important tokens with a few frequency chunks (TIP), attend to them exactly (FAC).

Paper: arXiv 2602.03152, Sec. 4, Alg. 1. Offline, contextual agreement (CA) ranks the frequency chunks (FCs) of each
query head; at each step the best `n_tip` of them score all cached tokens, and the head attends to the best `budget`
tokens at their original positions. This is FASA-C: the cache stays whole on the device and less of it is read.
fasa_c and fasa are the paper's settings; fasa_plus is ours: a KV head's query heads share FCs and tokens, and the
newest tokens are always among the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.clock import stage
from fasa_bench.errors import UserError
from fasa_bench.method import TopTokens, group_softmax, resolve_count
from fasa_bench.methods.dominant import dominant_dimensions, highest_of_group, kv_heads_of, mean_of_group
from fasa_bench.methods.fused import Backend, Kernels
from fasa_bench.near import Prefetch
from fasa_bench.rope import Pairing
from fasa_bench.split import in_one

if TYPE_CHECKING:
    from fasa_bench.calibration import Calibration
    from fasa_bench.models import Model

Granularity = Literal["query_head", "kv_head"]
Share = Literal["max", "softmax"]


@dataclass
class FasaC(TopTokens):
    """n_tip: frequency chunks per head, a number or a share of all. pairing: which dimensions make a chunk.

    fc_granularity: kv_head averages CA over the query heads of a KV head, which then use the same chunks.
    token_granularity: kv_head lets them read the same tokens.
    share: what a token is then worth: the mean over the heads of the softmax of their scores, or the largest TIP
        score that one of the heads gives it.
    sinks, recent: first and newest tokens that are always among the budget.
    position_bias: with ALiBi, add the bias to the chunks' scores; it takes no key to know it.
    backend: who computes a step: triton (on CUDA) or cpp (compiled, on a CPU in float32), kernels for one sequence or
        batch without padding; torch for everything. auto: the kernels where they can be had.
    """

    n_tip: int | float = 0.25
    pairing: Pairing = "rope"
    fc_granularity: Granularity = "query_head"
    token_granularity: Granularity = "query_head"
    share: Share = "softmax"
    sinks: int = 0
    recent: int = 0
    position_bias: bool = True
    backend: Backend = "auto"

    uses_calibration: ClassVar[bool] = True
    notes: ClassVar[dict[str, str]] = {
        "n_tip": "paper and authors' code 16 of 64 chunks (25 %), ours 25 %",
        "pairing": "paper and ours: dimensions that rotate together; authors' code: adjacent ones on every model",
        "fc_granularity": "paper and authors' code per query head; fasa_plus per KV head",
        "token_granularity": "paper and authors' code per query head; fasa_plus per KV head",
        "share": "paper and authors' code share nothing; max is faster than the mean softmax and finds fewer pass keys",
        "sinks": "paper and authors' code none",
        "recent": "paper and authors' code none (the current token is a candidate); fasa_plus 16",
        "position_bias": "ALiBi models only; the paper does not say; ours with the bias",
        "dense_layers": "authors' code keeps layer 0 dense on Llama; the paper does not say so; ours none",
    }

    def __post_init__(self) -> None:
        for key, count in (("sinks", self.sinks), ("recent", self.recent)):
            if count < 0:
                raise UserError.of(f"method.{key}", count, "must be at least 0")

    def prepare(self, model: Model, calibration: Calibration) -> None:
        units, heads = model.rope.units(self.pairing), kv_heads_of(model.config)
        count = resolve_count("method.n_tip", self.n_tip, len(units))
        agreement = calibration.agreement(model, self.pairing)  # [layers, Hq, chunks]
        if self.fc_granularity == "kv_head":
            agreement = mean_of_group(agreement, heads).repeat_interleave(agreement.shape[1] // heads, dim=1)
        dominant = dominant_dimensions(agreement, units, count, heads, model.rope.head_dim)
        self._layers = dict(zip(model.rope.layers, dominant, strict=True))
        share = "none" if self.token_granularity == "query_head" else self.share
        self._kernels = Kernels(self.backend, share, self.sinks, self.recent)

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        if layer.budget is not None and layer.length >= layer.budget and layer.index not in self.dense_layers:
            self._split(layer)

    def step(self, layer: KVLayer, query: Tensor) -> tuple[Tensor, int] | None:
        if not layer.is_split:  # until now everything was read, as full KV does
            self._split(layer)
        return self._kernels.step(layer, query, self._layers[layer.index].on(query))

    def _split(self, layer: KVLayer, offload: Prefetch | None = None) -> None:
        dominant = self._layers[layer.index]
        layer.split(dominant.order, dominant.lead, self._kernels.layout(layer), offload)

    def smallest_budget(self) -> int:
        return self.sinks + max(self.recent, 1)

    def always(self, layer: KVLayer) -> tuple[int, int]:
        return self.sinks, self.recent

    def scores(self, layer: KVLayer, query: Tensor, visible: Tensor | None) -> Tensor:
        with stage("tip"):
            products = self._layers[layer.index].on(query).products(layer, query, self.position_bias)
            if self.token_granularity == "kv_head" and self.share == "max":
                products = highest_of_group(products, layer.heads)
            scores = in_one(products, layer.length)
            if self.token_granularity == "query_head" or self.share == "max":
                return scores
            return group_softmax(scores, layer, visible, position_bias=False)  # it is there already
