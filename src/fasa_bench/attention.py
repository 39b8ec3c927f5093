"""Attention registered with transformers: dense over the prompt, by the method's choice while decoding.

transformers calls `forward` for every layer with un-repeated keys and values and hands `attention_mask` through from
`hand_padding_on`, so that nothing of a model's code is copied or patched (see facts: AttentionInterface,
AttentionMaskInterface). Causality never needs a mask of transformers': a token is visible when its true position is
neither -1 (padding) nor after the query's, nor before a layer's sliding window.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from fasa_bench.cache import KVLayer
from fasa_bench.clock import Clock, stage
from fasa_bench.dense import causal, dense_prompt
from fasa_bench.errors import UserError
from fasa_bench.method import Method, Observation
from fasa_bench.model_cache import Cache
from fasa_bench.softmax import scaled
from fasa_bench.softmax import weights as softmax
from fasa_bench.windows import check_window

NAME = "fasa_bench"
SLACK = 64  # tokens that a sliding layer may hold beyond its window, so that not every step has to move the others
ELEMENTS = 2**24  # attention weights that many queries may have at once, so that memory does not grow with the square
CACHED_ELEMENTS, LEAST_QUERIES = 2**20, 64  # on a CPU: so many weights stay in its caches; but never too few queries


@dataclass
class Tally:
    """What decode steps really read, summed over steps and the layers that methods act on."""

    layer_steps: int = 0
    attended: float = 0.0  # tokens a head read
    cached: float = 0.0  # tokens a head held
    sparse: dict[int, int] = field(default_factory=dict)  # layer -> steps that read fewer tokens than had passed

    def count(self, layer: KVLayer, attended: float, later: int = 0) -> None:
        """One step; later: tokens that came in the same call after the step's own."""
        self.layer_steps += 1
        self.attended += attended
        self.cached += layer.length - later
        fewer = layer.window is None and attended < layer.seen - later
        self.sparse[layer.index] = self.sparse.get(layer.index, 0) + int(fewer)


class Dense(Protocol):
    """Exact attention of one query per head over everything."""

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[b, Hq, 1, d], two of [b, H, n, d] -> [b, 1, Hq, d]."""
        ...


def dense(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Dense attention as all methods use it.

    The query heads of a KV head are taken as queries of one head, so that its keys and values are read once: of
    PyTorch's ways the fastest on a CPU (benchmarks/attention_layer.py).
    """
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
    output = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    return output.reshape(*query.shape[:-1], values.shape[-1]).transpose(1, 2)


_faster: list[Callable[[Tensor], Dense | None]] = []


def register_dense(offer: Callable[[Tensor], Dense | None]) -> None:
    """offer: faster dense attention for keys and values like this tensor, if there is any; for who compares speed."""
    _faster.append(offer)


def faster_dense(like: Tensor) -> Dense | None:
    """What has been registered for keys and values like this tensor [b, H, n, d]; None if nothing is faster."""
    return next((found for offer in _faster if (found := offer(like)) is not None), None)


@dataclass
class Reading:
    """How the forward pass in progress treats the cache. method None: the dense prompt pass.

    backend: dense attention of the prompt pass. observe: what to record of it for the methods.
    reserve: tokens that decoding is expected to append. parallel: take the steps of one call together.
    dense: attention of a step that reads everything.
    """

    cache: Cache
    method: Method | None
    backend: str = "sdpa"
    observe: Observation = field(default_factory=Observation)
    reserve: int = 0
    parallel: bool = False
    dense: Dense = dense
    clock: Clock = field(default_factory=Clock)
    tally: Tally = field(default_factory=Tally)


_reading: ContextVar[Reading] = ContextVar("reading")


def current() -> Reading | None:
    """What a forward pass reads and fills; None outside of `reading`."""
    return _reading.get(None)


@contextlib.contextmanager
def installed(network: PreTrainedModel) -> Iterator[None]:
    """Let the network use this module's attention, and put its own back afterwards."""
    before = network.config._attn_implementation
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    network.set_attn_implementation(NAME)
    # for queries folded as `dense` folds them its kernels take ten times as long as flash attention's (docs/speed.md)
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        network.set_attn_implementation(before)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


