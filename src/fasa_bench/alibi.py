"""Models with ALiBi, whose attention modules do not ask transformers' AttentionInterface: BLOOM and MPT.

Nothing of their code is patched or copied. They hand new keys and values to the cache, which is ours, and PyTorch's
hooks are there for the rest: one behind the fused projection keeps the query, one before the output projection gives it
our attention's result. What the model computes in between is thrown away; its cache looks empty to it, so that this
concerns the new tokens only. The bias, distance times a slope, is part of our logits (fasa_bench.softmax).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fasa_bench import attention
from fasa_bench.errors import UserError


@dataclass(frozen=True)
class Family:
    """What differs between families. The names are those of transformers' modules and attributes.

    attention: class of the attention modules. projection, output: their first and last linear layer. scale: factor of
    the logits. query: the query [b, Hq, q, d] in what the projection gives [b, q, ...]. bias: what the model itself
    adds to the logits of so many tokens, [Hq, 1, tokens].
    """

    attention: str
    projection: str
    output: str
    scale: str
    query: Callable[[Any, Tensor], Tensor]
    bias: Callable[[Any, int], Tensor]


def _bloom_query(module: Any, fused: Tensor) -> Tensor:
    """Query, key and value of a head lie together."""
    return fused.unflatten(-1, (module.num_heads, 3, -1))[..., 0, :].transpose(1, 2)


def _mpt_query(module: Any, fused: Tensor) -> Tensor:
    """The queries of all heads come first; all numbers may be clipped."""
    query = fused.chunk(3, dim=-1)[0].unflatten(-1, (module.n_heads, -1)).transpose(1, 2)
    return query if not module.clip_qkv else query.clamp(-module.clip_qkv, module.clip_qkv)


def _bloom_bias(model: Any, tokens: int) -> Tensor:
    mask = torch.ones(1, tokens, device=model.device)
    return model.build_alibi_tensor(mask, model.num_heads, torch.float32)


def _mpt_bias(model: Any, tokens: int) -> Tensor:
    return model.build_mpt_alibi_tensor(model.num_heads, tokens, device=model.device)


FAMILIES = {
    "bloom": Family("BloomAttention", "query_key_value", "dense", "inv_norm_factor", _bloom_query, _bloom_bias),
    "mpt": Family("MptAttention", "Wqkv", "out_proj", "softmax_scale", _mpt_query, _mpt_bias),
}


def family_of(config: Any) -> Family | None:
    """The family of a model that has to be hooked; None for one that asks transformers' AttentionInterface."""
    return FAMILIES.get(config.model_type)


def check_alibi(name: str, config: Any) -> None:
    """Raise UserError for a model with ALiBi that cannot be decoded. name: what the user calls it."""
    known = ", ".join(FAMILIES)
    if config.model_type == "baichuan":
        raise UserError(
            f"model={name} cannot be run: Baichuan's own code keeps keys and values in tuples, as transformers before "
            f"4.36 did, and not in a cache that it is given; native models with ALiBi are supported: {known}"
        )
    if getattr(config, "alibi", False) and config.model_type not in FAMILIES:
        raise UserError(f"model={name} is not supported: of the models with ALiBi only {known} are")
    if getattr(config, "slow_but_exact", False) and config.pretraining_tp > 1:
        raise UserError(f"model={name} is not supported: slow_but_exact goes around BLOOM's output projection")


def slopes_of(network: Any) -> Tensor | None:
    """By how much a logit falls with each token of distance, [Hq] float32, as the model has it; None without ALiBi."""
    family = family_of(network.config)
    if family is None:
        return None
    bias = family.bias(network.base_model, 2).float()[:, 0]
    return bias[:, 1] - bias[:, 0]


@contextlib.contextmanager
def hooked(network: Any) -> Iterator[None]:
    """Let a network of one of the FAMILIES use our attention while a forward pass is read (attention.reading)."""
    family = family_of(network.config)
    assert family is not None
    handles = []
    for module in network.modules():
        if type(module).__name__ == family.attention:
            hooks = _Hooks(module, family)
            handles.append(getattr(module, family.projection).register_forward_hook(hooks.keep_query))
            handles.append(getattr(module, family.output).register_forward_pre_hook(hooks.attend))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Hooks:
    """Those of one attention module."""

    def __init__(self, module: nn.Module, family: Family) -> None:
        self.module, self.family = module, family
        self._query: Tensor | None = None

    def keep_query(self, projection: nn.Module, args: Any, fused: Tensor) -> None:
        if attention.current() is not None:
            self._query = self.family.query(self.module, fused)

    def attend(self, output: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor] | None:
        state, query = attention.current(), self._query
        if state is None:
            return None
        self._query = None
        cache = state.cache
        offered = cache.layers[int(self.module.layer_idx)].offered  # type: ignore[arg-type]
        assert query is not None
        assert offered is not None
        assert cache.arriving is not None
        positions, padding = cache.arriving
        scale = getattr(self.module, self.family.scale)
        return (attention.forward(self.module, query, *offered, padding, scale, positions)[0].flatten(2),)
