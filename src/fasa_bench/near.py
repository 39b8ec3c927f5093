"""Rows of host memory that are brought to the layer's device: which are there already, and which are fetched ahead.

On an accelerator copies run on a stream of their own; on a CPU "fetching" copies within one memory, by the same rules.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fasa_bench.tail import HostTail

Prefetch = Literal["none", "last_step", "next_layer"]
Piece = tuple[HostTail, int]  # where so many tokens lie, one piece behind the other


class Fetched(NamedTuple):
    """rows [b, heads, m, w]. found: how many of them lay on the device already. nbytes: what had to be moved."""

    rows: Tensor
    found: int
    nbytes: int


@dataclass
class Near:
    """What of one layer's host rows lies on its device.

    prefetch: "last_step" keeps the rows of the last choice, so that the next one fetches only what it lacks;
    "next_layer" forgets them and fetches them again while the layer before computes, which moves more but holds rows
    of two layers at a time; "none" keeps nothing.
    slots [b, heads, m] on the host, rows [b, heads, m, w] on the device: the last choice.
    """

    prefetch: Prefetch
    slots: Tensor | None = None
    rows: Tensor | None = None

    def fetch(self, slots: Tensor, pieces: Sequence[Piece]) -> Fetched:
        """Rows of slots [b, heads, m]. Those that ascend are found again at the next step, others are fetched anew."""
        device = slots.device
        # waits for the device: the choice is there then, and so are the newest rows on the host
        slots = slots.cpu().contiguous()
        before = self.slots if self.rows is not None else None
        if before is None or before.shape[:2] != slots.shape[:2]:
            places, moved = _collect(slots, pieces, device)
            rows = _arrived(_moved(moved, device))
        else:
            assert self.rows is not None
            nearest = torch.searchsorted(before, slots).clamp_(max=before.shape[2] - 1)
            found = before.gather(2, nearest) == slots
            places, moved = _collect(slots.masked_fill(found, -1), pieces, device)
            fetched = _moved(moved, device)
            first = torch.arange(0, before.numel(), before.shape[2]).view(*before.shape[:2], 1)
            kept = _arrived(self.rows).flatten(0, 2)
            rows = kept.index_select(0, (first + nearest).flatten().to(device))
            rows.index_copy_(0, places.to(device), _arrived(fetched))
        rows = rows.view(*slots.shape, -1)
        self.slots = None if self.prefetch == "none" else slots
        self.rows = rows if self.prefetch == "last_step" else None
        return Fetched(rows, slots.numel() - len(places), moved.nbytes)

    def ahead(self, pieces: Sequence[Piece], device: torch.device) -> int:
        """Start to fetch the last choice once more if it was not kept; returns how many bytes that moves."""
        if self.prefetch != "next_layer" or self.slots is None or self.rows is not None:
            return 0
        _, rows = _collect(self.slots, pieces, device)
        self.rows = _moved(rows, device).view(*self.slots.shape, -1)
        return rows.nbytes


def _collect(wanted: Tensor, pieces: Sequence[Piece], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of those slots [b, heads, m], on the host, that are not -1: their places in `wanted`, and rows [k, w]."""
    _, heads, count = wanted.shape
    flat = wanted.flatten()
    places = (flat >= 0).nonzero()[:, 0]
    slots = flat[places]
    rows, query_heads = places // (heads * count), places // count % heads
    storage = pieces[0][0].storage
    out = torch.empty(len(places), storage.shape[-1], dtype=storage.dtype, pin_memory=device.type != "cpu")
    start = 0
    for tail, tokens in pieces:
        head = query_heads // (heads // tail.storage.shape[2])
        if len(pieces) == 1:
            tail.take(slots, rows, head, out)
        else:
            here = ((slots >= start) & (slots < start + tokens)).nonzero()[:, 0]
            part = torch.empty(len(here), out.shape[1], dtype=out.dtype)
            tail.take(slots[here] - start, rows[here], head[here], part)
            out[here] = part
        start += tokens
    return places, out


@functools.cache
def _stream(device: torch.device) -> Any:
    """The stream on which this device's copies run; None on a CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).Stream(device)


def _moved(rows: Tensor, device: torch.device) -> Tensor:
    """Pinned rows on their way to the device; use them through `_arrived`."""
    stream = _stream(device)
    with contextlib.nullcontext() if stream is None else torch.get_device_module(device).stream(stream):
        return rows.to(device, non_blocking=True)


def _arrived(rows: Tensor) -> Tensor:
    """The same rows for the stream that computes, which waits for them."""
    stream = _stream(rows.device)
    if stream is not None:
        computing = torch.get_device_module(rows.device).current_stream(rows.device)
        computing.wait_stream(stream)
        rows.record_stream(computing)
    return rows
