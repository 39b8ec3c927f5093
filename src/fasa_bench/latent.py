"""Multi-head latent attention (MLA): a token is cached as one latent that the keys and values of all heads come from.

DeepSeek-V2 (arXiv 2405.04434, Sec. 2.1): a head's key is W_k c beside a rotary key k_r that all heads share, its value
is W_v c, c being the latent. So q . (W_k c) = (W_k' q) . c, and a weighted sum of values is W_v times the same sum of
latents: exact attention reads latents and never makes a key (the paper's Sec. 2.1.2). transformers caches (c, k_r) and
expands all of it at every step; its numbers are the same to rounding.

Shapes as in fasa_bench.cache; R numbers a latent, P of the rotary key, d = dimensions of W_k c and P, v of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fasa_bench.quantised import pick
from fasa_bench.segments import Rows, product


@dataclass(frozen=True, eq=False)
class Expansion:
    """How one layer makes its heads' keys and values: keys [H, R, d - P], values [H, R, v], both multiplied from the
    right; and P.
    """

    keys: Tensor
    values: Tensor
    rotary: int

    @classmethod
    def of(cls, attention: Any) -> Expansion:
        """Read off an attention module that caches latents: what its own `expand_kv` makes of unit latents."""
        weight = attention.kv_b_proj.weight
        latents = torch.eye(attention.kv_lora_rank, dtype=weight.dtype, device=weight.device)[None, None]
        rotary = latents.new_zeros(1, 1, latents.shape[2], attention.qk_rope_head_dim)
        with torch.inference_mode():
            keys, values = attention.expand_kv(latents, rotary)
        return cls(keys[0, ..., : -rotary.shape[3]].contiguous(), values[0].contiguous(), rotary.shape[3])

    def absorb(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """A query [b, Hq, q, d] as latents and rotary keys meet it: [b, Hq, q, R] and [b, Hq, q, P]."""
        plain, rotary = query.split([query.shape[-1] - self.rotary, self.rotary], dim=-1)
        return plain @ self.keys.mT, rotary

    def whole(self, latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of latents [b, 1 or H, m, R] and rotary keys [b, 1 or H, m, P]: [b, H, m, d or v]."""
        plain = latents @ self.keys
        return torch.cat([plain, rotary.expand(*plain.shape[:3], -1)], dim=-1), latents @ self.values


def expansions_of(network: Any) -> dict[int, Expansion]:
    """By layer, for those that cache latents: none before transformers 5, where MLA caches whole keys and values."""
    caching = (module for module in network.modules() if hasattr(module, "expand_kv"))
    return {int(module.layer_idx): Expansion.of(module) for module in caching}


class LatentRows:
    """A segment (fasa_bench.segments.Segment) of latents and rotary keys, in rows that all heads share."""

    def __init__(self, expansion: Expansion, rows: Rows) -> None:
        """rows: of one head, whose keys are the latents and whose values are the rotary keys."""
        self.expansion, self.rows = expansion, rows
        self.buffer, self.tokens = rows.buffer, rows.tokens

    @property
    def batch(self) -> int:
        return self.rows.batch

    @property
    def heads(self) -> int:
        return len(self.expansion.keys)

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def spare(self) -> int:
        return self.rows.spare

    @property
    def tensors(self) -> list[Tensor]:
        return self.rows.tensors

    @property
    def host_tensors(self) -> list[Tensor]:
        return []

    @property
    def key_bytes(self) -> int:
        """What products with all keys read."""
        return self.rows.key_bytes + self.rows.value_bytes

    @property
    def value_bytes(self) -> int:
        """What a sum of all values reads."""
        return self.rows.key_bytes

    @property
    def keys(self) -> Tensor:
        return self.expansion.whole(self.rows.keys, self.rows.values)[0]

    @property
    def values(self) -> Tensor:
        return self.rows.keys @ self.expansion.values

    @property
    def positions(self) -> Tensor:
        return self.rows.positions

    def append(self, latents: Tensor, rotary: Tensor, positions: Tensor, reserve: int) -> LatentRows:
        return LatentRows(self.expansion, self.rows.append(latents, rotary, positions, reserve))

    def pick(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Latents and rotary keys of rows [b, heads, m], with as many heads as the slots have."""
        return pick(self.rows.keys, slots), pick(self.rows.values, slots)

    def dot(self, query: Tensor) -> Tensor:
        latent, rotary = self.expansion.absorb(query)
        return product(latent, self.rows.keys.mT) + product(rotary, self.rows.values.mT)

    def mix(self, weights: Tensor) -> Tensor:
        return product(weights, self.rows.keys) @ self.expansion.values
