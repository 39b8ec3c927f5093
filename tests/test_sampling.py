"""Drawing answers: the right distribution, one random stream a sample, a batch that equals single runs."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from fasa_bench.method import Method
from fasa_bench.methods.full import FullKV
from fasa_bench.sampling import Sampler
from fasa_bench.session import Generation, Session
from fasa_bench.task import Sampling
from tests.test_methods import METHODS, ready

CPU = torch.device("cpu")


def draws(sampling: Sampling, logits: list[float], count: int) -> torch.Tensor:
    """Tokens that one stream draws from the same logits again and again."""
    sampler = Sampler(sampling, CPU)
    return torch.cat([sampler.choose(torch.tensor([logits])) for _ in range(count)])


def shares(sampling: Sampling, probabilities: list[float], count: int = 4000) -> list[float]:
    """How often each token is drawn; the standard error is at most 0.008."""
    logits = torch.tensor(probabilities).log().tolist()
    return (draws(sampling, logits, count).bincount(minlength=len(probabilities)) / count).tolist()


def test_tokens_are_drawn_by_their_probability() -> None:
    likely = [0.1, 0.6, 0.3]
    assert shares(Sampling([0], 1.0), likely) == pytest.approx(likely, abs=0.03)
    squared = [0.01 / 0.46, 0.36 / 0.46, 0.09 / 0.46]  # temperature 0.5: p^2, normalised
    assert shares(Sampling([0], 0.5), likely) == pytest.approx(squared, abs=0.03)


def test_unlikely_tokens_are_left_out() -> None:
    likely = [0.1, 0.5, 0.3, 0.1]
    assert shares(Sampling([0], 1.0, top_p=0.75), likely) == pytest.approx([0, 5 / 8, 3 / 8, 0], abs=0.03)
    assert shares(Sampling([0], 1.0, top_p=0.4), likely) == [0, 1, 0, 0]
    assert shares(Sampling([0], 1.0, top_k=2), likely) == pytest.approx([0, 5 / 8, 3 / 8, 0], abs=0.03)
    # top k comes first: 5/8 of what it leaves is enough for 0.6
    assert shares(Sampling([0], 1.0, top_p=0.6, top_k=2), likely) == [0, 1, 0, 0]
    assert shares(Sampling([0], 0), likely) == [0, 1, 0, 0]


def test_each_row_has_its_own_stream() -> None:
    logits = [0.0] * 50
    one, two = draws(Sampling([1], 1.0), logits, 30), draws(Sampling([2], 1.0), logits, 30)
    assert torch.equal(draws(Sampling([1], 1.0), logits, 30), one)
    assert not torch.equal(one, two)
    together = Sampler(Sampling([2, 1], 1.0), CPU)
    both = torch.stack([together.choose(torch.zeros(2, 50)) for _ in range(30)])
    assert torch.equal(both, torch.stack([two, one], dim=1))


def answers(
    network: LlamaForCausalLM,
    prompt: list[int],
    method: Method,
    budget: int | None,
    sampling: Sampling,
    ends: list[int],
) -> list[Generation]:
    with Session(network) as session:
        prefilled = session.prefill(prompt, observe=method.observes())
        with prefilled.fork(method, budget, samples=len(sampling.seeds)) as decoder:
            return decoder.sample(sampling, 12, ends)


@pytest.mark.parametrize("name", ["fkv", *METHODS])
def test_a_batch_equals_single_runs(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    """Also where some answers end early: their rows go on being fed, and nobody sees it."""
    method, budget = (FullKV("fkv"), None) if name == "fkv" else (ready(name, network), 9)
    seeds, ends = [3, 4, 5, 6], list(range(0, 101, 12))
    together = answers(network, prompt, method, budget, Sampling(seeds, 0.8, top_p=0.95), ends)
    alone = [answers(network, prompt, method, budget, Sampling([seed], 0.8, top_p=0.95), ends)[0] for seed in seeds]
    assert together == alone
    assert len({tuple(answer.token_ids) for answer in together}) == 4
    assert len({len(answer.token_ids) for answer in together}) > 1
    for answer in together:
        assert (answer.token_ids[-1] in ends) == (answer.finish_reason == "stop")
        assert not set(answer.token_ids[:-1]) & set(ends)


def test_without_temperature_all_are_the_greedy_answer(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with Session(network) as session, session.prefill(prompt).fork(FullKV("fkv"), None) as decoder:
        greedy = decoder.generate(12, [])
    assert answers(network, prompt, FullKV("fkv"), None, Sampling([1, 2], 0), []) == [greedy, greedy]


def test_the_least_length(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with Session(network) as session, session.prefill(prompt).fork(FullKV("fkv"), None, samples=2) as decoder:
        ends = list(range(1, 101))  # all but one token: nothing else can come first
        found = decoder.sample(Sampling([1, 2], 1.0), 12, ends, min_new_tokens=2)
    assert [answer.token_ids[:2] for answer in found] == [[0, 0], [0, 0]]
