"""What a split cache stores besides the leading key dimensions: the other ones of a token and its value, in one row.

They lie together because they are fetched together. Shapes as in fasa_bench.cache; w = d - r + v numbers a row, v of
them a value (usually d).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fasa_bench.clock import synchronise

CHUNK = 4096  # tokens that go to the host at a time, so that the device never holds a second copy of a layer


class Tail(Protocol):
    """The rest of so many tokens, wherever it lies."""

    storage: Tensor
    dim: int  # v

    def write(self, start: int, rest: Tensor, values: Tensor) -> None:
        """Put rows [b, H, m, d - r] and [b, H, m, v] at tokens start, start + 1, ..."""
        ...

    def take_over(self, other: Tail, tokens: int) -> None:
        """Copy the first tokens of another one of the same kind."""
        ...

    def rest(self, tokens: int) -> Tensor:
        """The other key dimensions of the first tokens on the layer's device: [b, H, tokens, d - r]."""
        ...

    def values(self, tokens: int) -> Tensor:
        """[b, H, tokens, v] on the layer's device."""
        ...


class TailRows:
    """On the layer's device: [b, H, capacity, w]."""

    def __init__(self, batch: int, heads: int, capacity: int, width: int, dim: int, like: Tensor) -> None:
        self.storage, self.dim = like.new_zeros(batch, heads, capacity, width), dim

    def write(self, start: int, rest: Tensor, values: Tensor) -> None:
        rows = self.storage[:, :, start : start + values.shape[2]]
        rows[..., : -self.dim] = rest
        rows[..., -self.dim :] = values

    def take_over(self, other: Tail, tokens: int) -> None:
        self.storage[:, :, :tokens] = other.storage[:, :, :tokens]

    def rest(self, tokens: int) -> Tensor:
        return self.storage[:, :, :tokens, : -self.dim]

    def values(self, tokens: int) -> Tensor:
        return self.storage[:, :, :tokens, -self.dim :]


class HostTail:
    """In the host's memory, pinned if the layer lies on an accelerator: [capacity, b, H, w].

    Tokens come first so that a new one is a single contiguous copy that nothing waits for. Whoever reads rows has to
    let the device come to rest first, for copies that are under way.
    """

    def __init__(self, batch: int, heads: int, capacity: int, width: int, dim: int, like: Tensor) -> None:
        self.device, self.dim = like.device, dim
        self.storage = torch.zeros(
            capacity, batch, heads, width, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu"
        )

    def write(self, start: int, rest: Tensor, values: Tensor) -> None:
        for first in range(0, values.shape[2], CHUNK):
            now = slice(first, first + CHUNK)
            rows = torch.cat([rest[:, :, now], values[:, :, now]], dim=-1).permute(2, 0, 1, 3).contiguous()
            self.storage[start + first : start + first + len(rows)].copy_(rows, non_blocking=True)

    def take_over(self, other: Tail, tokens: int) -> None:
        synchronise(self.device)
        self.storage[:tokens] = other.storage[:tokens]

    def rest(self, tokens: int) -> Tensor:
        return self._moved(self.storage[:tokens, ..., : -self.dim])

    def values(self, tokens: int) -> Tensor:
        return self._moved(self.storage[:tokens, ..., -self.dim :])

    def take(self, slots: Tensor, rows: Tensor, heads: Tensor, out: Tensor) -> None:
        """Rows at `slots` of these rows of the batch and KV heads, [k] each on the host, into `out` [k, w]."""
        _, batch, kv_heads, width = self.storage.shape
        index = (slots * batch + rows.clamp(max=batch - 1)) * kv_heads + heads
        torch.index_select(self.storage.view(-1, width), 0, index, out=out)

    def _moved(self, rows: Tensor) -> Tensor:
        synchronise(self.device)
        return rows.permute(1, 2, 0, 3).to(self.device)
