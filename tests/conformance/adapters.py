"""How a golden case is put to our methods: case in, arrays named like its `exp_` arrays out.

Keys and values are [heads, T, d] without a batch; positions are compared as sets, so `kept` is ascending.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fasa_bench.attention import attend
from fasa_bench.cache import KVLayer
from fasa_bench.methods.streamingllm import StreamingLLM, sinks_and_newest
from fasa_bench.rope import Rope

Arrays = dict[str, np.ndarray]


def layer_of(arrays: Arrays, tokens: slice) -> KVLayer:
    """A layer that holds the given tokens of the case at their true positions."""
    layer = KVLayer(0)
    append(layer, arrays, tokens)
    layer.scale = arrays["k"].shape[-1] ** -0.5
    return layer


def append(layer: KVLayer, arrays: Arrays, tokens: slice) -> None:
    keys, values = (torch.from_numpy(arrays[name][:, tokens]).float()[None] for name in "kv")
    layer.append(keys, values, torch.arange(arrays["k"].shape[1])[tokens][None])


def kept(layer: KVLayer) -> np.ndarray:
    return layer.positions[0, 0].numpy()


def streamingllm_start_recent(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """The official cache class counts its budget before the next token is added, ours with it: one more."""
    start, recent = params["start_size"], params["recent_size"]
    method = StreamingLLM("streamingllm", start=start)
    layer, found, done = layer_of(arrays, slice(0, 0)), {}, 0
    layer.budget = start + recent + 1
    for operation, *numbers in params["ops"]:
        if operation == "append":
            append(layer, arrays, slice(done, done + numbers[0]))
            done += numbers[0]
            continue
        if operation == "call":
            method.prefill(layer, None)
        elif operation == "evict_for_space":
            if layer.length + numbers[0] > start + recent:
                layer.keep(sinks_and_newest(layer, start, max(recent - numbers[0], 0)))
        elif operation == "evict_range":
            slots = torch.arange(layer.length)
            layer.keep(slots[(slots < numbers[0]) | (slots >= numbers[1])][None, None])
        else:
            raise NotImplementedError(operation)
        found[f"exp_kept_after_op{len(found)}"] = kept(layer)
    return found


def streamingllm_pos_shift(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """The case's keys are not rotated yet: rotate them at their true places, then let the method move the sinks."""
    tokens, dim = arrays["k"].shape[1:]
    frequency = params["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
    pairs = [(i, i + dim // 2) for i in range(dim // 2)]
    rope = Rope("half", pairs, [], frequency.float(), dim)
    places = torch.arange(tokens)
    rotated = arrays | {"k": rope.rotate(torch.from_numpy(arrays["k"]).float(), places).numpy()}
    query = rope.rotate(torch.from_numpy(arrays["q"]).float(), places[-1:])[None]
    method = StreamingLLM("streamingllm", start=params["start_size"], positions="cache")
    method.prepare(SimpleNamespace(rope=rope), None)  # type: ignore[arg-type]
    layer = layer_of(rotated, slice(0, tokens - 1))
    layer.budget = params["start_size"] + params["recent_size"] + 1
    method.prefill(layer, None)
    append(layer, rotated, slice(tokens - 1, tokens))
    output, _, _ = attend(layer, query, None)
    return {"exp_kept": kept(layer), "exp_attn_out": output[0, 0].numpy()}


def streamingllm_prompt(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """Re-implementations that evict once after the prompt (KVCache-Factory, R-KV's repository)."""
    budget = params.get("max_capacity_prompt", params.get("budget"))
    start = params["first_tokens"] if "first_tokens" in params else budget - params["window_size"]
    layer = layer_of(arrays, slice(None))
    layer.budget = budget + 1
    StreamingLLM("streamingllm", start=start).prefill(layer, None)
    return {"exp_kept": kept(layer)}


ADAPTERS: dict[tuple[str, str], Callable[[Arrays, dict[str, Any]], Arrays]] = {
    ("streamingllm", "official_start_recent"): streamingllm_start_recent,
    ("streamingllm", "official_pos_shift"): streamingllm_pos_shift,
    ("streamingllm", "kvf"): streamingllm_prompt,
    ("streamingllm", "rkv_repo"): streamingllm_prompt,
}
