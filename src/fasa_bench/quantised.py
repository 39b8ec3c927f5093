"""Keys or values stored in 8, 4 or 2 bits, so that single tokens can be read without unpacking the rest.

KIVI (Liu et al. 2024, arXiv 2402.02750, Sec. 3): keys have outlier channels, so a group is one channel of `group`
consecutive tokens (axis "channel"); values have none, so a group is `group` channels of one token (axis "token"). Each
group keeps its minimum (zero) and its step (scale); a number is zero + code * scale. Recent tokens stay as they are,
outside of this class. transformers' QuantizedLayer does not serve: it quantises everything anew when its residual is
full, and unpacks everything at each step.

Shapes as in fasa_bench.cache: b batch, H heads, n tokens, d dimension of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fasa_bench.errors import UserError

Axis = Literal["channel", "token"]


@dataclass(frozen=True, eq=False)
class Quantised:
    """A table [b, H, n, d] of codes; never changed in place, so that forks of a cache can share it.

    codes [b, H, n, ceil(d * bits / 8)] uint8: a row is a token, its lowest channel in the lowest bits. scale, zero
    [b, H, groups of tokens, groups of channels], in the table's own type.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    axis: Axis
    group: int
    dim: int

    @classmethod
    def pack(cls, table: Tensor, bits: int, axis: Axis, group: int) -> Quantised:
        """Quantise [b, H, n, d], each number to within scale / 2. The last groups may be smaller than `group`."""
        if bits not in (8, 4, 2):
            raise UserError.of("cache.bits", bits, "must be 8, 4 or 2, or 16 for no quantisation")
        if group < 1:
            raise UserError.of("cache.group", group, "must be at least 1")
        tokens, dim = table.shape[2:]
        tall, wide = (group, 1) if axis == "channel" else (1, group)
        rows, columns = -(-tokens // tall), -(-dim // wide)
        # repeating the last row or column fills groups up without changing their range
        filling = (0, columns * wide - dim, 0, rows * tall - tokens)
        filled = torch.nn.functional.pad(table.float(), filling, mode="replicate") if any(filling) else table.float()
        blocks = filled.unflatten(3, (columns, wide)).unflatten(2, (rows, tall))  # [b, H, rows, tall, columns, wide]
        lowest = blocks.amin((3, 5))
        step = (blocks.amax((3, 5)) - lowest) / (2**bits - 1)
        scale = _rounded_up(step, table.dtype)
        divisor = scale.float().clamp(min=torch.finfo(torch.float32).tiny)  # a constant group has scale 0
        steps = (blocks - lowest[:, :, :, None, :, None]) / divisor[:, :, :, None, :, None]
        codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(4).flatten(2, 3)[:, :, :tokens, :dim]
        return cls(_joined(codes, bits), scale, lowest.to(table.dtype), bits, axis, group, dim)

    @property
    def tokens(self) -> int:
        return self.codes.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that is held."""
        return [self.codes, self.scale, self.zero]

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, scales and zeros."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def rows(self, slots: Tensor) -> Tensor:
        """The given tokens, [b, heads, m] -> [b, heads, m, d]; heads and batch as `pick` has them."""
        return self._values(pick(self.codes, slots), slots)

    def dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Tokens start to stop, [b, H, stop - start, d]."""
        stop = self.tokens if stop is None else min(stop, self.tokens)
        batch, heads = self.codes.shape[:2]
        slots = torch.arange(start, stop, device=self.codes.device).expand(batch, heads, -1)
        return self._values(self.codes[:, :, start:stop], slots)

    def parts(self, size: int = 1024) -> Iterator[Tensor]:
        """All tokens, `size` at a time, so that a product with all of them needs memory for one part only."""
        for start in range(0, self.tokens, size):
            yield self.dense(start, start + size)

    def append(self, other: Quantised) -> Quantised:
        """This table and then the other, packed with the same settings. This one must end with a whole group."""
        if self.tokens % self._tall:
            raise ValueError(f"{self.tokens} tokens are not whole groups of {self.group}")
        codes, scale, zero = (torch.cat(pair, dim=2) for pair in zip(self.tensors, other.tensors, strict=True))
        return replace(self, codes=codes, scale=scale, zero=zero)

    @property
    def _tall(self) -> int:
        """Tokens of a group."""
        return self.group if self.axis == "channel" else 1

    def _values(self, codes: Tensor, slots: Tensor) -> Tensor:
        """Numbers of the rows `slots`, whose codes these are: zero + code * scale, in float32 until the end."""
        scale, zero = (pick(table, slots // self._tall).float() for table in (self.scale, self.zero))
        if self.axis == "token":  # one scale for `group` channels
            scale, zero = (table.repeat_interleave(self.group, dim=-1)[..., : self.dim] for table in (scale, zero))
        return torch.addcmul(zero, _split(codes, self.bits, self.dim), scale).to(self.scale.dtype)


def ripe(tokens: int, residual: int, group: int) -> int:
    """How many of the oldest tokens to quantise, in whole groups, so that at least `residual` stay as they are."""
    return max(tokens - residual, 0) // group * group


def pick(table: Tensor, slots: Tensor) -> Tensor:
    """Rows of each head: [stored, H, n, w] at slots [b, heads, m] -> [b, heads, m, w].

    `heads` is 1, H, or a multiple of H (query heads: head h reads KV head h // G). A stored batch of 1 serves all rows
    of the batch.
    """
    stored, heads, rows, width = table.shape
    batch, wanted = slots.shape[0], max(slots.shape[1], heads)
    # row number in the flattened table: a plain row copy, the fastest gather there is
    index = (_starts(batch, stored, wanted, heads, rows, slots.device) + slots).flatten()
    return table.reshape(-1, width).index_select(0, index).view(batch, wanted, slots.shape[2], width)


@functools.lru_cache(maxsize=64)
def _starts(batch: int, stored: int, wanted: int, heads: int, rows: int, device: torch.device) -> Tensor:
    """Number of the first row of each head in a flattened table of `rows` a head: [batch, wanted, 1]."""
    row = torch.arange(batch, device=device).clamp(max=stored - 1)[:, None] * heads
    return ((row + torch.arange(wanted, device=device) // (wanted // heads)) * rows)[:, :, None]


def _rounded_up(step: Tensor, dtype: torch.dtype) -> Tensor:
    """step >= 0 in another type, never below it: else the codes of a group would not reach its maximum."""
    rounded = step.to(dtype)
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    return (rounded.view(bits) + (rounded.float() < step).to(bits)).view(dtype)  # + 1 is the next number


def _joined(codes: Tensor, bits: int) -> Tensor:
    """Put 8 / bits codes into a byte: [..., d] -> [..., ceil(d * bits / 8)]."""
    each = 8 // bits
    whole = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    return (whole << _shifts(whole, bits)).sum(-1, dtype=torch.uint8)


def _split(packed: Tensor, bits: int, dim: int) -> Tensor:
    """The codes in bytes: [..., ceil(d * bits / 8)] -> [..., d] float32."""
    return ((packed[..., None] >> _shifts(packed, bits)) & (2**bits - 1)).flatten(-2)[..., :dim].float()


def _shifts(like: Tensor, bits: int) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)
