"""Rows whose leading key dimensions lie apart from the rest, so that scoring all tokens reads no more than those.

The dimensions of each KV head are permuted, which needs no memory and is never undone for attention: a query permuted
in the same way gives the same products. Shapes as in fasa_bench.cache; r leading dimensions, v of a value.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fasa_bench.lead import BLOCKS, Layout, Lead, make_lead
from fasa_bench.quantised import pick
from fasa_bench.segments import BLOCK, product
from fasa_bench.tail import CHUNK, HostTail, TailRows


@dataclass(frozen=True)
class Split:
    """order [H, d]: the dimensions of each KV head in the order they are stored. lead: the first so many are r.

    layout: of the leading dimensions, as who reads them expects it.
    offload: all else that a token has lies in the host's memory (fasa_bench.tail).
    """

    order: Tensor
    lead: int
    layout: Layout = BLOCKS
    offload: bool = False

    def apply(self, rows: Tensor) -> Tensor:
        """Dimensions put in stored order: [b, H or Hq, m, d], the same shape."""
        batch, heads, count, dim = rows.shape
        kv_heads = len(self.order)
        index = self.order[None, :, None].expand(batch, -1, heads // kv_heads * count, -1)
        return rows.reshape(batch, kv_heads, -1, dim).gather(3, index).view(rows.shape)

    def undo(self, rows: Tensor) -> Tensor:
        """The inverse of `apply`."""
        batch, heads, count, dim = rows.shape
        kv_heads = len(self.order)
        index = self.order.argsort(1)[None, :, None].expand(batch, -1, heads // kv_heads * count, -1)
        return rows.reshape(batch, kv_heads, -1, dim).gather(3, index).view(rows.shape)

    def parts(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """A query [b, Hq, q, d] for the leading dimensions [b, Hq, q, r] and for the others."""
        ordered = self.apply(query)
        return ordered[..., : self.lead], ordered[..., self.lead :]


class SplitBuffer:
    """Storage for `capacity` tokens, of which somebody wrote the first `used`."""

    def __init__(self, split: Split, like: Tensor, position_heads: int, tokens: int, value_dim: int) -> None:
        """Room for so many tokens at least, for the batch and heads of `like` [b, H, ...], of its type and device."""
        batch, self.heads = like.shape[:2]
        heads, dim = self.heads, split.order.shape[1]
        self.capacity = -(-tokens // BLOCK) * BLOCK
        self.lead: Lead = make_lead(batch, heads, self.capacity, split.lead, like, split.layout.block)
        make_tail = HostTail if split.offload else TailRows
        self.tail: HostTail | TailRows = make_tail(
            batch, heads, self.capacity, dim - split.lead + value_dim, value_dim, like
        )
        shape = (batch, position_heads, self.capacity)
        self.positions = torch.zeros(shape, dtype=torch.long, device=like.device)
        self.used = 0

    def write(self, split: Split, start: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.used = start + keys.shape[2]
        self.positions[:, :, start : self.used] = positions
        if keys.shape[2] == 1 and split.layout.append and not split.offload:
            token = keys[:, :, 0], values[:, :, 0]
            split.layout.append(*token, split.order, self.lead.storage, self.tail.storage, start)
            return
        for first in range(0, keys.shape[2], CHUNK):
            now = slice(first, first + CHUNK)
            lead, rest = split.parts(keys[:, :, now])
            self.lead.write(start + first, lead)
            self.tail.write(start + first, rest, values[:, :, now])

    def grown(self, split: Split, tokens: int, spare: int) -> SplitBuffer:
        """A copy of the first tokens with more room."""
        lead = self.lead.rows(tokens)
        other = SplitBuffer(split, lead, self.positions.shape[1], tokens + spare, self.tail.dim)
        other.used = tokens
        other.lead.write(0, lead)
        other.tail.take_over(self.tail, tokens)
        other.positions[:, :, :tokens] = self.positions[:, :, :tokens]
        return other


class SplitRows:
    """A segment (fasa_bench.segments.Segment) in split storage; shared between forks as plain rows are."""

    def __init__(self, split: Split, buffer: SplitBuffer, tokens: int) -> None:
        self.split, self.buffer, self.tokens = split, buffer, tokens

    @classmethod
    def of(cls, split: Split, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> SplitRows:
        buffer = SplitBuffer(split, keys, positions.shape[1], keys.shape[2] + spare, values.shape[3])
        buffer.write(split, 0, keys, values, positions)
        return cls(split, buffer, keys.shape[2])

    @property
    def batch(self) -> int:
        return self.buffer.lead.batch

    @property
    def heads(self) -> int:
        return self.buffer.heads

    @property
    def device(self) -> torch.device:
        return self.buffer.positions.device

    @property
    def tensors(self) -> list[Tensor]:
        near = [self.buffer.lead.storage, self.buffer.positions, self.split.order]
        return near if self.split.offload else [*near, self.buffer.tail.storage]

    @property
    def host_tensors(self) -> list[Tensor]:
        return [self.buffer.tail.storage] if self.split.offload else []

    @property
    def spare(self) -> int:
        """Rows that are free behind these."""
        return self.buffer.capacity - self.tokens

    @property
    def storage(self) -> tuple[Tensor, Tensor, Tensor]:
        """For kernels: leading and other key dimensions and values of the whole capacity, [b, H, capacity, ...]."""
        dim, tail = self.value_dim, self.buffer.tail.storage
        return self.buffer.lead.storage, tail[..., :-dim], tail[..., -dim:]

    @property
    def value_dim(self) -> int:
        return self.buffer.tail.dim

    @property
    def lead_bytes(self) -> int:
        return self._bytes(self.split.lead)

    @property
    def key_bytes(self) -> int:
        return self._bytes(self.split.order.shape[1])

    @property
    def value_bytes(self) -> int:
        return self._bytes(self.value_dim)

    def _bytes(self, width: int) -> int:
        """Of so many numbers of each token."""
        return self.batch * self.heads * self.tokens * width * self.buffer.tail.storage.itemsize

    @property
    def keys(self) -> Tensor:
        return self.split.undo(torch.cat([self.buffer.lead.rows(self.tokens), self._rest], dim=-1))

    @property
    def values(self) -> Tensor:
        return self.buffer.tail.values(self.tokens)

    @property
    def positions(self) -> Tensor:
        return self.buffer.positions[:, :, : self.tokens]

    @property
    def _rest(self) -> Tensor:
        return self.buffer.tail.rest(self.tokens)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, reserve: int) -> SplitRows:
        """These rows and the new ones; in place where that is safe."""
        buffer, end = self.buffer, self.tokens + keys.shape[2]
        if buffer.used != self.tokens or end > buffer.capacity:
            buffer = buffer.grown(self.split, self.tokens, max(keys.shape[2] + reserve, self.tokens // 8))
        buffer.write(self.split, self.tokens, keys, values, positions)
        return SplitRows(self.split, buffer, end)

    def pick(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Leading dimensions, and the tail unless it is in the host's memory."""
        lead = self.buffer.lead.pick(slots)
        return (lead,) if self.split.offload else (lead, pick(self.buffer.tail.storage, slots))

    def parts_of(self, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tail [..., d - r + v]: the other key dimensions, and the values."""
        return tail[..., : -self.value_dim], tail[..., -self.value_dim :]

    def lead_dot(self, query: Tensor) -> Tensor:
        """Products over the leading dimensions: [b, Hq, q, r] -> [B, b, Hq, q, C]; the first `tokens` count."""
        batch, query_heads, queries, width = query.shape
        grouped = query.reshape(batch, self.heads, -1, width)
        if self.batch < batch:  # stored once for all rows of the batch: read once
            grouped = grouped.transpose(0, 1).reshape(1, self.heads, -1, width)
        products = self.buffer.lead.dot(grouped, self.tokens)
        blocks, *_, block = products.shape
        if self.batch < batch:
            products = products.reshape(blocks, self.heads, batch, -1, block).transpose(1, 2)
        return products.reshape(blocks, batch, query_heads, queries, block)

    def dot(self, query: Tensor) -> Tensor:
        lead, rest = self.split.parts(query)
        return in_one(self.lead_dot(lead), self.tokens) + product(rest, self._rest.transpose(2, 3))

    def mix(self, weights: Tensor) -> Tensor:
        return product(weights, self.values)


def in_one(products: Tensor, tokens: int) -> Tensor:
    """Blocks put behind each other: [B, b, Hq, q, C] -> [b, Hq, q, tokens]."""
    return products.permute(1, 2, 3, 0, 4).flatten(3)[..., :tokens]


def at(products: Tensor, slots: Tensor) -> Tensor:
    """The products of some tokens, without `in_one`: [B, b, Hq, 1, C], slots [b, heads, m] -> [b, Hq, 1, m]."""
    _, batch, heads, _, block = products.shape
    slots = slots.repeat_interleave(heads // slots.shape[1], dim=1)
    row = _first_of_heads(batch, heads, block, slots.device)
    return products.take((slots // block) * (batch * heads * block) + slots % block + row)[:, :, None]


@functools.lru_cache(maxsize=64)
def _first_of_heads(batch: int, heads: int, block: int, device: torch.device) -> Tensor:
    """Where in a block the products of each query head begin: [b, Hq, 1]."""
    return torch.arange(batch * heads, device=device).view(batch, heads, 1) * block
