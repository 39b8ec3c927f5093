"""Write one new token into the split cache: the key's dimensions are sorted into dominant and other ones on the way."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor

from .backend import jit, power_of_2

with suppress(ImportError):
    import triton.language as tl


def append_reference(
    key: Tensor, value: Tensor, order: Tensor, lead: Tensor, rest: Tensor, values: Tensor, end: Tensor
) -> None:
    """See `append`."""
    width = lead.shape[-1]
    ordered = key.gather(2, order.long().expand_as(key))
    for sequence, slot in enumerate(end.tolist()):
        if slot < lead.shape[2]:
            lead[sequence, :, slot] = ordered[sequence, :, :width]
            rest[sequence, :, slot] = ordered[sequence, :, width:]
            values[sequence, :, slot] = value[sequence]


@jit
def _append_kernel(
    key: tl.tensor,
    value: tl.tensor,
    order: tl.tensor,
    lead: tl.tensor,
    rest: tl.tensor,
    values: tl.tensor,
    end: tl.tensor,
    key_batch: tl.tensor,
    key_head: tl.tensor,
    value_batch: tl.tensor,
    value_head: tl.tensor,
    lead_batch: tl.tensor,
    lead_head: tl.tensor,
    lead_token: tl.tensor,
    rest_batch: tl.tensor,
    rest_head: tl.tensor,
    rest_token: tl.tensor,
    values_batch: tl.tensor,
    values_head: tl.tensor,
    values_token: tl.tensor,
    capacity: tl.tensor,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
) -> None:
    batch = tl.program_id(0).to(tl.int64) // HEADS
    head = tl.program_id(0).to(tl.int64) % HEADS
    slot = tl.load(end + batch).to(tl.int64)
    dim = tl.arange(0, D_PAD)
    real = (dim < D) & (slot < capacity)
    source = tl.load(order + head * D + dim, mask=dim < D, other=0)
    k = tl.load(key + batch * key_batch + head * key_head + source, mask=real, other=0.0)
    lead_at = lead + batch * lead_batch + head * lead_head + slot * lead_token
    rest_at = rest + batch * rest_batch + head * rest_head + slot * rest_token
    tl.store(lead_at + dim, k, mask=real & (dim < R))
    tl.store(rest_at + dim - R, k, mask=real & (dim >= R))
    v = tl.load(value + batch * value_batch + head * value_head + dim, mask=real, other=0.0)
    tl.store(values + batch * values_batch + head * values_head + slot * values_token + dim, v, mask=real)


def append(key: Tensor, value: Tensor, order: Tensor, lead: Tensor, rest: Tensor, values: Tensor, end: Tensor) -> None:
    """Write one new key and value of every sequence and KV head at slot `end` (int32 [b]); `end` stays as it is.

    key, value: [b, H, d]. order: integers [H, d], contiguous, which dimension of the key comes at each place of
    (lead, rest). lead: [b, H, cap, r], rest: [b, H, cap, d - r], values: [b, H, cap, d], all with a contiguous last
    dimension. A sequence whose cache is full (end = cap) is left as it is: making room is the caller's part.
    """
    batch, heads, head_dim = key.shape
    _append_kernel[(batch * heads,)](
        key,
        value,
        order,
        lead,
        rest,
        values,
        end,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *lead.stride()[:3],
        *rest.stride()[:3],
        *values.stride()[:3],
        lead.shape[2],
        HEADS=heads,
        R=lead.shape[3],
        D=head_dim,
        D_PAD=power_of_2(head_dim),
    )
