"""Rows whose leading key dimensions lie apart from the rest, so that scoring all tokens reads no more than those.

The dimensions of each KV head are permuted, which needs no memory and is never undone for attention: a query permuted
in the same way gives the same products. Shapes as in fasa_bench.cache; r leading dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fasa_bench.lead import Lead, make_lead
from fasa_bench.quantised import pick
from fasa_bench.segments import Chosen, product


@dataclass(frozen=True)
class Split:
    """order [H, d]: the dimensions of each KV head in the order they are stored. lead: the first so many are r."""

    order: Tensor
    lead: int

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
    """Storage for `capacity` tokens, of which somebody wrote the first `used`: rest [b, H, capacity, d - r]."""

    def __init__(self, split: Split, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> None:
        batch, heads, tokens, dim = keys.shape
        self.lead: Lead = make_lead(batch, heads, tokens + spare, split.lead, like=keys)
        capacity = self.lead.capacity
        self.rest = keys.new_zeros(batch, heads, capacity, dim - split.lead)
        self.values = values.new_zeros(batch, heads, capacity, dim)
        self.positions = positions.new_zeros(batch, positions.shape[1], capacity)
        self.used = 0

    def write(self, split: Split, start: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.used = start + keys.shape[2]
        lead, rest = split.parts(keys)
        self.lead.write(start, lead)
        self.rest[:, :, start : self.used] = rest
        self.values[:, :, start : self.used] = values
        self.positions[:, :, start : self.used] = positions


class SplitRows:
    """A segment (fasa_bench.segments.Segment) in split storage; shared between forks as plain rows are."""

    def __init__(self, split: Split, buffer: SplitBuffer, tokens: int) -> None:
        self.split, self.buffer, self.tokens = split, buffer, tokens

    @classmethod
    def of(cls, split: Split, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> SplitRows:
        buffer = SplitBuffer(split, keys, values, positions, spare)
        buffer.write(split, 0, keys, values, positions)
        return cls(split, buffer, keys.shape[2])

    @property
    def batch(self) -> int:
        return self.buffer.values.shape[0]

    @property
    def heads(self) -> int:
        return self.buffer.values.shape[1]

    @property
    def device(self) -> torch.device:
        return self.buffer.positions.device

    @property
    def tensors(self) -> list[Tensor]:
        return [self.buffer.lead.storage, self.buffer.rest, self.buffer.values, self.buffer.positions, self.split.order]

    @property
    def spare(self) -> int:
        """Rows that are free behind these."""
        return self.buffer.lead.capacity - self.tokens

    @property
    def lead_bytes(self) -> int:
        return self.batch * self.heads * self.tokens * self.split.lead * self.buffer.values.itemsize

    @property
    def key_bytes(self) -> int:
        return self.value_bytes

    @property
    def value_bytes(self) -> int:
        return self.values.nbytes

    @property
    def keys(self) -> Tensor:
        return self.split.undo(torch.cat([self.buffer.lead.rows(self.tokens), self._rest], dim=-1))

    @property
    def values(self) -> Tensor:
        return self.buffer.values[:, :, : self.tokens]

    @property
    def positions(self) -> Tensor:
        return self.buffer.positions[:, :, : self.tokens]

    @property
    def _rest(self) -> Tensor:
        return self.buffer.rest[:, :, : self.tokens]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, reserve: int) -> SplitRows:
        """These rows and the new ones; in place where that is safe."""
        buffer, end = self.buffer, self.tokens + keys.shape[2]
        if buffer.used != self.tokens or end > buffer.lead.capacity:
            spare = max(keys.shape[2] + reserve, self.tokens // 8)
            buffer = SplitRows.of(self.split, self.keys, self.values, self.positions, spare).buffer
        buffer.write(self.split, self.tokens, keys, values, positions)
        return SplitRows(self.split, buffer, end)

    def pick(self, slots: Tensor) -> Chosen:
        lead, rest = self.buffer.lead.pick(slots), pick(self.buffer.rest, slots)
        return Chosen((lead, rest), pick(self.buffer.values, slots))

    def lead_dot(self, query: Tensor) -> Tensor:
        """Products over the leading dimensions: [b, Hq, q, r] -> [b, Hq, q, B, C]; the first `tokens` count."""
        batch, query_heads, queries, width = query.shape
        grouped = query.reshape(batch, self.heads, -1, width)
        if self.batch < batch:  # stored once for all rows of the batch: read once
            grouped = grouped.transpose(0, 1).reshape(1, self.heads, -1, width)
        products = self.buffer.lead.dot(grouped, self.tokens)
        blocks, block = products.shape[-2:]
        if self.batch < batch:
            products = products.reshape(self.heads, batch, -1, blocks, block).transpose(0, 1)
        return products.reshape(batch, query_heads, queries, blocks, block)

    def dot(self, query: Tensor) -> Tensor:
        lead, rest = self.split.parts(query)
        return self.lead_dot(lead).flatten(3)[..., : self.tokens] + product(rest, self._rest.transpose(2, 3))

    def mix(self, weights: Tensor) -> Tensor:
        return product(weights, self.values)
