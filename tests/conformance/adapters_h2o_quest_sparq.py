"""Golden cases of H2O, Quest and SparQ, put to our methods; see adapters.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasa_bench.attention import attend, column_mass
from fasa_bench.cache import KVLayer
from fasa_bench.method import Method
from fasa_bench.methods.approximation import approximate_logits, mean_value
from fasa_bench.methods.h2o import H2O
from fasa_bench.methods.h2o_mask_sim import H2OMaskSim
from fasa_bench.methods.quest import Quest
from fasa_bench.methods.sparq import SparQ
from tests.conformance.adapters import Arrays, append, layer_of


def held(layer: KVLayer, heads: int) -> np.ndarray:
    """Positions in the cache, [heads, n]: one row serves all heads until they keep different tokens."""
    return layer.positions[0].expand(heads, -1).numpy()


def query_of(arrays: Arrays, tokens: slice) -> Tensor:
    return torch.from_numpy(arrays["q"][:, tokens]).float()[None]


def prompt_of(arrays: Arrays, tokens: int) -> KVLayer:
    """A layer after the dense pass over the first tokens, with the mass that H2O observes."""
    layer = layer_of(arrays, slice(0, tokens))
    layer.prompt_mass = column_mass(layer, query_of(arrays, slice(0, tokens)), torch.arange(tokens)[None])
    return layer


def steps(arrays: Arrays, method: Method, layer: KVLayer, look: Callable[[KVLayer], np.ndarray], name: str) -> Arrays:
    """Prompt and decode steps as the engine takes them; `look` at the layer after each."""
    assert layer.budget is not None
    prompt = layer.length
    outputs = [attend(layer, query_of(arrays, slice(prompt - 1, prompt)), None)[0][0, 0].numpy()]
    method.prefill(layer, None)
    found = {f"{name}0": look(layer)}
    for token in range(prompt, arrays["k"].shape[1]):
        append(layer, arrays, slice(token, token + 1))
        query = query_of(arrays, slice(token, token + 1))
        slots = method.select(layer, query) if layer.length > layer.budget else None
        output, weights, _ = attend(layer, query, slots)
        method.decoded(layer, query, weights)
        outputs.append(output[0, 0].numpy())
        found[f"{name}{token - prompt + 1}"] = look(layer)
    return found | {"exp_attn_out": np.stack(outputs)}


def h2o_real_drop(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """The official sizes do not count the coming token, ours do: one recent token more.

    A single head, where the official `.squeeze()` raises, is nothing special to ours.
    """
    heavy, recent, heads = params["hh_size"], params["recent_size"], len(arrays["q"])
    method = H2O("h2o", recent=recent + 1, heads="query_head")
    layer = prompt_of(arrays, params["prefill"])
    layer.budget = heavy + recent + 1
    found = steps(arrays, method, layer, lambda layer: held(layer, heads), "exp_kept_step")
    return found | {"exp_hh_score": layer.state["mass"][0].numpy()} if heads > 1 else {}


def h2o_mask_sim(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    heavy, recent = (int(params[f"{part}_ratio"] * params["prefill"]) for part in ("heavy", "recent"))
    method = H2OMaskSim("h2o_mask_sim", recent=recent + 1, heads="query_head")
    layer = prompt_of(arrays, params["prefill"])
    layer.budget = heavy + recent + 1

    def mask(layer: KVLayer) -> np.ndarray:
        """What the next step will read, the coming token included."""
        visible = torch.zeros(len(arrays["q"]), layer.length + 1, dtype=torch.bool)
        slots = layer.state.get("slots", torch.arange(layer.length + 1)[None, None])[0]
        return visible.scatter(1, slots.expand(len(visible), -1), True).numpy()

    found = steps(arrays, method, layer, mask, "exp_next_mask_step")
    return found | {"exp_scores": layer.state["mass"][0].numpy(), "exp_budgets": np.array([heavy, recent])}


def h2o_prompt(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """KVCache-Factory evicts once, after the prompt, and does not count the coming token either."""
    window, shared = params["window_size"], "gqa_score_agg" in params
    group, heads = params.get("gqa_score_agg", "sum"), arrays["k" if shared else "q"].shape[0]
    method = H2O("h2o", recent=window + 1, interval=None, heads="kv_head" if shared else "query_head", group=group)
    layer = prompt_of(arrays, arrays["k"].shape[1])
    layer.state["mass"] = layer.prompt_mass  # as `prefill` does, which then evicts
    scores = method.scores(layer)[0, :, : layer.length - window].numpy()
    layer.budget = params["max_capacity_prompt"] + 1
    method.prefill(layer, None)
    return {"exp_kept": held(layer, heads), "exp_scores": scores}


def asked(arrays: Arrays, method: Method, budget: int, masked: int = 0) -> tuple[KVLayer, Tensor]:
    """A layer that holds all tokens of the case, the last one appended after the prompt, and the query of that one."""
    tokens = arrays["k"].shape[1]
    positions = torch.arange(-masked, tokens - masked).clamp(min=-1)
    layer = KVLayer(0)
    for part in (slice(0, tokens - 1), slice(tokens - 1, tokens)):
        keys, values = (torch.from_numpy(arrays[name][:, part]).float()[None] for name in "kv")
        layer.append(keys, values, positions[part][None])
        if part.start == 0:
            layer.scale, layer.padded, layer.budget = keys.shape[-1] ** -0.5, masked > 0, budget
            method.prefill(layer, None)
    return layer, query_of(arrays, slice(0, 1))


def quest_pages(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """official_eval and cuda_reference. Where the CUDA path reads everything, ours is not asked to select; the
    evaluation path drops a page even then (budget >= tokens), and so does ours if it is asked.
    """
    official = "token_budget" in params
    if official:
        method, budget = Quest("quest", page=params["chunk_size"]), params["token_budget"]
    else:
        method = Quest("quest", page=params["page_size"], min_pages=1, newest="forced")
        budget = params["page_size"] * params["page_budget"]
    layer, query = asked(arrays, method, budget)
    everything = torch.arange(layer.length).expand(1, query.shape[1], 1, -1)
    slots = method.select(layer, query) if official or layer.length > budget else everything
    scores = method.page_scores(layer, query)[0].numpy()
    read = [row[row >= 0].numpy() for row in slots[0, :, 0]]
    return {
        "exp_page_scores": scores if official else scores[:, :-1],
        "exp_token_mask": np.stack([np.isin(np.arange(layer.length), row) for row in read]),
        "exp_pages": np.stack([np.unique(row // method.page) for row in read]),
        "exp_attn_out": attend(layer, query, slots, ragged=True)[0][0, 0].numpy(),
    }


def quest_tokens(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """KVCache-Factory's variant. The case names the chosen pages, from which the tokens are then cut."""
    method = Quest("quest", page=params["page_size"], unit="tokens", recent=params["recent_size"])
    layer, query = asked(arrays, method, params["token_budget"])
    if layer.length <= params["token_budget"]:
        return {"exp_kept": held(layer, query.shape[1])}
    scores = method.page_scores(layer, query)
    return {
        "exp_kept": method.select(layer, query)[0, :, 0].numpy(),
        "exp_page_scores": scores[0].numpy(),
        "exp_pages": method.best_pages(layer, scores)[0].numpy(),
    }


