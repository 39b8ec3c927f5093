"""Loki: predict the important tokens with the first principal components of the keys, attend to them exactly.

Source: Singhania et al. 2024, "Loki: Low-rank Keys for Efficient Sparse Attention" (arXiv 2406.02542), Alg. 1;
hpcgroup/loki, methods/pca_topk. Offline, the keys of each layer and KV head give an orthonormal basis, sorted by
variance. While decoding, query and keys are compared in its first r components, and each query head attends to the
tokens with the largest such products. The keys' mean is removed for the basis only: its part of a product is the same
for every token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.method import TopTokens, resolve_count
from fasa_bench.principal import Rotary
from fasa_bench.softmax import biased

if TYPE_CHECKING:
    from fasa_bench.calibration import Calibration
    from fasa_bench.models import Model


@dataclass
class Loki(TopTokens):
    """r: principal components that predict, a number or a share of the head dimension.
    rotary: whether the basis is that of the keys after RoPE or before it; what is projected is rotated in both cases.
    """

    r: int | float = 0.25
    rotary: Rotary = "post"

    uses_calibration: ClassVar[bool] = True
    speed: ClassVar[Literal["physical", "simulated"]] = "simulated"  # whole keys are multiplied, see `scores`
    notes: ClassVar[dict[str, str]] = {
        "r": "paper and ours 25 % of the head; in official code a fraction is a share of the keys' variance instead",
        "rotary": "paper: post or pre, whichever is better on a model, of WikiText-103; ours post, of the run's sample",
    }

    def prepare(self, model: Model, calibration: Calibration) -> None:
        basis = calibration.basis(model, self.rotary)  # [layers, H, d, d]
        first = basis[..., : resolve_count("method.r", self.r, basis.shape[-1])]
        self._first = dict(zip(model.rope.layers, first, strict=True))

    def scores(self, layer: KVLayer, query: Tensor, visible: Tensor | None) -> Tensor:
        # kept where and in the type that the layer's queries are
        first = self._first[layer.index] = self._first[layer.index].to(query)  # P [H, d, r]
        projected = query.reshape(query.shape[0], len(first), -1, query.shape[-1]) @ first
        if query.shape[2] == 1:  # q P (k P)' = (q P P') k': brought back, so that the keys stay as they are
            products = layer.dot((projected @ first.mT).reshape(query.shape))
        else:
            products = (projected @ (layer.keys @ first).mT).reshape(*query.shape[:3], -1)
        return biased(layer, products, layer.scale)
