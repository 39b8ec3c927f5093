"""Exact selection of the k best tokens of every row, by two launches that use the whole device even for few rows.

1. Tally: 256 bins by the distance from the row's best value, counted for each part of the row. The bins widen with the
   distance (16 for each doubling), so whatever the spread of the values, few share the bin in which the k-th lies.
2. Choose: each part writes its tokens of better bins, at places that the counts of the parts before it give. The last
   program of a row to finish then takes the best of the k-th's bin, 8 bits of the value at a time.

No place depends on which program is faster: the result is the same at every run.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from .backend import autotune, jit, kernel, part_of_row, parts_of, power_of_2
from .tip import LOG2E

with suppress(ImportError):
    import triton.language as tl

MOST_PARTS = 32


def group_reference(scores: Tensor, kv_heads: int, scale: float) -> Tensor:
    """log2 of the mean softmax over the query heads of each KV head: [b, Hq, cap] -> [b, H, cap]."""
    logits = scale * scores.unflatten(1, (kv_heads, -1))
    mean = logits.log_softmax(-1).nan_to_num(nan=float("-inf")).logsumexp(2) * LOG2E  # nan: a row without tokens
    return mean - torch.tensor(float(logits.shape[2]), device=scores.device).log2()


def select_reference(values: Tensor, k: int, first: Tensor, end: Tensor, sinks: int = 0, recent: int = 0) -> Tensor:
    """The k best tokens of each row: [b, R, cap] -> int32 [b, R, k], best first, -1 where a row has fewer than k."""
    token = torch.arange(values.shape[2], device=values.device)
    held = ((token >= first[:, None]) & (token < end[:, None]))[:, None]
    forced = ((token < first[:, None] + sinks) | (token >= end[:, None] - recent))[:, None]
    values = values.nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
    # two sorts, so that a held token of value -inf still comes before one that is not held
    rank = values.masked_fill(forced, float("inf")).argsort(dim=-1, descending=True, stable=True)
    rank = rank.gather(2, held.expand_as(values).gather(2, rank).int().argsort(dim=-1, descending=True, stable=True))
    rank = rank[..., :k].masked_fill(torch.arange(values.shape[2])[:k].to(rank) >= (end - first)[:, None, None], -1)
    return torch.nn.functional.pad(rank, (0, k - rank.shape[-1]), value=-1).int()


@jit
def _forced(
    value: tl.tensor, token: tl.tensor, low: tl.tensor, high: tl.tensor, sinks: tl.tensor, recent: tl.tensor
) -> tl.tensor:
    """Put the first and the newest tokens above all others; what is not a number comes last."""
    value = tl.where(value == value, value, float("-inf"))
    return tl.where((token < low + sinks) | (token >= high - recent), float("inf"), value)


@jit
def _bin(value: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """0 to 255, never smaller for a better value: by the bits of the distance from the bound, 2^-6 to 2^10."""
    bits = tl.maximum(bound - value, 0.0).to(tl.int32, bitcast=True)
    step = (bits >> 19) - ((127 - 6) << 4)  # the exponent and 4 bits of the mantissa
    return 255 - tl.minimum(tl.maximum(step, 0), 255)


@autotune(
    [({"BLOCK": 1024}, 4, 2), ({"BLOCK": 512}, 4, 2), ({"BLOCK": 2048}, 8, 2), ({"BLOCK": 1024}, 8, 2)],
    key=["GROUP", "MEAN", "parts", "size"],
)
@kernel("stats", "parts", "size", "sinks", "recent")
def _tally_kernel(
    scores: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    bounds: tl.tensor,
    tally: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    scale: float,
    sinks: tl.tensor,
    recent: tl.tensor,
    capacity: tl.tensor,
    stats: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,
    ROWS: tl.constexpr,  # of each sequence
    GROUP: tl.constexpr,  # rows of scores for each row
    GROUP_PAD: tl.constexpr,
    MEAN: tl.constexpr,
    STATS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one part of one row. MEAN: make the row's values from the scores of the group's query heads."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    low = tl.load(first + row // ROWS)
    high = tl.load(end + row // ROWS)
    start, stop = part_of_row(low, high, part, parts, 512)

    group = tl.arange(0, GROUP_PAD)
    stat = tl.arange(0, STATS_PAD)
    real = group < GROUP
    at_stat = (row * GROUP + group)[:, None] * stats + stat[None, :]
    in_stat = real[:, None] & (stat < stats)[None, :]
    peak = tl.load(peaks + at_stat, mask=in_stat, other=float("-inf"))
    top = tl.max(peak, axis=1)
    if MEAN:
        base = tl.where(top == float("-inf"), 0.0, top)
        total = tl.load(sums + at_stat, mask=in_stat, other=0.0)
        total = tl.sum(total * tl.exp2((peak - base[:, None]) * scale), axis=1)
        norm = base * scale + tl.log2(tl.where(total > 0.0, total, 1.0))
        best = tl.where(real, tl.exp2(base * scale - norm), 0.0)
        bound = tl.log2(tl.sum(best, axis=0) / GROUP)
    else:
        bound = tl.max(top, axis=0)

    counts = tl.zeros([256], tl.int32)
    for at in range(start, stop, BLOCK):
        token = at + tl.arange(0, BLOCK)
        inside = (token < stop) & (token >= low)
        allocated = token < capacity  # loads that end at a multiple of 16 take four values at a time
        if MEAN:
            scores_at = scores + (row * GROUP + group)[:, None] * capacity + token[None, :]
            s = tl.load(scores_at, mask=real[:, None] & allocated[None, :], other=float("-inf"))
            s = s * scale - norm[:, None]
            most = tl.max(s, axis=0)  # taken out of the sum, which would round small probabilities to 0
            shift = tl.where(most == float("-inf"), 0.0, most)
            value = most + tl.log2(tl.sum(tl.exp2(s - shift[None, :]), axis=0) / GROUP)
            tl.store(values + row * capacity + token, value, mask=inside)
        else:
            value = tl.load(scores + row * capacity + token, mask=allocated, other=0.0)
        kind = _bin(_forced(value, token, low, high, sinks, recent), bound)
        counts += tl.histogram(tl.where(inside, kind, 0), 256)
        counts -= tl.where(tl.arange(0, 256) == 0, BLOCK - tl.sum(inside.to(tl.int32), axis=0), 0)
    tl.store(tally + (row * parts + part) * 256 + tl.arange(0, 256), counts)
    if part == 0:
        tl.store(bounds + row, bound)


@jit
def _at_least(counts: tl.tensor) -> tl.tensor:
    """How many lie in each bin or a better one."""
    return tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts


@jit
def _sortable(value: tl.tensor) -> tl.tensor:
    """The bits of a float as an integer of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def _digits(key: tl.tensor, inside: tl.tensor, prefix: tl.tensor, LEVEL: tl.constexpr) -> tl.tensor:
    """Counts of the next 8 bits of the keys that begin with the prefix.

    Keys that do not count in digit 0: harmless, since the search comes from the top and needs no count below.
    """
    digit = (key >> (24 - 8 * LEVEL)) & 255
    if LEVEL == 0:
        digit = digit ^ 128  # the sign
    else:
        inside = inside & ((key >> (32 - 8 * LEVEL)) == prefix)
    return tl.histogram(tl.where(inside, digit, 0), 256)


