"""Where a layer's tokens lie: plain rows that grow in blocks, or rows packed into few bits.

Shapes as in fasa_bench.cache. A segment is stored for the whole batch, or once (batch 1) for all sequences of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from fasa_bench.errors import UserError
from fasa_bench.quantised import Quantised, pick, ripe

BLOCK = 64  # tokens; a buffer grows by whole blocks, at least by an eighth of itself, so that appending is cheap


@dataclass(frozen=True)
class Packing:
    """Quantisation of the cache: how KIVI (arXiv 2402.02750) stores what is not recent.

    bits: 16 stores keys and values as the model computes them; 8, 4 or 2 packs them, keys per channel in groups of
    `group` tokens, values per token in groups of `group` channels. residual: newest tokens that stay unpacked.
    """

    bits: int = 16
    group: int = 32
    residual: int = 128

    notes: ClassVar[dict[str, str]] = {
        "bits": "FASA's paper does not quantise; KIVI 4 or 2",
        "group": "KIVI 32; ours the same",
        "residual": "KIVI 128 at most, flushed at once; ours at least so many, packed group by group",
    }

    def __post_init__(self) -> None:
        if self.bits not in (16, 8, 4, 2):
            raise UserError.of("cache.bits", self.bits, "must be 16 (no quantisation), 8, 4 or 2")
        if self.group < 1:
            raise UserError.of("cache.group", self.group, "must be at least 1")
        if self.residual < 0:
            raise UserError.of("cache.residual", self.residual, "must be at least 0")


class Chosen(NamedTuple):
    """Keys and values of some tokens [b, heads, m, ...].

    keys: the dimensions of a head in one part or in several. products [b, Hq, 1, m]: those of the query being decoded
    with the dimensions that are in none of the parts. up [H, R, v]: what makes values of latents, which `values` are
    then, and the first part of the keys too (fasa_bench.latent).
    """

    keys: tuple[Tensor, ...]
    values: Tensor
    products: Tensor | None = None
    up: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.keys if self.up is not None else (*self.keys, self.values)))

    def dot(self, query: tuple[Tensor, ...]) -> Tensor:
        """Products of each query head with its tokens: a query [b, Hq, q, ...] in all parts -> [b, Hq, q, m]."""
        found = [] if self.products is None else [self.products]
        needed = query[len(query) - len(self.keys) :]
        found += (product(part, keys.transpose(2, 3)) for part, keys in zip(needed, self.keys, strict=True))
        return functools.reduce(torch.Tensor.add_, found)

    def mix(self, weights: Tensor) -> Tensor:
        """Values of each query head's tokens, summed with these weights: [b, Hq, q, m] -> [b, Hq, q, v]."""
        mixed = product(weights, self.values)
        return mixed if self.up is None else mixed @ self.up


