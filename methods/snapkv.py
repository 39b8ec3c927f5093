"""SnapKV: of the prompt, keep what its last queries attend to, in clusters, and the newest tokens.

Paper: arXiv 2404.14469; official code: FasterDecoding/SnapKV, snapkv/monkeypatch/snapkv_utils.py. Settings of the FASA
paper (B.1): window 32, kernel 7, max pooling, and during long generation the same again every n generated tokens, as
in R-KV's protocol (n is not given; R-KV's is 128).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from fasa_bench.cache import KVLayer
from fasa_bench.methods.window import WindowEviction, group_max_importance, max_pool, window_logits
from fasa_bench.softmax import weights


@dataclass
class SnapKV(WindowEviction):
    """pooling: how neighbours share a score. heads: who keeps a set of tokens of its own. With query_head (official)
    the layer holds one copy per query head; with kv_head the query heads of a KV head agree on one.

    group: how they agree: on the mean, max or sum of their scores, before pooling; or as in R-KV's repository
    (`max_logit`) on their largest logits, whose softmax then leaves the window out.
    """

    pooling: Literal["max", "avg"] = "max"
    heads: Literal["kv_head", "query_head"] = "kv_head"
    group: Literal["mean", "max", "sum", "max_logit"] = "mean"

    notes: ClassVar[dict[str, str]] = {
        "window": "paper and official code 32, inside the budget; kvpress 64, KVCache-Factory's runner 8",
        "kernel": "paper 7; official default 5, its runs 7; FASA's code falls back to 5; kvpress 5",
        "pooling": "paper and official runs max; official default and kvpress avg",
        "heads": "official code per query head, at Hq / H times the memory; kvpress and ours per KV head",
        "group": "kvpress mean after pooling; KVCache-Factory and ours mean before it; R-KV's repository max_logit",
        "interval": "FASA's paper every n tokens, n not given; ours R-KV's 128; official code never (null)",
    }

    def scores(self, layer: KVLayer, queries: Tensor) -> Tensor:
        if self.group == "max_logit" and self.heads == "kv_head":
            scores = group_max_importance(layer, queries)
        else:
            scores = window_mass(layer, queries)
            if self.heads == "kv_head":
                grouped = scores.unflatten(1, (layer.heads, -1))
                scores = {"mean": grouped.mean, "max": grouped.amax, "sum": grouped.sum}[self.group](2)
        if self.pooling == "max":
            return max_pool(scores, self.kernel)
        return avg_pool1d(scores, self.kernel, stride=1, padding=self.kernel // 2)  # beyond the ends: zeros


def window_mass(layer: KVLayer, queries: Tensor) -> Tensor:
    """Attention that the window's queries pay to each past token, summed over them: [b, Hq, w, d] -> [b, Hq, past]."""
    logits, past = window_logits(layer, queries)
    w = queries.shape[2]
    later = torch.ones(w, w, dtype=torch.bool, device=logits.device).triu(1)
    logits[..., past:].masked_fill_(later, -torch.inf)
    return weights(layer, logits)[..., :past].sum(2)
