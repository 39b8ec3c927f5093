"""Token importance prediction (TIP): every cached token's score from a few dimensions of its key.

FASA, arXiv 2602.03152, Sec. 4.1. The kernel reads the dominant key dimensions once for all query heads of a KV head.
Beside the scores it leaves, for each part of the tokens, their maximum and their sum of exponentials: with them the
next kernel (select.py) has the softmax without another pass over the keys.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from .backend import autotune, kernel, part_of_row, parts_of, power_of_2, product

with suppress(ImportError):
    import triton.language as tl

LOG2E = 1.4426950408889634  # exp(x) = 2 ** (x * LOG2E), and the device has an instruction for powers of two


def tip_reference(tip_query: Tensor, lead: Tensor, first: Tensor, end: Tensor, best: bool = False) -> Tensor:
    """Scores of all cached tokens: [b, Hq, r] and [b, H, cap, r] -> float32 [b, Hq, cap]; -inf outside [first, end).

    best: the highest of each KV head's query heads only, [b, H, cap].
    """
    heads, capacity = lead.shape[1:3]
    query = tip_query.float().unflatten(1, (heads, -1))  # [b, H, G, r]
    scores = query @ lead.float().transpose(2, 3)
    scores = scores.amax(2) if best else scores.flatten(1, 2)
    token = torch.arange(capacity, device=lead.device)
    held = (token >= first[:, None]) & (token < end[:, None])
    return scores.masked_fill(~held[:, None], float("-inf"))


@autotune(
    [
        ({"BLOCK": 128}, 4, 3),
        ({"BLOCK": 128}, 4, 5),
        ({"BLOCK": 256}, 4, 3),
        ({"BLOCK": 256}, 8, 3),
        ({"BLOCK": 512}, 8, 2),
    ],
    key=["GROUP", "R", "BEST", "parts", "size"],
)
@kernel("parts", "size")
def _tip_kernel(
    query: tl.tensor,
    lead: tl.tensor,
    scores: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: float,  # of the softmax, times log2(e)
    query_batch: tl.tensor,
    query_head: tl.tensor,
    lead_batch: tl.tensor,
    lead_head: tl.tensor,
    capacity: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,  # of the work, for the tuner
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    LEAD_TOKEN: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one KV head of one sequence, one part of its tokens, all query heads of the group.

    BEST: write the highest score of the group, and no sums.
    """
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    batch = row // HEADS
    head = row % HEADS
    low = tl.load(first + batch)
    start, stop = part_of_row(low, tl.load(end + batch), part, parts, BLOCK)

    group = tl.arange(0, 16)  # a matrix product has at least 16 rows
    dim = tl.arange(0, R_PAD)
    query_at = query + batch * query_batch + (head * GROUP + group)[:, None] * query_head + dim[None, :]
    q = tl.load(query_at, mask=(group < GROUP)[:, None] & (dim < R)[None, :], other=0.0)
    lead_at = lead + batch * lead_batch + head * lead_head + dim[:, None]
    scores_at = scores + (row * GROUP + group)[:, None] * capacity

    peak = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    for at in range(start, stop, BLOCK):
        token = at + tl.arange(0, BLOCK)
        inside = token < stop
        k = tl.load(lead_at + token[None, :] * LEAD_TOKEN, mask=inside[None, :] & (dim < R)[:, None], other=0.0)
        s = product(q, k)
        s = tl.where((inside & (token >= low))[None, :], s, float("-inf"))
        if BEST:
            s = tl.where((group < GROUP)[:, None], s, float("-inf"))
            highest = tl.max(s, axis=0)
            tl.store(scores + row * capacity + token, highest, mask=inside)
            peak = tl.maximum(peak, tl.max(s, axis=1))
        else:
            tl.store(scores_at + token[None, :], s, mask=(group < GROUP)[:, None] & inside[None, :])
            top = tl.maximum(peak, tl.max(s, axis=1))
            base = tl.where(top == float("-inf"), 0.0, top)  # nothing seen yet: -inf less -inf is not a number
            total = total * tl.exp2((peak - base) * scale) + tl.sum(tl.exp2((s - base[:, None]) * scale), axis=1)
            peak = top

    if BEST:
        tl.store(peaks + row * parts + part, tl.max(peak, axis=0))
    else:
        stat = (row * GROUP + group) * parts + part
        tl.store(peaks + stat, peak, mask=group < GROUP)
        tl.store(sums + stat, total, mask=group < GROUP)


def tip_parts(batch: int, kv_heads: int, capacity: int, device: torch.device) -> int:
    return parts_of(batch * kv_heads, capacity, smallest=512, most=64, device=device)


def tip(
    tip_query: Tensor,
    lead: Tensor,
    first: Tensor,
    end: Tensor,
    scale: float,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    best: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """TIP scores of the cached tokens, and what their softmax needs.

    tip_query: [b, Hq, r], last dimension contiguous, zero where a head does not use a dimension. lead: [b, H, cap, r],
    last dimension contiguous; a batch stride of 0 is allowed. first, end: int32 [b], the tokens held are
    [first, end). scale: of the logits in the softmax; the scores themselves are not scaled.
    Returns scores float32 [b, Hq, cap] (-inf for padding, unwritten from `end` on), and for each of P parts of the
    tokens their maximum and their sum of exp(scale * (score - maximum)), float32 [b, Hq, P].
    best: only the highest score of each KV head's query heads, [b, H, cap] and [b, H, P]; the sums are not written.
    """
    batch, query_heads, width = tip_query.shape
    kv_heads, capacity = lead.shape[1:3]
    group = query_heads // kv_heads
    if group > 16:
        raise ValueError(f"at most 16 query heads for each KV head, got {group}")
    if out is None:
        parts = tip_parts(batch, kv_heads, capacity, lead.device)
        rows = kv_heads if best else query_heads
        scores = torch.empty(batch, rows, capacity, device=lead.device)
        peaks, sums = torch.empty(2, batch, rows, parts, device=lead.device).unbind()
        out = scores, peaks, sums
    scores, peaks, sums = out
    parts = peaks.shape[-1]
    _tip_kernel[(parts, batch * kv_heads)](
        tip_query,
        lead,
        scores,
        peaks,
        sums,
        first,
        end,
        scale * LOG2E,
        tip_query.stride(0),
        tip_query.stride(1),
        lead.stride(0),
        lead.stride(1),
        capacity,
        parts,
        power_of_2(capacity) * batch,
        HEADS=kv_heads,
        GROUP=group,
        R=width,
        R_PAD=max(16, power_of_2(width)),
        LEAD_TOKEN=lead.stride(2),
        BEST=best,
    )
    return out
