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
    """order [H, d]: the dimensions of each KV head in the order they are stored. lead: the first so many are r.

    blocks: the leading dimensions lie as a CPU reads them best, not as the kernels expect them (fasa_bench.lead).
    """

    order: Tensor
    lead: int
    blocks: bool = True

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
    """Storage for `capacity` tokens, of which somebody wrote the first `used`.

    tail [b, H, capacity, d - r + d]: the other key dimensions and the value of a token lie together, for they are
    fetched together.
    """

    def __init__(self, split: Split, keys: Tensor, values: Tensor, positions: Tensor, spare: int) -> None:
        batch, heads, tokens, dim = keys.shape
        self.lead: Lead = make_lead(batch, heads, tokens + spare, split.lead, keys, split.blocks)
        capacity = self.lead.capacity
        self.tail = keys.new_zeros(batch, heads, capacity, 2 * dim - split.lead)
        self.positions = positions.new_zeros(batch, positions.shape[1], capacity)
        self.used = 0

    def write(self, split: Split, start: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.used = start + keys.shape[2]
        lead, rest = split.parts(keys)
        self.lead.write(start, lead)
        self.tail[:, :, start : self.used] = torch.cat([rest, values], dim=-1)
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
        return self.buffer.tail.shape[0]

    @property
    def heads(self) -> int:
        return self.buffer.tail.shape[1]

    @property
    def device(self) -> torch.device:
        return self.buffer.positions.device

    @property
    def tensors(self) -> list[Tensor]:
        return [self.buffer.lead.storage, self.buffer.tail, self.buffer.positions, self.split.order]

    @property
    def spare(self) -> int:
        """Rows that are free behind these."""
        return self.buffer.lead.capacity - self.tokens

    @property
    def storage(self) -> tuple[Tensor, Tensor, Tensor]:
        """For kernels: leading and other key dimensions and values of the whole capacity, [b, H, capacity, ...]."""
        dim = self.split.order.shape[1]
        return self.buffer.lead.storage, self.buffer.tail[..., :-dim], self.buffer.tail[..., -dim:]

    @property
    def lead_bytes(self) -> int:
        return self.batch * self.heads * self.tokens * self.split.lead * self.buffer.tail.itemsize

    @property
    def key_bytes(self) -> int:
        return self.value_bytes

    @property
    def value_bytes(self) -> int:
        return self.values.numel() * self.values.itemsize

    @property
    def keys(self) -> Tensor:
        return self.split.undo(torch.cat([self.buffer.lead.rows(self.tokens), self._rest], dim=-1))

    @property
    def values(self) -> Tensor:
        return self.buffer.tail[:, :, : self.tokens, -self.split.order.shape[1] :]

    @property
    def positions(self) -> Tensor:
        return self.buffer.positions[:, :, : self.tokens]

    @property
    def _rest(self) -> Tensor:
        return self.buffer.tail[:, :, : self.tokens, : -self.split.order.shape[1]]

    def append(self, keys: Tensor, values: Tensor, positions: Tensor, reserve: int) -> SplitRows:
        """These rows and the new ones; in place where that is safe."""
        buffer, end = self.buffer, self.tokens + keys.shape[2]
        if buffer.used != self.tokens or end > buffer.lead.capacity:
            spare = max(keys.shape[2] + reserve, self.tokens // 8)
            buffer = SplitRows.of(self.split, self.keys, self.values, self.positions, spare).buffer
        buffer.write(self.split, self.tokens, keys, values, positions)
        return SplitRows(self.split, buffer, end)

    def pick(self, slots: Tensor) -> Chosen:
        rest, values = self._pick_tail(slots)
        return Chosen((self.buffer.lead.pick(slots), rest), values)

    def pick_rest(self, slots: Tensor) -> Chosen:
        """`pick` without the leading dimensions."""
        rest, values = self._pick_tail(slots)
        return Chosen((rest,), values)

    def _pick_tail(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        tail = pick(self.buffer.tail, slots)
        dim = self.split.order.shape[1]
        return tail[..., :-dim], tail[..., -dim:]

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
    row = torch.arange(batch * heads, device=slots.device).view(batch, heads, 1) * block
    return products.take((slots // block) * (batch * heads * block) + slots % block + row)[:, :, None]
