"""Quantised tables: the round trip by hand, reading single tokens, and the bytes that are held."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fasa_bench.errors import UserError
from fasa_bench.quantised import Quantised, pick, ripe

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def table(
    batch: int = 1, heads: int = 2, tokens: int = 70, dim: int = 50, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(tokens + dim)).to(dtype)


def groups_of(one: Tensor, axis: str, group: int) -> list[Tensor]:
    """The groups of one head's table [n, d], as views."""
    if axis == "channel":
        return [one[i : i + group, c] for i in range(0, len(one), group) for c in range(one.shape[1])]
    return [row[i : i + group] for row in one for i in range(0, one.shape[1], group)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_every_number_is_within_half_a_step(bits: int, axis: Any, dtype: torch.dtype) -> None:
    """Steps by hand from each group's range, at sizes that divide nothing and at those that divide everything."""
    for tokens, dim, group in ((1, 50, 32), (5, 16, 32), (33, 50, 32), (64, 64, 32), (70, 17, 5)):
        original = table(1, 1, tokens, dim, dtype)
        found = Quantised.pack(original, bits, axis, group).dense()
        assert found.dtype == dtype
        assert found.shape == original.shape
        eps = torch.finfo(dtype).eps
        pairs = (groups_of(x[0, 0].double(), axis, group) for x in (original, found))
        for before, after in zip(*pairs, strict=True):
            step = (before.max() - before.min()) / (2**bits - 1) * (1 + eps)  # the scale is rounded up
            allowed = step / 2 + before.abs().max() * (eps / 2 + 1e-6)  # and the result to the type
            assert (before - after).abs().max() <= allowed


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_equals_kivis_formula(axis: Any) -> None:
    """code = round((x - min) / step) clamped to the levels, x' = code * step + min; groups of 16."""
    original = table(2, 3, 48, 32)
    moved = original if axis == "token" else original.transpose(2, 3)
    blocks = moved.unflatten(3, (-1, 16))
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    for bits in (8, 4, 2):
        step = (high - low) / (2**bits - 1)
        expected = (((blocks - low) / step).clamp(0, 2**bits - 1).round() * step + low).flatten(3)
        expected = expected if axis == "token" else expected.transpose(2, 3)
        torch.testing.assert_close(Quantised.pack(original, bits, axis, 16).dense(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_as_many_values_as_codes_come_back_exactly(bits: int) -> None:
    values = torch.arange(2.0**bits)[torch.randperm(2**bits, generator=torch.Generator().manual_seed(1))] - 100
    for shape, axis in ((values[None, None, :, None], "channel"), (values[None, None, None, :], "token")):
        assert torch.equal(Quantised.pack(shape, bits, axis, 2**bits).dense(), shape)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_groups_are_exact(dtype: torch.dtype) -> None:
    for value, bits, axis in product((0.0, -3.25, 60000.0), (8, 4, 2), ("channel", "token")):
        constant = torch.full((1, 2, 40, 20), value, dtype=dtype)
        assert torch.equal(Quantised.pack(constant, bits, axis, 32).dense(), constant)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 2e4])
def test_ranges_at_the_edges_of_half_precision(scale: float) -> None:
    """Steps below float16's normal numbers, and a range above its largest number."""
    original = (table(1, 1, 32, 16).clamp(-3, 3) * scale).half()
    found = Quantised.pack(original, 8, "channel", 32).dense()
    step = (original.float().amax(2) - original.float().amin(2)) / 255
    allowed = (step + 6e-8) / 2 + original.abs().max().float() * 2**-11 + 3e-8  # 6e-8: between two subnormal numbers
    assert torch.isfinite(found).all()
    assert ((found.float() - original.float()).abs().amax(2) <= allowed).all()


def test_the_axis_keeps_outliers_to_themselves() -> None:
    """A channel 100 times as large: groups along it leave the other channels as precise as without it."""
    original = table(1, 1, 64, 32)
    outlier = original.clone()
    outlier[..., 7] *= 100
    others = [channel for channel in range(32) if channel != 7]

    def error(one: Tensor, axis: Any) -> float:
        return float((Quantised.pack(one, 4, axis, 32).dense() - one)[..., others].abs().mean())

    assert error(outlier, "channel") == error(original, "channel")
    assert error(outlier, "token") > 3 * error(original, "token")


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("heads", [1, 2, 6])
def test_rows_are_those_of_the_whole(axis: Any, heads: int) -> None:
    for stored in (1, 3):
        packed = Quantised.pack(table(stored), 4, axis, 32)
        slots = torch.randint(0, 70, (3, heads, 9), generator=torch.Generator().manual_seed(2))
        found, whole = packed.rows(slots), packed.dense()
        assert found.shape == (3, max(heads, 2), 9, 50)
        for b, h, m in product(range(3), range(found.shape[1]), range(9)):
            slot = slots[b, h if heads > 1 else 0, m]
            assert torch.equal(found[b, h, m], whole[min(b, stored - 1), h // (found.shape[1] // 2), slot])


def test_rows_never_unpack_the_rest() -> None:
    """The largest tensor made on the way has as many numbers as the rows that are asked for."""
    packed = Quantised.pack(table(1, 2, 4096, 64), 4, "channel", 32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in held:
                largest = max(largest, out.numel())
            return out

    held = {tensor.untyped_storage().data_ptr() for tensor in packed.tensors}
    with Watch():
        packed.rows(torch.arange(10).expand(1, 2, -1))
    assert largest == 2 * 10 * 64


@pytest.mark.parametrize("axis", ["channel", "token"])
def test_appending_keeps_both_parts(axis: Any) -> None:
    """Nothing is rounded a second time."""
    first, second = (Quantised.pack(table(1, 2, n), 4, axis, 32) for n in (64, 32))
    both = first.append(second).append(second)
    assert torch.equal(both.dense(), torch.cat([first.dense(), second.dense(), second.dense()], dim=2))
    slots = torch.tensor([[[0, 40, 65, 127]]])
    assert torch.equal(both.rows(slots), pick(both.dense(), slots))


def test_appending_to_a_broken_group_is_refused() -> None:
    packed = Quantised.pack(table(1, 2, 50), 4, "channel", 32)
    with pytest.raises(ValueError, match="50 tokens are not whole groups of 32"):
        packed.append(packed)


@pytest.mark.parametrize(
    ("bits", "axis", "expected"),
    [
        (8, "channel", 128 * 64 + 4 * 64 * 2 * 2),
        (4, "channel", 128 * 32 + 4 * 64 * 2 * 2),
        (2, "channel", 128 * 16 + 4 * 64 * 2 * 2),
        (4, "token", 128 * 32 + 128 * 2 * 2 * 2),
    ],
)
def test_bytes_held(bits: int, axis: Any, expected: int) -> None:
    """128 tokens of 64 float16 numbers in groups of 32: codes, then scale and zero of 256 groups."""
    packed = Quantised.pack(table(1, 1, 128, 64, torch.float16), bits, axis, 32)
    held = [tensor for tensor in vars(packed).values() if isinstance(tensor, Tensor)]
    assert packed.nbytes == expected == sum(tensor.untyped_storage().nbytes() for tensor in held)


def test_parts_are_the_whole() -> None:
    packed = Quantised.pack(table(2), 4, "channel", 32)
    parts = list(packed.parts(32))
    assert [part.shape[2] for part in parts] == [32, 32, 6]
    assert torch.equal(torch.cat(parts, dim=2), packed.dense())


def test_ripe_tokens_leave_the_residual() -> None:
    assert [ripe(tokens, 128, 32) for tokens in (0, 128, 159, 160, 161, 768)] == [0, 0, 0, 32, 32, 640]
    assert ripe(768, 0, 32) == 768


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(UserError, match=r"cache.bits=3 .*8, 4 or 2"):
        Quantised.pack(table(), 3, "token", 32)
    with pytest.raises(UserError, match=r"cache.group=0 .*at least 1"):
        Quantised.pack(table(), 4, "token", 0)