class Segment(Protocol):
    """`tokens` rows of every head."""

    @property
    def tokens(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that is held on the device."""
        ...

    @property
    def host_tensors(self) -> list[Tensor]:
        """Every tensor that is meant for the host's memory, which on a CPU is the same."""
        ...

    @property
    def key_bytes(self) -> int:
        """Bytes that all keys take."""
        ...

    @property
    def value_bytes(self) -> int:
        """Bytes that all values take."""
        ...

    @property
    def keys(self) -> Tensor:
        """[b or 1, H, tokens, d]."""
        ...

    @property
    def values(self) -> Tensor:
        """[b or 1, H, tokens, d]."""
        ...

    @property
    def positions(self) -> Tensor:
        """[b or 1, H or 1, tokens]."""
        ...

    def pick(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of rows [b, heads, m], as far as they lie on the device, in the parts in which they lie."""
        ...

    def dot(self, query: Tensor) -> Tensor:
        """[b, Hq, q, d] -> [b, Hq, q, tokens]."""
        ...

    def mix(self, weights: Tensor) -> Tensor:
        """[b, Hq, q, tokens] -> [b, Hq, q, d]."""
        ...


class Rows:
    """Plain rows in a buffer that may be longer, and may be shared by several forks of one prompt.

    A fork whose rows end where the written part of the buffer ends may append in place; any other would overwrite its
    sibling's rows and copies first.
    """

    def __init__(self, buffer: Buffer, tokens: int) -> None:
        self.buffer, self.tokens = buffer, tokens

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> Rows:
        """Copy the given rows into a new buffer that has room for at least `spare` more."""
        return cls(Buffer.of(keys, values, positions, spare), keys.shape[2])

    @property
    def keys(self) -> Tensor:
        return self.buffer.keys[:, :, : self.tokens]

    @property
    def values(self) -> Tensor:
        return self.buffer.values[:, :, : self.tokens]

    @property
    def positions(self) -> Tensor:
        return self.buffer.positions[:, :, : self.tokens]

    @property
    def batch(self) -> int:
        return self.buffer.keys.shape[0]

    @property
    def heads(self) -> int:
        return self.buffer.keys.shape[1]

    @property
    def device(self) -> torch.device:
        return self.buffer.keys.device

    @property
    def spare(self) -> int:
        """Rows that are free behind these."""
        return self.buffer.keys.shape[2] - self.tokens

    @property
    def key_bytes(self) -> int:
        return self.keys.nbytes

    @property
    def value_bytes(self) -> int:
        return self.values.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        return [self.buffer.keys, self.buffer.values, self.buffer.positions]

    @property
    def host_tensors(self) -> list[Tensor]:
        return []

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, reserve: int) -> Rows:
        """These rows and the new ones; in place where that is safe."""
        buffer, end = self.buffer, self.tokens + keys.shape[2]
        if buffer.used != self.tokens or end > buffer.keys.shape[2]:
            spare = max(keys.shape[2] + reserve, self.tokens // 8)
            buffer = Buffer.of(self.keys, self.values, self.positions, spare)
        buffer.write(self.tokens, keys, values, positions)
        return Rows(buffer, end)

    def pick(self, slots: Tensor) -> tuple[Tensor, ...]:
        return pick(self.buffer.keys, slots), pick(self.buffer.values, slots)

    def dot(self, query: Tensor) -> Tensor:
        return product(query, self.keys.transpose(2, 3))

    def mix(self, weights: Tensor) -> Tensor:
        return product(weights, self.values)


class Buffer:
    """Storage [b, H, capacity, d] of which somebody wrote the first `used` rows."""

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, used: int) -> None:
        self.keys, self.values, self.positions, self.used = keys, values, positions, used

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> Buffer:
        capacity = -(-(keys.shape[2] + spare) // BLOCK) * BLOCK
        made = [like.new_zeros(*like.shape[:2], capacity, *like.shape[3:]) for like in (keys, values, positions)]
        buffer = cls(made[0], made[1], made[2], used=0)
        buffer.write(0, keys, values, positions)
        return buffer

    def write(self, start: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.used = start + keys.shape[2]
        self.keys[:, :, start : self.used] = keys
        self.values[:, :, start : self.used] = values
        self.positions[:, :, start : self.used] = positions


class Packed:
    """Rows in few bits; never changed in place."""

    def __init__(self, keys: Quantised, values: Quantised, positions: Tensor) -> None:
        self._keys, self._values, self.positions = keys, values, positions

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, positions: Tensor, packing: Packing) -> Packed:
        return cls(
            Quantised.pack(keys, packing.bits, "channel", packing.group),
            Quantised.pack(values, packing.bits, "token", packing.group),
            positions.clone(),
        )

    @property
    def keys(self) -> Tensor:
        return self._keys.dense()

    @property
    def values(self) -> Tensor:
        return self._values.dense()

    @property
    def tokens(self) -> int:
        return self._keys.tokens

    @property
    def batch(self) -> int:
        return self._keys.codes.shape[0]

    @property
    def heads(self) -> int:
        return self._keys.codes.shape[1]

    @property
    def device(self) -> torch.device:
        return self.positions.device

    @property
    def key_bytes(self) -> int:
        return self._keys.nbytes

    @property
    def value_bytes(self) -> int:
        return self._values.nbytes

    @property
    def tensors(self) -> list[Tensor]:
        return [*self._keys.tensors, *self._values.tensors, self.positions]

    @property
    def host_tensors(self) -> list[Tensor]:
        return []

    def append(self, other: Packed) -> Packed:
        positions = torch.cat([self.positions, other.positions], dim=2)
        return Packed(self._keys.append(other._keys), self._values.append(other._values), positions)

    def pick(self, slots: Tensor) -> tuple[Tensor, ...]:
        return self._keys.rows(slots), self._values.rows(slots)

    def dot(self, query: Tensor) -> Tensor:
        return torch.cat([product(query, part.transpose(2, 3)) for part in self._keys.parts()], dim=-1)

    def mix(self, weights: Tensor) -> Tensor:
        parts = _aligned(weights, self._values.parts())
        return functools.reduce(torch.add, (product(some, part) for some, part in parts))


def _aligned(weights: Tensor, parts: Iterator[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    start = 0
    for part in parts:
        yield weights[..., start : start + part.shape[2]], part
        start += part.shape[2]


def pack_oldest(rows: Rows, packing: Packing) -> tuple[Packed, Rows] | None:
    """Split off the oldest rows, in whole groups, and pack them; None while there are too few."""
    count = ripe(rows.tokens, packing.residual, packing.group)
    if count == 0:
        return None
    keys, values, positions = (part.tensor_split([count], dim=2) for part in (rows.keys, rows.values, rows.positions))
    packed = Packed.of(keys[0], values[0], positions[0], packing)
    return packed, Rows.of(keys[1], values[1], positions[1], spare=packing.group)


def product(rows: Tensor, table: Tensor) -> Tensor:
    """Grouped matrix product of query heads with KV heads: [b, Hq, q, k] by [b or 1, H, k, m] -> [b, Hq, q, m].

    A table of batch 1 is shared by all rows of the batch and read once.
    """
    batch, query_heads, queries, inner = rows.shape
    stored, heads, _, width = table.shape
    together = query_heads // heads * queries  # not -1: there may be no inner dimension at all
    grouped = rows.reshape(batch, heads, together, inner)
    if stored == batch:
        return torch.matmul(grouped, table).reshape(batch, query_heads, queries, width)
    folded = grouped.transpose(0, 1).reshape(1, heads, batch * together, inner)
    unfolded = torch.matmul(folded, table).reshape(heads, batch, together, width).transpose(0, 1)
    return unfolded.reshape(batch, query_heads, queries, width)