def sparq(arrays: Arrays, params: dict[str, Any]) -> Arrays:
    """k does not count the current token, our budget does."""
    mean = params["reallocate_to_mean_value"]
    method = SparQ("sparq", rank=params["rank"], local=params["local_k"], reallocation=mean)
    budget = min(params["k"] + 1, arrays["k"].shape[1])
    layer, query = asked(arrays, method, budget, params.get("masked_prefix", 0))
    logits, components = approximate_logits(layer, query, params["rank"])
    slots = method.select(layer, query)
    output, weights, _ = attend(layer, query, slots)
    output = method.combine(layer, query, output)
    alpha = layer.state["alpha"][..., 0] if mean else torch.ones(query.shape[:2])
    if not mean:  # the case tells the mean anyway
        layer, _ = asked(arrays, SparQ("sparq"), budget, params.get("masked_prefix", 0))
    chosen = slots[0, :, 0].repeat_interleave(query.shape[1] // slots.shape[1], dim=0)
    return {
        "exp_components": components[0].numpy(),
        "exp_approx_scores": logits[0].numpy(),
        "exp_topk": slots[0, :, 0].numpy(),
        "exp_alpha": alpha[0].numpy(),
        "exp_mean_value": mean_value(layer)[0].numpy(),
        "exp_attn_out": output[0, 0].numpy(),
        "exp_weights": torch.zeros_like(logits[0]).scatter(1, chosen, alpha[0, :, None] * weights[0]).numpy(),
    }


ADAPTERS: dict[tuple[str, str], Callable[[Arrays, dict[str, Any]], Arrays]] = {
    ("h2o", "official_real_drop"): h2o_real_drop,
    ("h2o", "official_mask_sim"): h2o_mask_sim,
    ("h2o", "kvf_query_head"): h2o_prompt,
    ("h2o", "kvf_kv_head"): h2o_prompt,
    ("quest", "official_eval"): quest_pages,
    ("quest", "cuda_reference"): quest_pages,
    ("quest", "kvf_tokens"): quest_tokens,
    ("sparq", "official"): sparq,
}
