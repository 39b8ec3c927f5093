"""Scoring many tokens in one pass gives what one step at a time gives, for every method that says it can."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fasa_bench import attention, session
from fasa_bench.errors import UserError
from fasa_bench.method import Method, top_mask
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.snapkv import SnapKV
from fasa_bench.session import Decoder, Session
from tests.conftest import ROOT
from tests.test_methods import METHODS, ready

ONE_PASS = {
    *("oracle", "fasa_c", "fasa_c_adjacent", "fasa_plus", "fasa_c_single_dimensions", "loki", "loki_pre"),
    *("fasa_softmax", "fasa_adaptive", "fasa_adaptive_kv_head", "fasa_m", "fasa_m_next_layer", "fasa_m_kv_head"),
    *("random", "random_all", "streamingllm", "quest", "quest_forced", "quest_tokens", "sparq", "sparq_plain"),
}
PREFILL, END = 24, 40


def both(
    network: LlamaForCausalLM, method: Method, budget: int | float | None, ids: list[int], prefill: int = PREFILL
) -> list[tuple[torch.Tensor, Decoder]]:
    """Losses of the ids after the prompt: step by step, and in one pass."""
    found = []
    with Session(network) as running:
        prompt = running.prefill(ids[:prefill], observe=method.observes())
        for parallel in (False, True):
            with prompt.fork(method, budget) as decoder:
                found.append((torch.tensor(decoder.force(ids[prefill:], parallel)), decoder))
    return found


def test_which_methods_can() -> None:
    assert {name for name, make in METHODS.items() if make().parallel} == ONE_PASS
    assert FullKV("fkv").parallel


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(ONE_PASS))
def test_one_pass_equals_steps(
    name: str, network_of: Callable[..., LlamaForCausalLM], prompt: list[int], kv_heads: int
) -> None:
    """From the smallest budget to more than there is; in between the context grows past the budget half-way."""
    network = network_of(kv_heads=kv_heads)
    method = ready(name, network)
    full = both(network, FullKV("fkv"), None, prompt)[0][0]
    for budget in sorted({method.smallest_budget(), 9, 16, 25, 31, 38, 41}):
        (steps, one), (together, other) = both(network, method, budget, prompt)
        torch.testing.assert_close(together, steps, atol=1e-4, rtol=0)
        if budget < 16:
            assert (steps - full)[1:].abs().max() > 0.1  # it is not that nothing is chosen
        for key in ("layer_steps", "attended", "sparse"):
            assert getattr(other.state.tally, key) == pytest.approx(getattr(one.state.tally, key)), (budget, key)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_full_kv_in_one_pass(network_of: Callable[..., LlamaForCausalLM], prompt: list[int], kv_heads: int) -> None:
    network = network_of(kv_heads=kv_heads)
    (steps, one), (together, other) = both(network, FullKV("fkv"), None, prompt)
    torch.testing.assert_close(together, steps, atol=1e-4, rtol=0)
    assert other.state.tally == one.state.tally
    with torch.inference_mode():
        logits = network(torch.tensor([prompt])).logits[0]
    targets = torch.tensor(prompt[PREFILL:])
    plain = torch.nn.functional.cross_entropy(logits[PREFILL - 1 : -1], targets, reduction="none")
    torch.testing.assert_close(together, plain, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(ONE_PASS))
@pytest.mark.parametrize("changed", [(session, "TOGETHER", 5), (attention, "LEAST_QUERIES", 3)])
def test_the_size_of_a_pass_does_not_matter(
    name: str, network: LlamaForCausalLM, prompt: list[int], changed: tuple[Any, str, int], monkeypatch: Any
) -> None:
    """Neither tokens of a forward pass nor queries that attend at once."""
    method = ready(name, network)
    whole = both(network, method, 9, prompt)[1][0]
    monkeypatch.setattr(*changed)
    monkeypatch.setattr(attention, "CACHED_ELEMENTS", 1)
    torch.testing.assert_close(both(network, method, 9, prompt)[1][0], whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", sorted(ONE_PASS))
def test_dense_layers_and_shares(name: str, network_of: Callable[..., LlamaForCausalLM], prompt: list[int]) -> None:
    """A share is one of the prefill, whatever is scored after it."""
    network = network_of(layers=3)
    method = ready(name, network)
    method.dense_layers, method.layer_budget = [1], "pyramid"
    (steps, one), (together, _) = both(network, method, 0.5, prompt)
    torch.testing.assert_close(together, steps, atol=1e-4, rtol=0)
    assert sum(layer.budget or 0 for layer in one.cache.layers) == pytest.approx(3 * 12, abs=2)


@pytest.mark.parametrize("length", [1, 2, 16])
def test_few_tokens_and_short_prompts(network: LlamaForCausalLM, prompt: list[int], length: int) -> None:
    for name in ("quest_tokens", "fasa_plus", "sparq", "streamingllm"):
        (steps, _), (together, other) = both(network, ready(name, network), 7, prompt[: 1 + length], prefill=1)
        torch.testing.assert_close(together, steps, atol=1e-4, rtol=0)
        assert other.step_seconds == []
        assert (other.parallel_seconds > 0) == (length > 1)


def test_decoding_goes_on_after_a_pass(network: LlamaForCausalLM, prompt: list[int]) -> None:
    """The cache and what the method keeps of it are as after the steps."""
    for name in ("quest", "sparq", "streamingllm", "fasa_c"):
        method, last = ready(name, network), []
        with Session(network) as running:
            prefilled = running.prefill(prompt[:PREFILL])
            for parallel in (False, True):
                with prefilled.fork(method, 9) as decoder:
                    decoder.force(prompt[PREFILL:38], parallel)
                    last.append(torch.stack([decoder.step(torch.tensor([[token]])) for token in prompt[37:]]))
        torch.testing.assert_close(last[1], last[0], atol=1e-4, rtol=1e-4)


def test_a_method_that_evicts_by_steps_is_refused(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with (
        Session(network) as running,
        running.prefill(prompt).fork(SnapKV("snapkv"), None) as decoder,
        pytest.raises(ValueError, match="snapkv decodes step by step"),
    ):
        decoder.force([1, 2, 3], parallel=True)


def test_top_mask_by_hand() -> None:
    """Two queries over six tokens, the first of which does not see the last one."""
    scores = torch.tensor([5.0, 1, 4, 2, 3, 6]).expand(1, 1, 2, 6)
    visible = torch.tensor([[[[True] * 5 + [False], [True] * 6]]])
    assert top_mask(scores, visible, 2).tolist() == [[[[1, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 1]]]]
    assert top_mask(scores, visible, 2, recent=1).tolist() == [[[[1, 0, 0, 0, 1, 0], [1, 0, 0, 0, 0, 1]]]]
    assert top_mask(scores, visible, 3, sinks=2).tolist() == [[[[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 1]]]]
    assert torch.equal(top_mask(scores, visible, 5)[0, 0, 0], visible[0, 0, 0])
    assert torch.equal(top_mask(scores, visible, 9), visible)


def test_top_mask_takes_infinite_scores() -> None:
    """Half precision overflows: what is hidden stays hidden, whatever its score."""
    scores = torch.tensor([1.0, -torch.inf, 2, torch.inf, 3, torch.inf]).expand(1, 1, 2, 6)
    visible = torch.tensor([[[[True] * 5 + [False], [True, True, True, False, True, False]]]])
    assert top_mask(scores, visible, 2).tolist() == [[[[0, 0, 0, 1, 1, 0], [0, 0, 1, 0, 1, 0]]]]


def test_the_script_that_measures_both_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "modes.json"
    script = runpy.run_path(str(ROOT / "benchmarks" / "perplexity_modes.py"))
    sizes = ["--prefill", "64", "--decode", "12", "--windows", "2", "--budget", "16"]
    script["main"](["--model", "tiny", "--methods", "fkv", "oracle", *sizes, "--out", str(out)])
    measured = json.loads(out.read_text())["methods"]
    assert list(measured) == ["fkv", "oracle"]
    for row in measured.values():
        assert len(row["per_window"]) == 2
        assert row["max_nll_difference"] < 1e-4
        for window in row["per_window"]:
            assert window["speedup"] == pytest.approx(window["stepwise_s"] / window["parallel_s"])
    assert len(capsys.readouterr().out.splitlines()) == 4
    with pytest.raises(UserError, match=r"task\.mode='parallel' is not allowed: h2o"):
        script["main"](["--model", "tiny", "--methods", "h2o"])


def test_top_mask_never_reads_more_than_the_budget() -> None:
    """All scores are equal, and half precision."""
    scores, visible = torch.zeros(1, 3, 4, 10, dtype=torch.bfloat16), torch.ones(1, 1, 4, 10, dtype=torch.bool).tril(6)
    assert (top_mask(scores, visible, 5).sum(-1) == 5).all()
    assert top_mask(scores, visible, 8, recent=2).sum(-1)[0, 0].tolist() == [7, 8, 8, 8]
