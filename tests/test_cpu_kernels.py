"""The compiled CPU kernels equal their references, whatever the shape, and PyTorch takes over where there are none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasa_bench import compiled
from fasa_bench.compiled import NoLibraryError, shared_library
from fasa_bench.kernels import cpu
from fasa_bench.methods import fused_cpu

MISSING = fused_cpu.missing(torch.empty(0))
needs_compiler = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Case:
    """A split cache of random keys and values, with room behind the last token, and one query."""

    def __init__(self, tokens: int, batch: int, heads: int, group: int, dim: int, width: int, masked: bool) -> None:
        torch.manual_seed(tokens + width)
        self.tokens, self.scale = tokens, dim**-0.5
        blocks = -(-tokens // cpu.BLOCK) + 1
        self.query = torch.randn(batch, heads * group, dim)
        self.order = torch.stack([torch.randperm(dim) for _ in range(heads)])
        self.lead = torch.randn(blocks, batch, heads, width, cpu.BLOCK)
        self.tail = torch.randn(batch, heads, blocks * cpu.BLOCK, 2 * dim - width)
        behind = torch.arange(blocks * cpu.BLOCK).view(blocks, -1) >= tokens  # which must not matter
        self.lead.masked_fill_(behind[:, None, None, None], 1e3)
        self.tail[:, :, tokens:] = torch.nan
        self.mask = (torch.rand(heads * group, width) < 0.6).float() if masked else None

    def workspace(self, share: cpu.Share) -> cpu.Workspace:
        blocks, batch, heads, width, _ = self.lead.shape
        shape = batch, self.query.shape[1], heads, self.query.shape[2], width
        return cpu.Workspace(*shape, blocks * cpu.BLOCK, share)

    def check(self, k: int, share: cpu.Share, sinks: int, recent: int) -> None:
        cache = self.query, self.order, self.mask, self.lead, self.tail, self.tokens, k, self.scale
        slots, output = cpu.fasa_step(*cache, self.workspace(share), sinks, recent)
        wanted, reference, worth = cpu.fasa_step_reference(*cache, share, sinks, recent)
        assert output is not None
        assert torch.equal(slots, slots.sort(-1).values)
        assert (slots.diff() > 0).all()
        differ = slots != wanted
        if differ.any():  # only where rounding decides
            limit = worth.gather(2, wanted).amin(-1, keepdim=True)
            torch.testing.assert_close(
                worth.gather(2, slots)[differ], limit.expand_as(slots)[differ], rtol=1e-4, atol=0
            )
        else:
            torch.testing.assert_close(output, reference, atol=1e-5, rtol=1e-4)


SHAPES = [  # tokens, batch, KV heads, group, head dimension, leading dimensions, tokens chosen
    (64, 1, 2, 4, 64, 16, 64),  # as many as there are
    (65, 1, 2, 1, 64, 8, 20),
    (700, 2, 3, 3, 64, 16, 256),
    (1024, 1, 1, 8, 128, 64, 128),
    (2050, 2, 2, 5, 128, 32, 70),
    (8191, 1, 3, 2, 64, 16, 100),
    (20000, 1, 1, 4, 128, 32, 256),
    (300, 1, 2, 2, 20, 7, 33),  # no multiple of any register
    (100, 1, 2, 3, 16, 16, 30),  # every dimension leads
]


@needs_compiler
@pytest.mark.parametrize("share", cpu.SHARES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_equals_its_reference(shape: tuple[int, ...], share: cpu.Share, threads: int) -> None:
    *shape_of_cache, k = shape
    for masked, sinks, recent in ((False, 0, 0), (True, 2, 9)):
        Case(*shape_of_cache, masked=masked).check(k, share, sinks, recent)


@needs_compiler
@pytest.mark.parametrize("share", cpu.SHARES)
def test_of_equal_tokens_the_oldest_are_chosen(share: cpu.Share, threads: int) -> None:
    case = Case(3000, 1, 2, 2, 64, 16, masked=False)
    case.lead[:] = case.lead[:1, ..., :1]  # all tokens alike
    slots, k = step(case, share, k=50, sinks=1, recent=4)[0], 50
    assert slots[0, 0].tolist() == [*range(k - 4), *range(2996, 3000)]
    case.lead[10, ..., 5] *= -1  # one is not: worth more to some and less to others
    case.check(k, share, 0, 0)


def step(case: Case, share: cpu.Share, k: int, sinks: int = 0, recent: int = 0) -> tuple[Tensor, Tensor | None]:
    cache = case.query, case.order, case.mask, case.lead, case.tail, case.tokens, k, case.scale
    return cpu.fasa_step(*cache, case.workspace(share), sinks, recent)


@needs_compiler
@pytest.mark.parametrize("share", cpu.SHARES)
def test_scores_far_apart_and_numbers_that_are_none(share: cpu.Share, threads: int) -> None:
    """Exponentials that vanish leave a choice of as many tokens, among them the best; so do NaN and infinity."""
    case = Case(5000, 1, 2, 2, 64, 16, masked=False)
    case.query *= 300
    slots, output = step(case, share, k=64)
    best = cpu.fasa_step_reference(
        case.query, case.order, None, case.lead, case.tail, case.tokens, 1, case.scale, share
    )[0]
    assert (slots == best).any(-1).all()
    assert output is not None
    assert output.isfinite().all()
    for wrong in (torch.nan, torch.inf, -torch.inf):
        case.query[:] = wrong
        slots, _ = step(case, share, k=64)
        assert ((slots >= 0) & (slots < 5000)).all()


@needs_compiler
@pytest.mark.parametrize(
    ("batch", "heads", "group", "dim", "tokens"), [(1, 3, 3, 64, 1000), (2, 2, 8, 128, 130), (2, 1, 1, 20, 7)]
)
def test_dense_attention_equals_pytorchs(
    batch: int, heads: int, group: int, dim: int, tokens: int, threads: int
) -> None:
    torch.manual_seed(0)
    query = torch.randn(batch, heads * group, dim)
    buffers = torch.randn(2, batch, heads, tokens + 9, dim)  # rows of a longer buffer
    keys, values = buffers[:, :, :, :tokens]
    assert cpu.takes(keys)
    found = cpu.dense_step(query, keys, values, 0.3)
    grouped = query.view(batch, heads, group, dim)
    wanted = torch.nn.functional.scaled_dot_product_attention(grouped, keys, values, scale=0.3)
    torch.testing.assert_close(found, wanted.reshape(query.shape), atol=1e-5, rtol=1e-4)


@needs_compiler
def test_rows_that_do_not_lie_together_are_not_taken() -> None:
    rows = torch.empty(2, 3, 10, 8)
    assert cpu.takes(rows[:, :, :7])
    assert not cpu.takes(rows.transpose(1, 2))
    assert not cpu.takes(rows[..., :4])
    assert not cpu.takes(rows[:1].expand(2, -1, -1, -1))


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and nothing known of any library."""
    monkeypatch.setenv("FASA_BENCH_CACHE", str(tmp_path))
    for known in (shared_library, fused_cpu._load):
        known.cache_clear()
    yield tmp_path
    for known in (shared_library, fused_cpu._load):
        known.cache_clear()


