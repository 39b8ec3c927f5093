"""Storage of the leading key dimensions of a split cache, laid out for the product that reads all of them.

Shapes as in fasa_bench.cache; r leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

BLOCK = 512  # tokens, by which PyTorch's product of a matrix with few rows is fastest on a CPU


class Layout(NamedTuple):
    """How leading dimensions lie: in blocks of so many tokens (LeadBlocks), 0: in rows (LeadRows).

    append: writes one token, for who can do it faster: key, value [b, H, d], the dimensions' order [H, d], the storage
    of the lead and of the tail (fasa_bench.tail.TailRows), and the token's place.
    """

    block: int
    append: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], None] | None = None


ROWS, BLOCKS = Layout(0), Layout(BLOCK)


class Lead(Protocol):
    """Leading dimensions of `capacity` tokens, for the whole batch or once for all of it."""

    @property
    def capacity(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def storage(self) -> Tensor: ...

    def write(self, start: int, rows: Tensor) -> None:
        """Put rows [b, H, m, r] at tokens start, start + 1, ..."""
        ...

    def rows(self, tokens: int) -> Tensor:
        """The first tokens as they were written: [b, H, tokens, r]."""
        ...

    def pick(self, slots: Tensor) -> Tensor:
        """Those of slots [b, heads, m], heads as in KVLayer.gather: [b, heads, m, r]."""
        ...

    def dot(self, query: Tensor, tokens: int) -> Tensor:
        """Products of queries [b or 1, H, g, r] with the first tokens, in blocks: [B, b, H, g, C].

        B * C >= tokens; what lies behind the last token is not defined.
        """
        ...


def make_lead(batch: int, heads: int, tokens: int, width: int, like: Tensor, block: int) -> Lead:
    """Room for so many tokens at least, in the type and on the device of `like`; in blocks of so many, 0: in rows."""
    if block:
        return LeadBlocks(like.new_zeros(-(-tokens // block), batch, heads, width, block))
    return LeadRows(like.new_zeros(batch, heads, tokens, width))


class LeadRows:
    """One row a token, [b, H, capacity, r]: what the kernels of an accelerator read."""

    def __init__(self, storage: Tensor) -> None:
        self.storage = storage

    @property
    def capacity(self) -> int:
        return self.storage.shape[2]

    @property
    def batch(self) -> int:
        return self.storage.shape[0]

    def write(self, start: int, rows: Tensor) -> None:
        self.storage[:, :, start : start + rows.shape[2]] = rows

    def rows(self, tokens: int) -> Tensor:
        return self.storage[:, :, :tokens]

    def pick(self, slots: Tensor) -> Tensor:
        batch, heads = _heads_of(slots, self.storage.shape[0], self.storage.shape[1])
        return self.storage[batch, heads, slots]

    def dot(self, query: Tensor, tokens: int) -> Tensor:
        return torch.matmul(query, self.rows(tokens).transpose(2, 3))[None]


class LeadBlocks:
    """Blocks of C tokens, transposed inside: [blocks, b, H, r, C].

    A product with few queries then streams through memory once and needs no reduction over a short row: on a CPU up to
    five times as fast as from rows. Blocks come first so that any number of them is one contiguous batch of products.
    """

    def __init__(self, storage: Tensor) -> None:
        self.storage, self.block = storage, storage.shape[-1]

    @property
    def capacity(self) -> int:
        return len(self.storage) * self.block

    @property
    def batch(self) -> int:
        return self.storage.shape[1]

    def write(self, start: int, rows: Tensor) -> None:
        end = start + rows.shape[2]
        while start < end:
            block, first = divmod(start, self.block)
            count = min(self.block - first, end - start)
            self.storage[block, ..., first : first + count] = rows[:, :, :count].transpose(2, 3)
            rows, start = rows[:, :, count:], start + count

    def rows(self, tokens: int) -> Tensor:
        return self.storage.permute(1, 2, 0, 4, 3).flatten(2, 3)[:, :, :tokens]

    def pick(self, slots: Tensor) -> Tensor:
        _, stored, kv_heads, width, size = self.storage.shape
        batch, heads = _heads_of(slots, stored, kv_heads)
        first = (batch * kv_heads + heads) * (width * size)  # of each row's head, in the block
        place = (slots // size) * (stored * kv_heads * width * size) + slots % size + first
        return self.storage.take(place[:, :, None] + torch.arange(0, width * size, size)[:, None]).transpose(2, 3)

    def dot(self, query: Tensor, tokens: int) -> Tensor:
        return torch.matmul(query, self.storage[: -(-tokens // self.block)])


def _heads_of(slots: Tensor, stored: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Row of the stored batch and KV head of each slot's row [b, heads, ...], as tensors that broadcast with it."""
    batch = torch.arange(slots.shape[0], device=slots.device).clamp(max=stored - 1)[:, None, None]
    wanted = max(slots.shape[1], kv_heads)
    return batch, (torch.arange(wanted, device=slots.device) // (wanted // kv_heads))[:, None]
