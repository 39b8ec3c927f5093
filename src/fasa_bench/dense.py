"""Dense attention of the prompt pass: causal by position, with the windows, soft caps, sinks and biases that layers may
have.

Nothing grows with the square of the prompt: what PyTorch's fused attention cannot do is done for some queries at a
time. Shapes as in fasa_bench.cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fasa_bench.cache import KVLayer
from fasa_bench.softmax import scaled, weights

ELEMENTS = 2**26  # attention weights or entries of a mask that are held at once
ALIGNED = 8  # head dimensions that fused attention takes are multiples of it


def causal(held: Tensor, at: Tensor, window: int | None = None) -> Tensor:
    """What a query at position `at` [b, q] sees of the tokens at positions `held` [b, n] (-1: padding): [b, q, n]."""
    seen = (held[:, None, :] >= 0) & (held[:, None, :] <= at[:, :, None])
    return seen if window is None else seen & (held[:, None, :] > at[:, :, None] - window)


def dense_prompt(
    module: torch.nn.Module, layer: KVLayer, query: Tensor, positions: Tensor, backend: str = "sdpa"
) -> Tensor:
    """Queries [b, Hq, q, d] of the layer's newest tokens, at positions [b, q] -> [b, q, Hq, d].

    module: the model's attention module. backend: `flash_attention_2` is used where only what comes later is masked.
    """
    keys, values = layer.keys, layer.values
    new, length, window = query.shape[2], layer.length, layer.window
    fusible = layer.cap is None and layer.slopes is None
    narrow = window is not None and length > window
    if fusible and not (narrow or layer.padded or new < length):
        if backend == "flash_attention_2" and layer.sinks is None and keys.shape == values.shape:
            from flash_attn import flash_attn_func

            heads_last = (tensor.transpose(1, 2) for tensor in (query, keys, values))
            return flash_attn_func(*heads_last, softmax_scale=layer.scale, causal=True)
        return _fused(module, layer, query, keys, values, None)
    held, outputs = layer.positions[:, 0], []
    span = length if window is None else 2 * window
    heads = 1 if fusible else query.shape[1]  # a mask serves all heads
    chunk = max(1, min(span, ELEMENTS // (len(query) * heads * span)))
    for start in range(0, new, chunk):
        at = positions[:, start : start + chunk]
        end = length - new + start + at.shape[1]  # of the tokens that the last of these queries sees
        first = 0 if window is None else max(0, end + 1 - at.shape[1] - window)
        seen = causal(held[:, first:end], at, window)
        seen = (seen | (at < 0)[:, :, None])[:, None]  # a padded query sees everything, else its softmax would be 0 / 0
        part = query[:, :, start : start + chunk], keys[:, :, first:end], values[:, :, first:end]
        if fusible:
            outputs.append(_fused(module, layer, *part, seen))
        else:
            outputs.append(_unfused(layer, *part, seen, layer.positions[..., first:end]))
    return torch.cat(outputs, dim=1)


def _fused(
    module: torch.nn.Module, layer: KVLayer, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None
) -> Tensor:
    """seen [b, 1, q, n]; None: query i sees the keys up to i."""
    sinks, dim = layer.sinks, values.shape[-1]
    if sinks is not None:
        # A sink is a key that every query sees and whose value is 0: a dimension of its own makes its product the
        # sink's logit. In front of the keys it needs a query in front of the queries, for "up to i" to stay true.
        query, keys, values = (pad(tensor, (0, ALIGNED, 1, 0)) for tensor in (query, keys, values))
        query[..., dim] = (sinks / layer.scale).to(query.dtype)[:, None]
        keys[:, :, 0, dim] = 1
        seen = None if seen is None else pad(seen, (1, 0, 1, 0), value=True)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    output = sdpa(module, query, keys, values, seen, scaling=layer.scale, is_causal=seen is None)[0]
    return output if sinks is None else output[:, 1:, :, :dim]


def _unfused(layer: KVLayer, query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
    """The same with a soft cap or a bias, which fused attention does not know. positions [b, H or 1, n] of the keys."""
    batch, heads, new, dim = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, dim)
    logits = scaled(layer, (grouped @ keys.transpose(2, 3)).view(batch, heads, new, -1), positions)
    found = weights(layer, logits.masked_fill(~seen, torch.finfo(logits.dtype).min)).to(query.dtype)
    return (found.view(batch, keys.shape[1], -1, keys.shape[2]) @ values).view(batch, heads, new, -1).transpose(1, 2)
