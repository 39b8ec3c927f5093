"""Each Triton kernel gives what its torch reference gives: on the GPU if there is one, else in the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasa_bench.kernels import append, attend, backend, decode, select, tip
from tests.conftest import ROOT

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MISSING = backend.unavailable(torch.empty(0, device=DEVICE))
if not MISSING and backend.INTERPRETED and int(backend.triton.__version__.split(".")[1]) < 7:
    MISSING = "Triton's interpreter before 3.7 does not work with numpy 2.4"
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
quiet = pytest.mark.filterwarnings("ignore:divide by zero")  # numpy, on the interpreter's log2(0)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Case:
    """A split cache of random keys and values, filled unevenly, and one query."""

    def __init__(
        self, b: int, heads: int, group: int, dim: int, r: int, cap: int, dtype: torch.dtype, ragged: bool = True
    ) -> None:
        random = torch.Generator().manual_seed(b * 1009 + heads * 101 + group * 11 + dim + r + cap)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(dtype).to(DEVICE)

        # wider than what is used, so that strides are not those of a contiguous cache
        self.lead = normal(b, heads, cap + 3, r)[:, :, :cap]
        self.rest = normal(b, heads, cap + 3, dim - r)[:, :, :cap]
        self.values = normal(b, heads, cap + 5, dim)[:, :, :cap]
        self.query = normal(b, heads * group, dim)
        self.first = torch.tensor([7 * i * ragged for i in range(b)], dtype=torch.int32, device=DEVICE)
        self.end = torch.tensor([cap - 11 * i * ragged for i in range(b)], dtype=torch.int32, device=DEVICE)
        self.scale = dim**-0.5
        self.heads = heads

    @property
    def tip_query(self) -> Tensor:
        return self.query[..., : self.lead.shape[3]]

    @property
    def keys(self) -> Tensor:
        return torch.cat((self.lead, self.rest), -1)

    def held(self, tokens: Tensor) -> Tensor:
        """[b, 1, cap]: which tokens are in the cache."""
        at = torch.arange(tokens.shape[2], device=DEVICE)
        return ((at >= self.first[:, None]) & (at < self.end[:, None]))[:, None]


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.isfinite().all()
    error = (found.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < TOLERANCE[dtype], error


GRID = [
    # batch, KV heads, group, d, r, capacity
    (1, 1, 1, 64, 16, 130),
    (2, 2, 4, 128, 32, 90),
    (3, 1, 8, 64, 24, 140),
    (2, 1, 7, 128, 96, 70),
    (1, 2, 2, 256, 64, 100),
    (1, 1, 4, 256, 8, 600),
    (1, 2, 3, 80, 20, 90),
]


@needs_triton
@pytest.mark.parametrize("shape", GRID, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tip_scores_and_their_softmax(shape: Any, dtype: torch.dtype) -> None:
    case = Case(*shape, dtype)
    scores, peaks, sums = tip.tip(case.tip_query, case.lead, case.first, case.end, case.scale)
    wanted = tip.tip_reference(case.tip_query, case.lead, case.first, case.end)
    held = case.held(scores).expand_as(scores)
    torch.testing.assert_close(scores[held], wanted[held], atol=2e-5, rtol=1e-5)
    top = peaks.amax(-1)
    torch.testing.assert_close(top, wanted.amax(-1), atol=2e-5, rtol=1e-5)
    total = (sums * (case.scale * (peaks - top[..., None])).exp()).sum(-1).log() + case.scale * top
    torch.testing.assert_close(total, (case.scale * wanted).logsumexp(-1), atol=2e-5, rtol=1e-5)


@needs_triton
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_tip_keeps_the_highest_score_of_a_group(shape: Any) -> None:
    case = Case(*shape, torch.float32)
    scores, peaks, _ = tip.tip(case.tip_query, case.lead, case.first, case.end, case.scale, best=True)
    each = tip.tip_reference(case.tip_query, case.lead, case.first, case.end).unflatten(1, (case.heads, -1))
    held = case.held(scores).expand_as(scores)
    torch.testing.assert_close(scores[held], each.amax(2)[held], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(peaks.amax(-1), each.amax((2, 3)), atol=2e-5, rtol=1e-5)


def check_choice(values: Tensor, slots: Tensor, case: Case, k: int, sinks: int, recent: int) -> None:
    """Distinct tokens of the cache, forced ones among them, and of the others exactly the best values."""
    for b in range(values.shape[0]):
        low, high = int(case.first[b]), int(case.end[b])
        count = min(k, high - low)
        forced = {*range(low, min(low + sinks, high)), *range(max(high - recent, low), high)}
        for row in range(values.shape[1]):
            chosen = slots[b, row].tolist()
            assert chosen[count:] == [-1] * (k - count)
            assert len(set(chosen[:count])) == count
            assert forced <= set(chosen) <= {*range(low, high), -1}
            free = [i for i in range(low, high) if i not in forced]
            best = values[b, row, free].topk(count - len(forced)).values
            found = values[b, row, sorted(set(chosen[:count]) - forced)].sort(descending=True).values
            assert torch.equal(found, best)


def exact(case: Case, scores: Tensor, k: int, sinks: int = 0, recent: int = 0) -> None:
    found = select.select(scores, scores.amax(-1, keepdim=True), None, case.first, case.end, k, 1.0, sinks, recent)
    check_choice(scores, found, case, k, sinks, recent)
    wanted = select.select_reference(scores, k, case.first, case.end, sinks, recent)
    check_choice(scores, wanted, case, k, sinks, recent)
    assert torch.equal(found.sort(-1).values, wanted.sort(-1).values)  # the oldest of equal ones, in both


@needs_triton
@quiet
@pytest.mark.parametrize(
    ("kind", "k"), [("normal", 40), ("offset", 40), ("equal", 33), ("steps", 64), ("outlier", 20), ("all", 1300)]
)
def test_selection_is_exact_whatever_the_values(kind: str, k: int) -> None:
    case = Case(2, 1, 1, 64, 16, 2300 if kind != "all" else 1300, torch.float32)
    cap = case.lead.shape[2]
    scores = torch.randn(2, 1, cap, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    if kind == "offset":
        scores = 500 + scores / 100  # all in few bins
    elif kind == "equal":
        scores = torch.full_like(scores, -2.5)
    elif kind == "steps":
        scores = (4 * scores).round() / 4
    elif kind == "outlier":
        scores[:, :, 50] = 3e4
        scores[:, :, 60:80] = float("-inf")
        scores[:, :, 90] = float("-inf")
    exact(case, scores.contiguous(), k, *((4, 8) if kind in ("normal", "equal") else (0, 0)))


@needs_triton
@quiet
def test_selection_reads_the_newest_length_from_the_device() -> None:
    """The same buffers serve a growing cache; fewer tokens than k leave -1."""
    case = Case(1, 1, 1, 64, 16, 200, torch.float32, ragged=False)
    scores = torch.randn(1, 1, 200, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    scratch = select.SelectScratch(1, 1, 200, 30, DEVICE)
    for end in (5, 30, 31, 200):
        case.end.fill_(end)
        peaks = scores[..., :end].amax(-1, keepdim=True)
        found = select.select(scores, peaks, None, case.first, case.end, 30, sinks=2, recent=3, scratch=scratch)
        check_choice(scores, found, case, 30, min(2, end), min(3, end))
        assert not scratch.done.any()


@needs_triton
@quiet
def test_selection_refuses_what_it_cannot_do() -> None:
    case = Case(1, 1, 2, 64, 16, 100, torch.float32)
    scores = torch.zeros(1, 2, 100, device=DEVICE)
    peaks = scores[..., :1]
    for arguments in ({"k": 101}, {"k": 3, "sinks": 2, "recent": 2}, {"k": 8, "kv_heads": 1}):
        with pytest.raises(ValueError, match=r"k must be|needs the sums"):
            select.select(scores, peaks, None, case.first, case.end, **arguments)  # type: ignore[arg-type]


@needs_triton
@quiet
@pytest.mark.parametrize("shape", [(2, 1, 4, 64, 16, 1100), (1, 2, 7, 64, 24, 150)], ids=str)
def test_selection_by_the_mean_softmax_of_the_group(shape: Any) -> None:
    case = Case(*shape, torch.float32)
    scores, peaks, sums = tip.tip(case.tip_query, case.lead, case.first, case.end, case.scale)
    rows = (case.first, case.end, 30, case.scale, 2, 5, case.heads)
    scratch = select.SelectScratch(shape[0], case.heads, shape[5], 30, DEVICE)
    found = select.select(scores, peaks, sums, *rows, scratch=scratch)
    check_choice(scratch.values, found, case, 30, 2, 5)
    exact_scores = tip.tip_reference(case.tip_query, case.lead, case.first, case.end)
    mean = (case.scale * exact_scores).softmax(-1).unflatten(1, (case.heads, -1)).mean(2)
    held = case.held(scores).expand_as(mean)
    torch.testing.assert_close(scratch.values[held].exp2(), mean[held], atol=1e-7, rtol=1e-4)
    torch.testing.assert_close(select.group_reference(exact_scores, case.heads, case.scale).exp2(), mean)


@needs_triton
@pytest.mark.parametrize("shape", GRID, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("per_query_head", [False, True])
def test_attention_over_chosen_slots(shape: Any, dtype: torch.dtype, per_query_head: bool) -> None:
    case = Case(*shape, dtype)
    b, heads, group, _, _, cap = shape
    rows = heads * group if per_query_head else heads
    order = torch.rand(b, rows, cap, generator=torch.Generator().manual_seed(1)).argsort(-1)[..., :50]
    slots = order.to(DEVICE).int().contiguous()
    slots[0, 0, 20:] = -1  # fewer chosen than places
    wanted = attend.attend_reference(case.query, case.lead, case.rest, case.values, slots, case.scale)
    # one row by hand, so that the reference itself is checked
    keys, values = case.keys[0, 0].float(), case.values[0, 0].float()
    some = slots[0, 0, :20].long()
    hand = (case.scale * keys[some] @ case.query[0, 0].float()).softmax(0) @ values[some]
    torch.testing.assert_close(wanted[0, 0], hand, atol=1e-5, rtol=1e-5)
    close(attend.attend(case.query, case.lead, case.rest, case.values, slots, case.scale), wanted, dtype)


@needs_triton
def test_attention_to_nothing_is_zero_and_a_shared_prompt_is_read_in_place() -> None:
    case = Case(2, 1, 2, 64, 16, 60, torch.float32)
    lead, rest, values = (x[:1].expand(3, -1, -1, -1) for x in (case.lead, case.rest, case.values))
    query = torch.cat((case.query, case.query[:1]))
    slots = torch.arange(40, dtype=torch.int32, device=DEVICE).expand(3, 1, 40).contiguous()
    slots[1] = -1
    out = torch.full((3, 2, 64), float("nan"), device=DEVICE)
    assert attend.attend(query, lead, rest, values, slots, case.scale, out=out) is out
    assert not out[1].any()
    close(out, attend.attend_reference(query, lead, rest, values, slots, case.scale), torch.float32)


@needs_triton
@pytest.mark.parametrize("shape", GRID, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_attention_is_sdpa(shape: Any, dtype: torch.dtype) -> None:
    case = Case(*shape, dtype)
    keys, group = case.keys, shape[2]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        case.query[:, :, None].float(),
        keys.repeat_interleave(group, 1).float(),
        case.values.repeat_interleave(group, 1).float(),
        attn_mask=case.held(keys)[:, :, None],
    )[:, :, 0]
    reference = attend.dense_reference(case.query, keys, case.values, case.first, case.end, case.scale)
    torch.testing.assert_close(reference, wanted, atol=1e-5, rtol=1e-5)
    close(attend.dense(case.query, keys, case.values, case.first, case.end, case.scale), wanted, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_append_writes_one_token_and_nothing_else(dtype: torch.dtype) -> None:
    case = Case(3, 2, 1, 80, 20, 30, dtype)
    case.end[2] = 30  # full: left as it is
    random = torch.Generator().manual_seed(5)
    key, value = torch.randn(2, 3, 2, 80, generator=random).to(dtype).to(DEVICE).unbind()
    order = torch.stack([torch.randperm(80, generator=random) for _ in range(2)]).to(DEVICE)
    before = [x.clone() for x in (case.lead, case.rest, case.values)]
    wanted = [x.clone() for x in before]
    case.end[:2] = torch.tensor([0, 17])
    append.append(key, value, order, case.lead, case.rest, case.values, case.end)
    append.append_reference(key, value, order, *wanted, case.end)
    for found, reference, old in zip((case.lead, case.rest, case.values), wanted, before, strict=True):
        assert torch.equal(found, reference)
        assert torch.equal(found[2], old[2])
        assert (found != old).any(-1).sum() == 2 * 2  # two sequences, two heads
    assert torch.equal(torch.cat((case.lead, case.rest), -1)[1, 1, 17], key[1, 1, order[1]])
    assert torch.equal(case.values[0, :, 0], value[0])


@needs_triton
@quiet
@pytest.mark.parametrize("shape", [GRID[1], GRID[2], (1, 1, 2, 64, 16, 1100)], ids=str)
@pytest.mark.parametrize("share", ["none", "max", "softmax"])
def test_a_step_with_one_workspace(shape: Any, share: decode.Share) -> None:
    """Twice, with the cache one token longer the second time: nothing may be left over from the first."""
    case = Case(*shape, torch.float32)
    b, heads, group, dim, _, cap = shape
    work = decode.Workspace(b, heads * group, heads, dim, cap, 32, DEVICE, share)
    whole = case.end.clone()
    for shorter in (1, 0):
        case.end.copy_(whole - shorter)
        tensors = (case.tip_query, case.query, case.lead, case.rest, case.values, case.first, case.end, case.scale)
        found = decode.fasa_step(*tensors, work, sinks=2, recent=8)
        wanted = decode.fasa_step_reference(*tensors, 32, 2, 8, share)
        close(found, wanted, torch.float32)
        assert {int(i) - 1 for i in case.end} <= set(work.slots.flatten().tolist())


@needs_triton
@quiet
def test_a_step_over_all_tokens_is_dense_attention() -> None:
    case = Case(2, 1, 4, 64, 16, 70, torch.float32)
    work = decode.Workspace(2, 4, 1, 64, 70, 70, DEVICE)
    tensors = (case.tip_query, case.query, case.lead, case.rest, case.values, case.first, case.end, case.scale)
    wanted = attend.dense_reference(case.query, case.keys, case.values, case.first, case.end, case.scale)
    close(decode.fasa_step(*tensors, work), wanted, torch.float32)


def test_few_rows_are_split_until_they_fill_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_programs", lambda device: 528)  # 132 multiprocessors
    parts = [backend.parts_of(rows, 65536, 1024, 64, DEVICE) for rows in (1, 8, 64, 256, 1000)]
    assert parts == [64, 64, 16, 4, 1]
    assert backend.parts_of(8, 256, 16, 64, DEVICE) == 16


def test_token_counts_are_checked() -> None:
    counts = backend.token_counts(5, 2, torch.device("cpu"))
    assert counts.tolist() == [5, 5]
    assert backend.token_counts(counts, 2, torch.device("cpu")) is counts
    with pytest.raises(ValueError, match=r"int32 \[2\]"):
        backend.token_counts(counts.long(), 2, torch.device("cpu"))


def test_without_triton_the_references_work(tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('not here')")
    code = (
        "import torch; from fasa_bench.kernels import backend, decode, select\n"
        "print(backend.unavailable(torch.empty(0)))\n"
        "x = torch.tensor([[[3., 1., 2.]]]); at = torch.tensor([0]); end = torch.tensor([3])\n"
        "print(select.select_reference(x, 2, at, end).tolist())\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
    )
    assert found.stdout.splitlines() == ["triton is not installed", "[[[0, 2]]]"], found.stderr


def test_gpu_benchmark_says_that_it_needs_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels_gpu.py"), "--out", str(tmp_path / "x.json")]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode != 0
    assert found.stderr.strip() == "kernels_gpu.py needs a CUDA GPU; torch sees none"
