"""Exact attention of one new token: over chosen slots of the split cache, or over all tokens (dense).

Split-K: several programs share a row's tokens, so that few rows fill the device; the last of them to finish merges
their results, in a fixed order. The same kernel is the dense baseline, over unsplit keys.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from .backend import autotune, jit, kernel, part_of_row, parts_of, power_of_2, product
from .tip import LOG2E

with suppress(ImportError):
    import triton.language as tl

MOST_PARTS = 32  # of a row's chosen tokens
MOST_PARTS_DENSE = 64  # of all


def attend_reference(
    query: Tensor, lead: Tensor, rest: Tensor | None, values: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """Attention of each query head over its row's slots (-1: none), in float32: see `attend`."""
    kv_heads, rows = values.shape[1], slots.shape[1]
    keys = lead if rest is None else torch.cat((lead, rest), -1)
    if rows != kv_heads:  # one row for each query head
        keys, values = (x.repeat_interleave(rows // kv_heads, 1) for x in (keys, values))
    at = slots.long().clamp(min=0)[..., None]
    keys, values = (x.gather(2, at.expand(-1, -1, -1, x.shape[3])).float() for x in (keys, values))
    logits = scale * query.float().unflatten(1, (rows, -1)) @ keys.transpose(2, 3)  # [b, R, Hq / R, k]
    weights = logits.masked_fill((slots < 0)[:, :, None], float("-inf")).softmax(-1)
    return (weights.nan_to_num() @ values).flatten(1, 2)


def dense_reference(query: Tensor, keys: Tensor, values: Tensor, first: Tensor, end: Tensor, scale: float) -> Tensor:
    """Attention over all tokens in [first, end), in float32: see `dense`."""
    token = torch.arange(keys.shape[2], device=keys.device)
    held = (token >= first[:, None]) & (token < end[:, None])
    slots = token.where(held, -1)[:, None].expand(-1, keys.shape[1], -1)
    return attend_reference(query, keys, None, values, slots, scale)


@jit
def _merge(
    outs: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    output: tl.tensor,
    row: tl.tensor,
    parts: tl.tensor,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    PARTS_PAD: tl.constexpr,
) -> None:
    """Join the parts' results of one row: each is weighed by its share of the sum of exponentials."""
    part = tl.arange(0, PARTS_PAD)
    real = part < parts
    dim = tl.arange(0, D_PAD)
    for g in tl.static_range(HEADS):
        head = row * HEADS + g
        peak = tl.load(peaks + head * parts + part, mask=real, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(sums + head * parts + part, mask=real, other=0.0, cache_modifier=".cg")
        top = tl.max(peak, axis=0)
        weight = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top))
        norm = tl.sum(total * weight, axis=0)
        weight = weight / tl.where(norm > 0.0, norm, 1.0)
        at = (head * parts + part)[:, None] * D + dim[None, :]
        out = tl.load(outs + at, mask=real[:, None] & (dim < D)[None, :], other=0.0, cache_modifier=".cg")
        out = tl.sum(out * weight[:, None], axis=0)
        tl.store(output + head * D + dim, out.to(output.dtype.element_ty), mask=dim < D)


@autotune(
    [
        ({"BLOCK": 64}, 4, 3),
        ({"BLOCK": 16}, 4, 2),
        ({"BLOCK": 32}, 4, 2),
        ({"BLOCK": 32}, 4, 4),
        ({"BLOCK": 64}, 8, 2),
        ({"BLOCK": 128}, 8, 3),
    ],
    key=["HEADS", "R", "D", "parts", "CHOSEN", "size"],
)
@kernel("parts", "size")
def _attend_kernel(
    query: tl.tensor,
    lead: tl.tensor,
    rest: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    outs: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    done: tl.tensor,
    output: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: float,
    query_batch: tl.tensor,
    query_head: tl.tensor,
    lead_batch: tl.tensor,
    lead_head: tl.tensor,
    rest_batch: tl.tensor,
    rest_head: tl.tensor,
    values_batch: tl.tensor,
    values_head: tl.tensor,
    k: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,
    CHOSEN: tl.constexpr,  # attend to `slots`, else to all of [first, end)
    ROWS: tl.constexpr,  # of each sequence
    SHARE: tl.constexpr,  # rows for each KV head
    HEADS: tl.constexpr,  # query heads for each row
    HEADS_PAD: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    LEAD_TOKEN: tl.constexpr,
    REST_TOKEN: tl.constexpr,
    VALUES_TOKEN: tl.constexpr,
    PARTS_PAD: tl.constexpr,  # 1: not split
    BLOCK: tl.constexpr,
) -> None:
    """One program: one part of one row's tokens, for all query heads of the row."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch = row // ROWS
    kv_head = row % ROWS // SHARE
    if CHOSEN:
        low = 0
        high = k
    else:
        low = tl.load(first + batch)
        high = tl.load(end + batch)
    start, stop = part_of_row(low, high, part, parts, BLOCK)

    group = tl.arange(0, HEADS_PAD)
    real = (group < HEADS)[:, None]
    dim = tl.arange(0, D_PAD)
    lead_dim = tl.arange(0, R_PAD)
    query_at = query + batch * query_batch + (row % ROWS * HEADS + group)[:, None] * query_head
    lead_at = lead + batch * lead_batch + kv_head * lead_head + lead_dim[:, None]
    values_at = values + batch * values_batch + kv_head * values_head + dim[None, :]
    q_lead = tl.load(query_at + lead_dim[None, :], mask=real & (lead_dim < R)[None, :], other=0.0)
    if REST > 0:
        rest_dim = tl.arange(0, REST_PAD)
        rest_at = rest + batch * rest_batch + kv_head * rest_head + rest_dim[:, None]
        q_rest = tl.load(query_at + R + rest_dim[None, :], mask=real & (rest_dim < REST)[None, :], other=0.0)

    peak = tl.full([HEADS_PAD], float("-inf"), tl.float32)
    total = tl.zeros([HEADS_PAD], tl.float32)
    out = tl.zeros([HEADS_PAD, D_PAD], tl.float32)
    for at in range(start, stop, BLOCK):
        token = at + tl.arange(0, BLOCK)
        if CHOSEN:
            token = tl.load(slots + row * k + token, mask=token < stop, other=-1)
            held = token >= 0
        else:
            held = (token >= low) & (token < stop)
        token = token.to(tl.int64)
        in_lead = held[None, :] & (lead_dim < R)[:, None]
        s = product(q_lead, tl.load(lead_at + token[None, :] * LEAD_TOKEN, mask=in_lead, other=0.0))
        if REST > 0:
            in_rest = held[None, :] & (rest_dim < REST)[:, None]
            k_rest = tl.load(rest_at + token[None, :] * REST_TOKEN, mask=in_rest, other=0.0)
            s += product(q_rest, k_rest)
        s = tl.where(held[None, :], s * scale, float("-inf"))
        top = tl.maximum(peak, tl.max(s, axis=1))
        base = tl.where(top == float("-inf"), 0.0, top)  # nothing seen yet: -inf less -inf is not a number
        weight = tl.exp2(s - base[:, None])
        faded = tl.exp2(peak - base)
        total = total * faded + tl.sum(weight, axis=1)
        v = tl.load(values_at + token[:, None] * VALUES_TOKEN, mask=held[:, None] & (dim < D)[None, :], other=0.0)
        out = out * faded[:, None] + product(weight.to(v.dtype), v)
        peak = top

    head = row * HEADS + group
    if PARTS_PAD == 1:
        out = out / tl.where(total > 0.0, total, 1.0)[:, None]
        at_out = output + head[:, None] * D + dim[None, :]
        tl.store(at_out, out.to(output.dtype.element_ty), mask=real & (dim < D)[None, :])
    else:
        tl.store(peaks + head * parts + part, peak, mask=group < HEADS)
        tl.store(sums + head * parts + part, total, mask=group < HEADS)
        at_outs = outs + (head * parts + part)[:, None] * D + dim[None, :]
        tl.store(at_outs, out, mask=real & (dim < D)[None, :])
        tl.debug_barrier()  # all threads' stores come before the count
        if tl.atomic_add(done + row, 1, sem="acq_rel", scope="gpu") == parts - 1:
            tl.store(done + row, 0)  # for the next launch
            _merge(outs, peaks, sums, output, row, parts, HEADS, D, D_PAD, PARTS_PAD)


class AttendScratch:
    """What `attend` and `dense` write between their programs: results of `parts` parts of each row."""

    def __init__(
        self, parts: int, batch: int, rows: int, query_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.parts = parts
        self.peaks, self.sums = torch.empty(2, batch, query_heads, parts, device=device).unbind()
        self.outs = torch.empty(batch, query_heads, parts, head_dim, device=device)
        self.done = torch.zeros(batch, rows, dtype=torch.int32, device=device)  # each launch leaves zeros again

    @classmethod
    def for_slots(
        cls, batch: int, rows: int, k: int, query_heads: int, head_dim: int, device: torch.device
    ) -> AttendScratch:
        return cls(parts_of(batch * rows, k, 16, MOST_PARTS, device), batch, rows, query_heads, head_dim, device)

    @classmethod
    def for_all(
        cls, batch: int, kv_heads: int, capacity: int, query_heads: int, head_dim: int, device: torch.device
    ) -> AttendScratch:
        parts = parts_of(batch * kv_heads, capacity, 256, MOST_PARTS_DENSE, device)
        return cls(parts, batch, kv_heads, query_heads, head_dim, device)


def attend(
    query: Tensor,
    lead: Tensor,
    rest: Tensor | None,
    values: Tensor,
    slots: Tensor,
    scale: float,
    scratch: AttendScratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Exact attention of one new token over chosen slots of the split cache.

    query: [b, Hq, d], its dimensions in the order of lead, then rest. lead: [b, H, cap, r]; rest: [b, H, cap, d - r],
    None if lead holds all; values: [b, H, cap, d]. Their last dimensions are contiguous; a batch stride of 0 is
    allowed. slots: int32 [b, R, k] of each KV head (R = H) or of each query head (R = Hq); -1 stands for no token.
    Returns [b, Hq, d] in `out`'s type (default the query's); zeros where a row has no token.
    """
    batch, query_heads, head_dim = query.shape
    rows, k = slots.shape[1:]
    if scratch is None:
        scratch = AttendScratch.for_slots(batch, rows, k, query_heads, head_dim, query.device)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return _launch(query, lead, rest, values, slots, None, None, scale, scratch, out)


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    scratch: AttendScratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of one new token over all tokens in [first, end) (int32 [b] each); otherwise as `attend`."""
    batch, query_heads, head_dim = query.shape
    if scratch is None:
        scratch = AttendScratch.for_all(batch, keys.shape[1], keys.shape[2], query_heads, head_dim, query.device)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    return _launch(query, keys, None, values, None, first, end, scale, scratch, out)


def _launch(
    query: Tensor,
    lead: Tensor,
    rest: Tensor | None,
    values: Tensor,
    slots: Tensor | None,
    first: Tensor | None,
    end: Tensor | None,
    scale: float,
    scratch: AttendScratch,
    out: Tensor,
) -> Tensor:
    batch, query_heads, head_dim = query.shape
    kv_heads, capacity, width = lead.shape[1:]
    rows = kv_heads if slots is None else slots.shape[1]
    k = capacity if slots is None else slots.shape[2]
    others = lead if rest is None else rest
    remaining = head_dim - width
    _attend_kernel[(scratch.parts, batch * rows)](
        query,
        lead,
        others,
        values,
        slots,
        scratch.outs,
        scratch.peaks,
        scratch.sums,
        scratch.done,
        out,
        first,
        end,
        scale * LOG2E,
        query.stride(0),
        query.stride(1),
        lead.stride(0),
        lead.stride(1),
        others.stride(0),
        others.stride(1),
        values.stride(0),
        values.stride(1),
        k,
        scratch.parts,
        power_of_2(k),
        CHOSEN=slots is not None,
        ROWS=rows,
        SHARE=rows // kv_heads,
        HEADS=query_heads // rows,
        HEADS_PAD=max(16, power_of_2(query_heads // rows)),  # a matrix product has at least 16 rows
        R=width,
        R_PAD=max(16, power_of_2(width)),
        REST=remaining,
        REST_PAD=max(16, power_of_2(remaining)) if remaining else 16,
        D=head_dim,
        D_PAD=max(16, power_of_2(head_dim)),
        LEAD_TOKEN=lead.stride(2),
        REST_TOKEN=others.stride(2),
        VALUES_TOKEN=values.stride(2),
        PARTS_PAD=1 if scratch.parts == 1 else MOST_PARTS if slots is not None else MOST_PARTS_DENSE,
    )
    return out