@needs_compiler
def test_a_library_is_built_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fresh / "two.cpp"
    source.write_text('extern "C" int two() { return 2; }')
    first = shared_library(source)
    made = first.stat().st_mtime_ns
    shared_library.cache_clear()
    compiles: list[Any] = []
    monkeypatch.setattr(compiled, "_compile", lambda *args: compiles.append(args))
    assert shared_library(source) == first
    assert (first.stat().st_mtime_ns, compiles) == (made, [])
    source.write_text('extern "C" int two() { return 3; }')  # another source is another library
    monkeypatch.undo()
    monkeypatch.setenv("FASA_BENCH_CACHE", str(fresh))
    shared_library.cache_clear()
    assert shared_library(source) != first


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("FASA_BENCH_CPP", "0", "FASA_BENCH_CPP=0"),
        ("CXX", "no-such-compiler", "no C++ compiler"),
        ("CXX", "false", "false failed"),
    ],
)
def test_without_a_compiler_pytorch_does_it(
    variable: str,
    value: str,
    reason: str,
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING):
        said = fused_cpu.missing(torch.empty(0))
    assert said is not None
    assert reason in said
    assert reason in caplog.text


@needs_compiler
def test_an_error_of_the_compiler_is_said(fresh: Path) -> None:
    source = fresh / "wrong.cpp"
    source.write_text("this is no C++")
    with pytest.raises(NoLibraryError, match="error"):
        shared_library(source)
    assert not list(fresh.glob("compiled/*.so"))
