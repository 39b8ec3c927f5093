"""Golden cases of SnapKV, PyramidKV and R-KV. Official budgets are what stays in the cache; ours add the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch

from fasa_bench.attention import attend
from fasa_bench.cache import KVLayer
from fasa_bench.layer_budget import pyramid
from fasa_bench.method import check_budget
from fasa_bench.methods.rkv import RKV, redundancy
from fasa_bench.methods.snapkv import SnapKV
from fasa_bench.methods.window import WindowEviction, group_max_importance, max_pool
from tests.conformance.adapters import Arrays, append, layer_of


def queries(arrays: Arrays, tokens: slice) -> torch.Tensor:
    return torch.from_numpy(arrays["q"][:, tokens]).float()[None]


def per_head(layer: KVLayer, heads: int) -> np.ndarray:
    return layer.positions[0].expand(heads, -1).numpy()


def snapkv_of(params: dict[str, Any], heads: Literal["kv_head", "query_head"]) -> SnapKV:
    pooling: Literal["max", "avg"] = "avg" if params.get("pooling") == "avgpool" else "max"
    group = params.get("gqa_score_agg", "mean")
    return SnapKV(
        "snapkv",
        [],
        window=params["window_size"],
        kernel=params["kernel_size"],
        pooling=pooling,
        heads=heads,
        group=group,
        interval=None,
    )


def compressed(method: WindowEviction, arrays: Arrays, capacity: int, heads: int) -> tuple[np.ndarray, Arrays]:
    """What stays of the prompt, per head, and the scores if it was longer than the official code leaves alone."""
    check_budget(capacity + 1, method)
    layer = layer_of(arrays, slice(None))
    layer.budget = capacity + 1
    window = queries(arrays, slice(-method.window, None))
    scored = {"exp_scores": method.scores(layer, window)[0].numpy()} if layer.length >= capacity else {}
    method.prefill(layer, window)
    return per_head(layer, heads), scored


def snapkv(heads: Literal["kv_head", "query_head"]) -> Callable[[Arrays, dict[str, Any]], Arrays]:
    def adapter(arrays: Arrays, params: dict[str, Any]) -> Arrays:
        width = len(arrays["q" if heads == "query_head" else "k"])
        kept, scored = compressed(snapkv_of(params, heads), arrays, params["max_capacity_prompt"], width)
        return {"exp_kept": kept, **scored}

    return adapter


def snapkv_of_rkv(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    method = snapkv_of({**params, "gqa_score_agg": "max_logit"}, "kv_head")
    kept, scored = compressed(method, arrays, params["budget"], len(arrays["k"]))
    return {"exp_kept": kept, **scored}


def pyramidkv(heads: Literal["kv_head", "query_head"]) -> Callable[[Arrays, dict[str, Any]], Arrays]:
    def adapter(arrays: Arrays, params: dict[str, Any]) -> Arrays:
        method = snapkv_of(params, heads)
        capacity, length = params["max_capacity_prompt"], arrays["k"].shape[1]
        check_budget(capacity + 1, method)
        budgets = pyramid(
            capacity,
            params["num_hidden_layers"],
            length=length,
            window=method.window,
            beta=params["beta"],
            rounding="official",
        )
        width = len(arrays["q" if heads == "query_head" else "k"])
        found: Arrays = {}
        for index in params["layers"]:
            found[f"exp_kept_layer{index}"], scored = compressed(method, arrays, budgets[index], width)
            found |= scored
        counts = [found[f"exp_kept_layer{index}"].shape[1] for index in params["layers"]]
        return {**found, "exp_n_kept": np.array(counts)}

    return adapter


def rkv_of(params: dict[str, Any]) -> RKV:
    direction, _, percent = params["retain_direction"].partition("_")
    return RKV(
        "rkv",
        [],
        window=params["window_size"],
        kernel=params["kernel_size"],
        mix_lambda=params["mix_lambda"],
        retain=direction,
        retain_ratio=params["retain_ratio"] if percent else 0.0,
        interval=params.get("divide_length"),
        order="score",
    )


def rkv_single(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    method, heads = rkv_of(params), len(arrays["k"])
    kept, scored = compressed(method, arrays, params["budget"], heads)
    found = {"exp_kept": np.sort(kept)}
    if scored:
        found["exp_final"] = scored["exp_scores"]
        layer = layer_of(arrays, slice(None))
        importance = group_max_importance(layer, queries(arrays, slice(-method.window, None)))
        found["exp_importance"] = max_pool(importance, method.kernel)[0].numpy()
        repeated = redundancy(layer.keys, method.threshold, method.retain, method.retain_ratio)
        found["exp_redundancy"] = repeated[0].numpy()
    return found


def rkv_decode(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """The hooks as the engine calls them, token by token; an eviction is an event, official order included."""
    method, heads, length = rkv_of(params), len(arrays["k"]), params["prefill"]
    check_budget(params["budget"] + 1, method)
    layer = layer_of(arrays, slice(length))
    layer.budget = params["budget"] + 1
    found: Arrays = {}
    events: list[int] = []
    keep = layer.keep

    def recorded(slots: torch.Tensor) -> None:
        keep(slots)
        found[f"exp_cache_order_event{len(events)}"] = per_head(layer, heads)
        found[f"exp_kept_event{len(events)}"] = np.sort(per_head(layer, heads))
        events.append(len(lengths))

    layer.keep = recorded  # type: ignore[method-assign]
    output, _, _ = attend(layer, queries(arrays, slice(length - 1, length)), None)
    outputs, lengths = [output], []
    method.prefill(layer, queries(arrays, slice(max(length - method.window, 0), length)))
    lengths.append(layer.length)
    for now in range(length, arrays["k"].shape[1]):
        append(layer, arrays, slice(now, now + 1))
        query = queries(arrays, slice(now, now + 1))
        output, weights, _ = attend(layer, query, None)
        method.decoded(layer, query, weights)
        outputs.append(output)
        lengths.append(layer.length)
    found["exp_attn_out"] = torch.cat(outputs)[:, 0].numpy()
    return {**found, "exp_cache_len": np.array(lengths), "exp_event_steps": np.array(events)}


ADAPTERS: dict[tuple[str, str], Callable[[Arrays, dict[str, Any]], Arrays]] = {
    ("snapkv", "official_query_head"): snapkv("query_head"),
    ("snapkv", "kvf_kv_head"): snapkv("kv_head"),
    ("snapkv", "rkv_repo"): snapkv_of_rkv,
    ("pyramidkv", "query_head"): pyramidkv("query_head"),
    ("pyramidkv", "kv_head"): pyramidkv("kv_head"),
    ("rkv", "single"): rkv_single,
    ("rkv", "decode"): rkv_decode,
}