@contextlib.contextmanager
def reading(state: Reading) -> Iterator[Reading]:
    """Forward passes inside this block read and fill `state.cache`."""
    token = _reading.set(state)
    try:
        yield state
    finally:
        _reading.reset(token)


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [b, Hq, q, d], key and value [b, H, q, d] of the new tokens, rotated -> ([b, q, Hq, d], None).

    sliding_window, softcap, s_aux: transformers' names of a layer's window, soft cap and sinks [Hq].
    """
    if position_bias is not None:
        raise UserError(f"{type(module).__name__} is not supported: it adds a learned position bias to its logits")
    state = current()
    if state is None:
        raise RuntimeError(f"attention '{NAME}' works only inside fasa_bench.attention.reading(...)")
    layer = state.cache.layers[int(module.layer_idx)]  # type: ignore[arg-type]
    layer.scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer.cap, layer.sinks = softcap, s_aux
    positions = _positions(layer, key, attention_mask, position_ids)
    if state.method is None:
        config: Any = getattr(module, "config", None)
        if config is not None:
            check_window(type(module).__name__, sliding_window, layer.window, config.max_position_embeddings)
        output = _prompt(state, module, layer, query, key, value, positions)
        layer.offered = None  # nothing holds the prompt's keys and values twice
        return output, None
    outputs = []
    new = query.shape[2]
    # one after the other, since a method may evict between two tokens of one call; unless it is known not to mind
    width = _together(query, layer.length + new) if state.parallel else 1
    for i in range(0, new, width):
        now = slice(i, i + width)
        keys, values = kept(layer, key, value)
        layer.append(keys[:, :, now], values[:, :, now], positions[:, now])
        if state.parallel:
            outputs.append(_steps(state, state.method, layer, query[:, :, now], positions[:, now]))
        else:
            outputs.append(_step(state, state.method, layer, query[:, :, now]))
        layer.trim(SLACK)
    layer.offered = None
    return torch.cat(outputs, dim=1), None


def kept(layer: KVLayer, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer caches of new tokens: their keys and values, or the latents that the model offered its cache."""
    if layer.expansion is None:
        return key, value
    assert layer.offered is not None
    return layer.offered


