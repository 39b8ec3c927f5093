"""The split cache reads what plain rows would, whatever the layout, the batch and the way the tokens came."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.lead import BLOCK, ROWS, Layout, LeadBlocks, LeadRows, make_lead
from fasa_bench.methods.fused import LAYOUTS
from fasa_bench.near import Prefetch
from fasa_bench.segments import BLOCK as SHORT
from fasa_bench.segments import Packing
from fasa_bench.split import SplitRows, in_one
from tests.test_cpu_kernels import needs_compiler

H, G, D, R = 2, 3, 12, 5
ALL = ["blocks", pytest.param("compiled", marks=needs_compiler), "rows", "last_step", "next_layer", "none"]


def both(
    n: int, batch: int, spare: int = 0, offload: Prefetch | None = None, layout: Layout | None = None
) -> tuple[KVLayer, KVLayer]:
    """The same random tokens, plain and split."""
    keys, values = torch.randn(batch, H, n, D), torch.randn(batch, H, n, D)
    layers = KVLayer(0), KVLayer(0)
    for layer in layers:
        layer.append(keys, values, torch.arange(n).expand(batch, n), reserve=spare)
    layers[1].split(torch.stack([torch.randperm(D) for _ in range(H)]), R, layout, offload)
    return layers


def check(plain: KVLayer, split: KVLayer, batch: int) -> None:
    n = plain.length
    assert (split.length, split.batch, split.heads) == (n, plain.batch, plain.heads)
    assert torch.equal(split.keys, plain.keys)
    assert torch.equal(split.values, plain.values)
    assert torch.equal(split.positions, plain.positions)
    query, weights = torch.randn(batch, H * G, 2, D), torch.randn(batch, H * G, 2, n)
    torch.testing.assert_close(split.dot(query), plain.dot(query))
    torch.testing.assert_close(split.mix(weights), plain.mix(weights))
    for heads in (1, H, H * G):
        slots = torch.stack([torch.randperm(n)[:7] for _ in range(batch * heads)]).view(batch, heads, 7)
        wanted, found = plain.gather(slots), split.gather(slots)
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        dots = split.choose(slots).dot(split.query_parts(query))
        torch.testing.assert_close(dots, plain.choose(slots).dot(plain.query_parts(query)))
    assert split._split is not None
    torch.testing.assert_close(lead_products(split, query), by_hand(plain, query, split._split.order))


def lead_products(layer: KVLayer, query: Tensor) -> Tensor:
    return in_one(layer.lead_dot(layer.query_parts(query)[0]), layer.length)


def by_hand(plain: KVLayer, query: Tensor, order: Tensor) -> Tensor:
    parts = []
    for head in range(H * G):
        dims = order[head // G, :R]
        parts.append(query[:, head][..., dims] @ plain.keys[:, head // G][..., dims].transpose(1, 2))
    return torch.stack(parts, dim=1)


@pytest.mark.parametrize(
    "layout", ["blocks", pytest.param("compiled", marks=needs_compiler), "rows", "last_step", "next_layer", "none"]
)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("n", [7, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_equals_plain_rows_and_goes_on_growing(
    n: int, batch: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layout == "rows":  # what an accelerator gets

        def rows(batch: int, heads: int, tokens: int, width: int, like: Tensor, block: int) -> LeadRows:
            assert block == BLOCK  # on a CPU
            return LeadRows(like.new_zeros(batch, heads, tokens, width))

        monkeypatch.setattr("fasa_bench.split.make_lead", rows)
    torch.manual_seed(n)
    offload = None if layout in ("blocks", "compiled", "rows") else layout
    plain, split = both(n, batch, 0, offload, LAYOUTS["cpp"] if layout == "compiled" else None)  # type: ignore[arg-type]
    check(plain, split, batch)
    for m in (1, 1, 30):
        keys, values, positions = torch.randn(batch, H, m, D), torch.randn(batch, H, m, D), torch.arange(m) + plain.seen
        for layer in (plain, split):
            layer.append(keys, values, positions.expand(batch, m))
        check(plain, split, batch)


@pytest.mark.parametrize("offload", [None, "last_step"])
def test_samples_share_one_split_prompt(offload: Prefetch | None) -> None:
    torch.manual_seed(0)
    plain, split = both(40, 1, offload=offload)
    for layer in (plain, split):
        layer.expand(3)
        layer.state.clear()
    before, host = split.device_bytes, split.host_bytes
    keys, values = torch.randn(3, H, 2, D), torch.randn(3, H, 2, D)
    for layer in (plain, split):
        layer.append(keys, values, torch.tensor([[40, 41]]).expand(3, 2))
    lead, tail, positions = BLOCK * 3 * H * R * 4, SHORT * 3 * H * (2 * D - R) * 4, SHORT * 3 * 8
    assert split.device_bytes == before + lead + positions + (0 if offload else tail)
    assert split.host_bytes == host + (tail if offload else 0)
    check(plain, split, 3)


@pytest.mark.parametrize("offload", [None, "last_step"])
def test_two_forks_do_not_write_over_each_other(offload: Prefetch | None) -> None:
    torch.manual_seed(0)
    _, split = both(10, 1, spare=20, offload=offload)
    one, two = split.fork(), split.fork()
    for layer, value in ((one, 1.0), (two, 2.0)):
        token = torch.full((1, H, 1, D), value)
        layer.append(token, token, torch.tensor([[10]]))
    assert (one.keys[0, 0, 10, 0], two.keys[0, 0, 10, 0]) == (1.0, 2.0)
    one.release(split)
    assert split.length == 10


@pytest.mark.parametrize("offload", [None, "last_step"])
def test_eviction_keeps_the_split(offload: Prefetch | None) -> None:
    torch.manual_seed(0)
    plain, split = both(30, 1, offload=offload)
    split.choose(torch.arange(9).expand(1, H, -1))  # rows that lie near mean other tokens afterwards
    slots = torch.stack([torch.randperm(30)[:9].sort().values for _ in range(H)])[None]
    for layer in (plain, split):
        layer.keep(slots)
    assert split.is_split
    check(plain, split, 1)


def test_it_takes_no_memory_and_reading_it_is_counted() -> None:
    layer = KVLayer(0)
    keys = torch.randn(1, H, BLOCK, D)
    layer.append(keys, keys.clone(), torch.arange(BLOCK)[None])
    before = layer.device_bytes
    order = torch.arange(D).expand(H, D)
    layer.split(order, R)
    assert layer.device_bytes == before + order.untyped_storage().nbytes()
    layer.read_bytes = 0
    query = torch.randn(1, H * G, 1, D)
    layer.lead_dot(layer.query_parts(query)[0])
    assert layer.read_bytes == H * BLOCK * R * 4
    layer.choose(torch.arange(6).expand(1, H, 6))
    assert layer.read_bytes == H * BLOCK * R * 4 + H * 6 * 2 * D * 4


def test_rows_that_will_be_packed_stay_plain() -> None:
    layer = KVLayer(0)
    layer.packing = Packing(bits=4)
    layer.append(torch.randn(1, H, 9, D), torch.randn(1, H, 9, D), torch.arange(9)[None])
    layer.split(torch.arange(D).expand(H, D), R)
    assert not layer.is_split
    query = torch.randn(1, H * G, 1, D)
    assert torch.equal(layer.lead_dot(query)[0], layer.dot(query))


def test_layout_goes_by_the_device() -> None:
    for device, wanted, layout in (("cpu", None, LeadBlocks), ("cpu", ROWS, LeadRows), ("meta", None, LeadRows)):
        layer = KVLayer(0)
        rows = torch.zeros(1, H, BLOCK + 1, D, device=device)
        layer.append(rows, rows, torch.zeros(1, BLOCK + 1, dtype=torch.long, device=device))
        layer.split(torch.arange(D).expand(H, D), R, wanted)
        (found,) = layer.segments
        assert isinstance(found, SplitRows)
        assert isinstance(found.buffer.lead, layout)
    assert make_lead(1, H, BLOCK + 1, R, torch.empty(0), BLOCK).capacity == 2 * BLOCK
