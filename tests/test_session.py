"""Prefill once, fork, decode: equal to transformers' own greedy decoding, timed with the device at rest."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from fasa_bench.clock import Clock
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.oracle import Oracle
from fasa_bench.methods.streamingllm import StreamingLLM
from fasa_bench.session import Session


def test_generates_what_transformers_generates(network: LlamaForCausalLM, prompt: list[int]) -> None:
    expected = network.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 40), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    with Session(network) as session, session.prefill(prompt).fork(FullKV("fkv"), None) as decoder:
        answer = decoder.generate(12, [])
    assert answer.token_ids == expected[0, 40:].tolist()
    assert answer.finish_reason == "length"
    assert len(decoder.step_seconds) == 11  # the first token came from the prompt pass


def test_end_tokens_and_the_least_length(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with Session(network) as session:
        prefilled = session.prefill(prompt)
        with prefilled.fork(FullKV("fkv"), None) as decoder:
            free = decoder.generate(12, []).token_ids
        third = free[2]
        first = free.index(third)
        with prefilled.fork(FullKV("fkv"), None) as decoder:
            answer = decoder.generate(12, [third])
            assert (answer.token_ids, answer.finish_reason) == (free[: first + 1], "stop")
        with prefilled.fork(FullKV("fkv"), None) as decoder:
            forced = decoder.generate(3, [free[0]], min_new_tokens=1).token_ids
            assert forced[0] != free[0]
            assert forced[0] == int(prefilled.logits[0].index_fill(0, torch.tensor([free[0]]), -torch.inf).argmax())


def test_losses_are_those_of_one_plain_pass(network: LlamaForCausalLM, prompt: list[int]) -> None:
    logits = network(torch.tensor([prompt])).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[29:39], torch.tensor(prompt[30:]), reduction="none")
    with Session(network) as session, session.prefill(prompt[:30]).fork(FullKV("fkv"), None) as decoder:
        torch.testing.assert_close(torch.tensor(decoder.force(prompt[30:])), expected, atol=1e-5, rtol=1e-5)


def test_a_model_without_preferences_has_the_perplexity_of_its_vocabulary(
    network_of: Callable[..., LlamaForCausalLM], prompt: list[int]
) -> None:
    network = network_of()
    network.lm_head.weight.zero_()
    with Session(network) as session, session.prefill(prompt[:30]).fork(Oracle("oracle"), 4) as decoder:
        losses = decoder.force(prompt[30:])
    assert torch.tensor(losses).mean().exp().item() == pytest.approx(101, rel=1e-6)


def test_one_prefill_serves_many_methods(network: LlamaForCausalLM, prompt: list[int]) -> None:
    """The third run equals the first, though an evicting and a selecting method came between; nothing was copied."""
    with Session(network) as session:
        prefilled = session.prefill(prompt[:30], reserve=20)
        storage = prefilled.cache.layers[0].keys.data_ptr()
        found = []
        for method, budget in [
            (FullKV("fkv"), None),
            (StreamingLLM("s", start=2), 6),
            (Oracle("o"), 6),
            (FullKV("fkv"), None),
        ]:
            with prefilled.fork(method, budget) as decoder:
                found.append(decoder.force(prompt[30:]))
                if budget is None:
                    assert decoder.cache.layers[0].keys.data_ptr() == storage
        assert found[0] == found[3]
        assert found[0] != found[1] != found[2]
        assert prefilled.cache.layers[0].length == 30


def test_the_first_step_is_warm_up(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with Session(network) as session, session.prefill(prompt).fork(Oracle("o"), 6) as decoder:
        decoder.force(prompt[:5])
    assert len(decoder.step_seconds) == 4
    assert decoder.timed_steps == decoder.step_seconds[1:]
    stages = decoder.state.clock.seconds
    assert set(stages) == {"select", "top_k", "gather", "attend", "update"}
    assert 0 < sum(stages.values()) < sum(decoder.step_seconds)


def test_a_clock_waits_for_the_device() -> None:
    """A device that finishes its work only when it is waited for: the work belongs to the stage that queued it."""
    queue: list[float] = []

    def wait() -> None:
        while queue:
            time.sleep(queue.pop())

    clock = Clock(wait=wait)
    queue.append(0.02)
    with clock.stage("attend"):
        pass
    assert clock.seconds["attend"] < 0.01  # what was queued before is not counted
    with clock.stage("attend"):
        queue.append(0.03)
    assert clock.seconds["attend"] >= 0.03
    coarse = Clock(wait=wait, fine=False)
    with coarse.stage("attend"):
        pass
    with coarse.whole("step"):
        queue.append(0.01)
    assert set(coarse.seconds) == {"step"}


def test_an_empty_prompt_is_refused(network: LlamaForCausalLM) -> None:
    with Session(network) as session, pytest.raises(ValueError, match="empty"):
        session.prefill([])