def _together(query: Tensor, tokens: int) -> int:
    """How many of the queries of a call are taken at once."""
    rows = len(query) * query.shape[1] * tokens
    if query.device.type == "cpu":
        return max(LEAST_QUERIES, CACHED_ELEMENTS // rows)
    return max(1, ELEMENTS // rows)


def hand_padding_on(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask function: pass the 2-D padding mask [b, tokens so far] through, None when nothing is padded."""
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask.bool()


AttentionInterface.register(NAME, forward)
AttentionMaskInterface.register(NAME, hand_padding_on)


def _positions(layer: KVLayer, key: Tensor, padding: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """True positions [b, q] of the new tokens; -1 for padding."""
    batch, _, new, _ = key.shape
    if position_ids is None:
        position_ids = torch.arange(layer.seen, layer.seen + new, device=key.device)[None]
    positions = position_ids.to(key.device).expand(batch, new)
    if padding is not None:
        positions = positions.masked_fill(~padding[:, -new:].to(key.device), -1)
        layer.padded = True
    return positions


def _prompt(
    state: Reading,
    module: torch.nn.Module,
    layer: KVLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
) -> Tensor:
    """Dense causal attention of the prompt (paper B.1: no method touches it); the prompt may come in several calls."""
    full = layer.window is None
    layer.append(*kept(layer, key, value), positions, reserve=state.reserve if full else 0)
    if full:
        _observe(state.observe, layer, query, positions)
    output = dense_prompt(module, layer, query, positions, state.backend)
    layer.trim()
    return output


def _observe(wanted: Observation, layer: KVLayer, query: Tensor, positions: Tensor) -> None:
    if wanted.window:
        earlier = [] if layer.prompt_queries is None else [layer.prompt_queries]
        layer.prompt_queries = torch.cat([*earlier, query], dim=2)[:, :, -wanted.window :].clone()
    if wanted.mass:
        mass = column_mass(layer, query, positions)
        if layer.prompt_mass is not None:  # from the calls before
            mass[..., : layer.prompt_mass.shape[-1]] += layer.prompt_mass
        layer.prompt_mass = mass


def column_mass(layer: KVLayer, query: Tensor, positions: Tensor, elements: int = ELEMENTS) -> Tensor:
    """Attention that each cached token receives from these queries, summed: [b, Hq, q, d] -> [b, Hq, n] float32.

    Causal by position [b, q]; padded queries give nothing. Works through chunks of queries of at most `elements`
    weights (at least one query), so that memory grows with the length of the text and not with its square.
    """
    batch, heads = query.shape[:2]
    held = layer.positions[:, 0]
    mass = torch.zeros(batch, heads, layer.length, dtype=torch.float32, device=query.device)
    chunk = max(1, elements // (batch * heads * layer.length))
    for part, at in zip(query.split(chunk, dim=2), positions.split(chunk, dim=1), strict=True):
        logits = scaled(layer, layer.dot(part).float())
        logits = logits.masked_fill(~causal(held, at)[:, None], torch.finfo(torch.float32).min)
        weights = softmax(layer, logits).masked_fill((at < 0)[:, None, :, None], 0)
        mass += weights.sum(2)
    return mass


def _chooses(method: Method, layer: KVLayer) -> bool:
    """The layer holds more than the method may read of it."""
    return layer.budget is not None and layer.length > layer.budget and layer.index not in method.dense_layers


def _step(state: Reading, method: Method, layer: KVLayer, query: Tensor) -> Tensor:
    """One decode step of one layer: select, attend, update. query [b, Hq, 1, d] -> [b, 1, Hq, d].

    A layer with a sliding window is read as the model reads it, whatever the method.
    """
    if layer.window is not None:
        with stage("attend"):
            output, _, attended = attend(layer, query, None, weigh=False)
        if state.cache.only_windows:
            state.tally.count(layer, attended)
        return output
    slots = None
    if _chooses(method, layer):
        done = method.step(layer, query)
        if done is not None:
            state.tally.count(layer, done[1])
            return done[0]
        with stage("select"):
            slots = method.select(layer, query)
    with stage("attend"):
        output, weights, attended = attend(layer, query, slots, method.ragged, method.uses_weights, state.dense)
        if slots is not None:
            output = method.combine(layer, query, output)
    state.tally.count(layer, attended)
    with stage("update"):
        method.decoded(layer, query, weights)
    return output


def _steps(state: Reading, method: Method, layer: KVLayer, query: Tensor, positions: Tensor) -> Tensor:
    """The decode steps of the q newest tokens at once, for a method that is `parallel`.

    query [b, Hq, q, d], positions [b, q] -> [b, q, Hq, d]. What a step does not read is multiplied and masked.
    """
    read = causal(layer.positions[:, 0], positions, layer.window)[:, None]
    choosing = _chooses(method, layer)
    if choosing:
        with stage("select"):
            read = method.reads(layer, query, read)
    with stage("attend"):
        shared = read if read.shape[1] == 1 else read.repeat_interleave(query.shape[1] // read.shape[1], dim=1)
        scores = scaled(layer, layer.dot(query)).masked_fill(~shared, torch.finfo(query.dtype).min)
        weights = softmax(layer, scores)
        output = layer.mix(weights.to(query.dtype)).transpose(1, 2)
        if choosing:
            output = method.combine(layer, query, output)
    if layer.window is not None and not state.cache.only_windows:
        return output
    for i, attended in enumerate(read.sum(-1).float().mean((0, 1)).tolist()):
        state.tally.count(layer, attended, later=query.shape[2] - 1 - i)
    if layer.window is None:
        with stage("update"):
            method.decoded(layer, query, weights)
    return output


def attend(
    layer: KVLayer,
    query: Tensor,
    slots: Tensor | None,
    ragged: bool = False,
    weigh: bool = True,
    everything: Dense = dense,
) -> tuple[Tensor, Tensor | None, float]:
    """Exact attention over the given slots [b, H or Hq, 1, m], or over everything. Softmax in float32.

    ragged: a slot of -1 stands for nothing, so that rows may read different numbers of tokens.
    weigh: whether the weights are wanted. everything: who attends where all is read.
    Returns the output [b, 1, Hq, d], the weights [b, Hq, m] or None, and the mean number of tokens a head read.
    """
    # as full KV does while nothing has been evicted, to the last bit; weights cost another pass over the keys then
    plain = slots is None and (not weigh or layer.length == layer.seen) and layer.is_plain
    whole = layer.read_whole() if plain else None
    if whole is not None:
        output = everything(query, *whole, layer.scale)
        weights = torch.softmax(layer.dot(query)[:, :, 0].float() * layer.scale, dim=-1) if weigh else None
        return output, weights, float(whole[0].shape[2])
    visible: Tensor | None
    positions: Tensor | None = None
    if slots is None:
        scores, chosen, visible = layer.dot(query), None, layer.real
    else:
        wanted = slots[:, :, 0]
        existing = wanted.clamp(min=0) if ragged else wanted
        with stage("gather"):
            chosen = layer.choose(existing)
        scores = chosen.dot(layer.query_parts(query, last=True))
        visible = wanted >= 0 if ragged else None
        if layer.padded or layer.slopes is not None:
            positions = layer.positions_of(existing)
        if layer.padded:
            assert positions is not None
            real = positions >= 0
            visible = real if visible is None else visible & real
    scores = scaled(layer, scores, positions)  # [b, Hq, 1, m]
    batch, heads, _, n = scores.shape
    attended = float(n)
    if visible is not None:
        visible = visible.expand(batch, -1, n).repeat_interleave(heads // visible.shape[1], dim=1)
        attended = float(visible.sum(-1).float().mean())
        # the least number, not -inf: a row that sees nothing (padding) must not become NaN and spread
        scores = scores.masked_fill(~visible[:, :, None], torch.finfo(scores.dtype).min)
    weights = softmax(layer, scores)
    rounded = weights.to(query.dtype)
    output = (layer.mix(rounded) if chosen is None else chosen.mix(rounded)).transpose(1, 2)
    return output, weights[:, :, 0], attended