@jit
def _settle(
    tied_values: tl.tensor,
    tied_slots: tl.tensor,
    slots: tl.tensor,
    tied: tl.tensor,
    above: tl.tensor,
    wanted: tl.tensor,
    k: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Take the best of the `tied` tokens in the k-th's bin, until `wanted` are chosen; `above` are already."""
    some = tl.arange(0, BLOCK)
    bins = tl.arange(0, 256)
    # nearly always all fit in one block, which then stays in registers
    head = _sortable(tl.load(tied_values + some, mask=some < tied, other=0.0, cache_modifier=".cg"))
    missing = wanted - above
    prefix = tied * 0
    for level in tl.static_range(4):
        counts = _digits(head, some < tied, prefix, level)
        for at in range(BLOCK, tied, BLOCK):
            inside = at + some < tied
            value = tl.load(tied_values + at + some, mask=inside, other=0.0, cache_modifier=".cg")
            counts += _digits(_sortable(value), inside, prefix, level)
        digit = tl.maximum(tl.sum((_at_least(counts) >= missing).to(tl.int32), axis=0) - 1, 0)
        missing -= tl.sum(tl.where(bins > digit, counts, 0), axis=0)
        prefix = prefix * 256 + digit
        if level == 0:
            prefix -= 128

    # the prefix is now the k-th best value: all above it, and as many equal to it as are missing
    equals = tied * 0
    place = above
    for at in range(0, tied, BLOCK):
        inside = at + some < tied
        key = _sortable(tl.load(tied_values + at + some, mask=inside, other=0.0, cache_modifier=".cg"))
        slot = tl.load(tied_slots + at + some, mask=inside, other=0, cache_modifier=".cg")
        equal = (inside & (key == prefix)).to(tl.int32)
        enough = equals + tl.cumsum(equal, axis=0) <= missing
        taken = (inside & ((key > prefix) | ((equal > 0) & enough))).to(tl.int32)
        tl.store(slots + place + tl.cumsum(taken, axis=0) - 1, slot, mask=taken > 0)
        equals += tl.sum(equal, axis=0)
        place += tl.sum(taken, axis=0)
    for at in range(wanted, k, BLOCK):
        tl.store(slots + at + some, tl.full([BLOCK], -1, tl.int32), mask=at + some < k)


@autotune([({"BLOCK": 1024}, 4, 2), ({"BLOCK": 1024}, 8, 2), ({"BLOCK": 2048}, 8, 2)], key=["parts", "size"])
@kernel("parts", "size", "k", "sinks", "recent")
def _choose_kernel(
    values: tl.tensor,
    bounds: tl.tensor,
    tally: tl.tensor,
    tied_values: tl.tensor,
    tied_slots: tl.tensor,
    slots: tl.tensor,
    done: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    k: tl.tensor,
    sinks: tl.tensor,
    recent: tl.tensor,
    capacity: tl.tensor,
    parts: tl.tensor,
    size: tl.tensor,
    ROWS: tl.constexpr,
    PARTS_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: one part of one row, the same part as in the tally."""
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    low = tl.load(first + row // ROWS)
    high = tl.load(end + row // ROWS)
    start, stop = part_of_row(low, high, part, parts, 512)  # as in the tally, whatever the block
    wanted = tl.minimum(k, tl.maximum(high - low, 0))

    each = tl.arange(0, PARTS_PAD)
    bins = tl.arange(0, 256)
    by_part = tally + (row * parts + each)[:, None] * 256 + bins[None, :]
    by_part = tl.load(by_part, mask=(each < parts)[:, None], other=0)
    counts = tl.sum(by_part, axis=0)
    edge = tl.maximum(tl.sum((_at_least(counts) >= wanted).to(tl.int32), axis=0) - 1, 0)  # the bin of the k-th best
    better = (bins > edge).to(tl.int32)
    at_edge = (bins == edge).to(tl.int32)
    above = tl.sum(counts * better, axis=0)
    tied = tl.sum(counts * at_edge, axis=0)
    earlier = by_part * (each < part).to(tl.int32)[:, None]
    chosen_at = tl.sum(tl.sum(earlier * better[None, :], axis=1), axis=0)
    tied_at = tl.sum(tl.sum(earlier * at_edge[None, :], axis=1), axis=0)

    bound = tl.load(bounds + row)
    for at in range(start, stop, BLOCK):
        token = at + tl.arange(0, BLOCK)
        inside = (token < stop) & (token >= low)
        value = tl.load(values + row * capacity + token, mask=token < capacity, other=0.0)
        value = _forced(value, token, low, high, sinks, recent)
        kind = _bin(value, bound)
        is_better = (inside & (kind > edge)).to(tl.int32)
        tl.store(slots + row * k + chosen_at + tl.cumsum(is_better, axis=0) - 1, token, mask=is_better > 0)
        chosen_at += tl.sum(is_better, axis=0)
        is_tied = (inside & (kind == edge)).to(tl.int32)
        place = row * capacity + tied_at + tl.cumsum(is_tied, axis=0) - 1
        tl.store(tied_values + place, value, mask=is_tied > 0)
        tl.store(tied_slots + place, token, mask=is_tied > 0)
        tied_at += tl.sum(is_tied, axis=0)

    tl.debug_barrier()  # all threads' stores come before the count
    if tl.atomic_add(done + row, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.store(done + row, 0)  # for the next launch
        from_row = row * capacity
        _settle(tied_values + from_row, tied_slots + from_row, slots + row * k, tied, above, wanted, k, BLOCK)


def select_parts(batch: int, rows: int, capacity: int, device: torch.device) -> int:
    return parts_of(batch * rows, capacity, smallest=1024, most=MOST_PARTS, device=device)


class SelectScratch:
    """What `select` writes: the choice in `slots` [b, R, k], and between its launches."""

    def __init__(self, batch: int, rows: int, capacity: int, k: int, device: torch.device) -> None:
        self.parts = select_parts(batch, rows, capacity, device)
        whole = (batch, rows, capacity)
        self.values = torch.empty(whole, device=device)
        self.tied_values = torch.empty(whole, device=device)
        self.tied_slots = torch.empty(whole, dtype=torch.int32, device=device)
        self.bounds = torch.empty(batch, rows, device=device)
        self.tally = torch.empty(batch, rows, self.parts, 256, dtype=torch.int32, device=device)
        self.done = torch.zeros(batch, rows, dtype=torch.int32, device=device)  # each launch leaves zeros again
        self.slots = torch.empty(batch, rows, k, dtype=torch.int32, device=device)


def select(
    scores: Tensor,
    peaks: Tensor,
    sums: Tensor | None,
    first: Tensor,
    end: Tensor,
    k: int,
    scale: float = 1.0,
    sinks: int = 0,
    recent: int = 0,
    kv_heads: int | None = None,
    scratch: SelectScratch | None = None,
) -> Tensor:
    """The k tokens with the highest scores of each query head or, with `kv_heads`, of each KV head.

    scores: float32 [b, Hq, cap]; tokens outside [first, end) are not looked at (int32 [b] each). peaks: [b, Hq, P], the
    largest score of each of P parts of the tokens, in any division (the overall maximum with P = 1 will do).
    kv_heads: choose for each KV head by the mean softmax over its query heads of scale * score; needs `sums`, the
    parts' sums of exp(scale * (score - peak)). sinks, recent: the first and the newest tokens, always chosen.
    Returns int32 [b, R, k]: distinct slots, then -1 where a row holds fewer than k tokens. The values of the chosen
    are exactly those of torch.topk; among equal values the oldest are taken. First come the tokens that are clearly
    above the k-th, oldest first, then those near it, oldest first. Overwritten by the next call on this scratch.
    """
    batch, query_heads, capacity = scores.shape
    if not sinks + recent <= k <= capacity:
        raise ValueError(f"k must be from sinks + recent = {sinks + recent} to the capacity {capacity}, got {k}")
    rows = query_heads if kv_heads is None else kv_heads
    group = query_heads // rows
    if group > 1 and sums is None:
        raise ValueError("choosing for each KV head needs the sums of exponentials")
    if scratch is None:
        scratch = SelectScratch(batch, rows, capacity, k, scores.device)
    grid = (scratch.parts, batch * rows)
    values = scratch.values if group > 1 else scores  # one query head's softmax ranks as its scores do
    _tally_kernel[grid](
        scores,
        peaks,
        peaks if sums is None else sums,
        values,
        scratch.bounds,
        scratch.tally,
        first,
        end,
        scale * LOG2E,
        sinks,
        recent,
        capacity,
        peaks.shape[-1],
        scratch.parts,
        power_of_2(capacity),
        ROWS=rows,
        GROUP=group,
        GROUP_PAD=power_of_2(group),
        MEAN=group > 1,
        STATS_PAD=max(64, power_of_2(peaks.shape[-1])),  # 64: one variant for every number of parts of `tip`
    )
    _choose_kernel[grid](
        values,
        scratch.bounds,
        scratch.tally,
        scratch.tied_values,
        scratch.tied_slots,
        scratch.slots,
        scratch.done,
        first,
        end,
        k,
        sinks,
        recent,
        capacity,
        scratch.parts,
        power_of_2(capacity),
        ROWS=rows,
        PARTS_PAD=MOST_PARTS,
    )
    return scratch.slots
