"""The registered attention: equal to transformers' own, with padding, chunks and eviction."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from fasa_bench.attention import Reading, attend, column_mass, installed, reading
from fasa_bench.cache import KVLayer
from fasa_bench.method import Observation
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.oracle import Oracle
from fasa_bench.methods.streamingllm import StreamingLLM
from fasa_bench.model_cache import Cache
from fasa_bench.session import Session


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 32), (4, 1, 64)])
def test_full_kv_equals_plain_transformers(
    network_of: Callable[..., LlamaForCausalLM], prompt: list[int], heads: int, kv_heads: int, head_dim: int
) -> None:
    network = network_of(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    ids = torch.tensor([prompt])
    plain = network(ids).logits[0]
    with Session(network) as session:
        prefilled = session.prefill(prompt[:30])
        torch.testing.assert_close(prefilled.logits[0], plain[29], atol=1e-5, rtol=1e-5)
        with prefilled.fork(FullKV("fkv"), None) as decoder:
            for i in range(30, 40):
                torch.testing.assert_close(decoder.step(ids[:, i : i + 1])[0], plain[i], atol=1e-5, rtol=1e-5)


def test_the_network_is_left_as_it_was(network: LlamaForCausalLM, prompt: list[int]) -> None:
    before = network.config._attn_implementation
    with contextlib.suppress(ZeroDivisionError), Session(network) as session:
        session.prefill(prompt)
        raise ZeroDivisionError
    assert network.config._attn_implementation == before
    network(torch.tensor([prompt]))


def test_use_outside_a_reading_is_refused(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with installed(network), pytest.raises(RuntimeError, match="only inside"):
        network(torch.tensor([prompt]))


@pytest.mark.parametrize("budget", [None, 12])
def test_left_padding_equals_single_runs(network: LlamaForCausalLM, prompt: list[int], budget: int | None) -> None:
    """A batch of a short and a long prompt, then four decode steps, against each alone."""
    prompts, following = [prompt[:30], prompt[10:21]], prompt[30:34]
    method = Oracle("oracle")
    alone = []
    with Session(network) as session:
        for one in prompts:
            with session.prefill(one).fork(method, budget) as decoder:
                alone.append([decoder.logits[0], *(decoder.step(torch.tensor([[t]]))[0] for t in following)])
        width = max(map(len, prompts))
        ids = torch.tensor([[5] * (width - len(one)) + one for one in prompts])
        padding = torch.tensor([[False] * (width - len(one)) + [True] * len(one) for one in prompts])
        with session.prefill(ids, padding).fork(method, budget) as decoder:
            together = [decoder.logits, *(decoder.step(torch.tensor([[t], [t]])) for t in following)]
    for row in range(2):
        for step in range(5):
            torch.testing.assert_close(together[step][row], alone[row][step], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", [FullKV("fkv"), Oracle("oracle"), StreamingLLM("s", start=2)], ids=lambda m: m.name)
def test_several_query_tokens_at_once_equal_one_by_one(
    network: LlamaForCausalLM, prompt: list[int], method: FullKV
) -> None:
    following = torch.tensor([prompt[30:]])
    with Session(network) as session:
        prefilled = session.prefill(prompt[:30])
        with prefilled.fork(method, 9) as decoder:
            for i in range(following.shape[1]):
                one_by_one = decoder.step(following[:, i : i + 1])
        with prefilled.fork(method, 9) as decoder:
            at_once = decoder.step(following)
    torch.testing.assert_close(at_once, one_by_one, atol=1e-5, rtol=1e-5)


def test_prompt_in_two_calls_equals_one(network: LlamaForCausalLM, prompt: list[int]) -> None:
    ids = torch.tensor([prompt])
    cache = Cache(2)
    with torch.inference_mode(), installed(network), reading(Reading(cache, None)):
        network(ids[:, :17], past_key_values=cache)
        logits = network(ids[:, 17:], past_key_values=cache).logits[0]
    torch.testing.assert_close(logits, network(ids).logits[0, 17:], atol=1e-5, rtol=1e-5)


def test_positions_stay_true_in_a_manual_forward_after_eviction(network: LlamaForCausalLM, prompt: list[int]) -> None:
    """Keep 8 of 40 tokens, feed one without position ids: it must be rotated as position 40."""
    seen: list[torch.Tensor] = []
    handle = network.model.rotary_emb.register_forward_pre_hook(  # by position before transformers 5
        lambda module, args, kwargs: seen.append([*args, *kwargs.values()][-1]), with_kwargs=True
    )
    method = StreamingLLM("streamingllm", start=2)
    with handle, Session(network) as session, session.prefill(prompt).fork(method, 9) as decoder:
        assert decoder.cache.layers[0].length == 8
        seen.clear()
        with reading(decoder.state):
            network(torch.tensor([[3]]), past_key_values=decoder.cache)
        assert decoder.cache.layers[0].positions[0, 0].tolist() == [0, 1, *range(35, 41)]
    assert seen[0].tolist() == [[40]]


def test_unused_rows_of_the_buffer_are_never_attended(network: LlamaForCausalLM, prompt: list[int]) -> None:
    with Session(network) as session:
        prefilled = session.prefill(prompt[:30], reserve=20)
        with prefilled.fork(Oracle("oracle"), 5) as decoder:
            clean = decoder.step(torch.tensor([[7]]))
        for layer in prefilled.cache.layers:
            assert layer._own is not None
            layer._own.buffer.keys[:, :, 30:] = 1e4
            layer._own.buffer.values[:, :, 30:] = 1e4
        with prefilled.fork(Oracle("oracle"), 5) as decoder:
            assert torch.equal(decoder.step(torch.tensor([[7]])), clean)


def test_ragged_slots_read_only_what_exists() -> None:
    torch.manual_seed(0)
    layer = KVLayer(0)
    layer.append(torch.randn(1, 2, 10, 8), torch.randn(1, 2, 10, 8), torch.arange(10)[None])
    layer.scale = 8**-0.5
    query = torch.randn(1, 2, 1, 8)
    output, _, attended = attend(layer, query, torch.tensor([[[[-1, 2, 7]], [[1, 4, 5]]]]), ragged=True)
    alone, _, _ = attend(layer, query, torch.tensor([[[[2, 7]], [[1, 4]]]]))
    torch.testing.assert_close(output[:, :, 0], alone[:, :, 0])
    assert attended == 2.5


def test_helper_tensors_follow_the_layer_s_device() -> None:
    """No second device here: on `meta` any tensor made elsewhere would raise (a report on kvpress: device_map=auto)."""
    with torch.device("cpu"):
        layer = KVLayer(0)
        on_meta = {"device": "meta"}
        layer.append(
            torch.zeros(1, 2, 30, 8, **on_meta), torch.zeros(1, 2, 30, 8, **on_meta), torch.zeros(1, 30, **on_meta)
        )
        layer.budget = 10
        query = torch.zeros(1, 4, 1, 8, **on_meta)
        for method in (Oracle("oracle"), StreamingLLM("streamingllm")):
            slots = method.select(layer, query)
            output, weights, _ = attend(layer, query, slots)
            method.decoded(layer, query, weights)
            assert output.device.type == layer.keys.device.type == "meta"


def test_logits_that_are_not_finite_raise(network_of: Callable[..., LlamaForCausalLM], prompt: list[int]) -> None:
    broken = network_of()
    broken.model.norm.weight.data.fill_(torch.nan)
    with Session(broken) as session, pytest.raises(FloatingPointError, match="not finite"):
        session.prefill(prompt)


def mass_by_hand(query: torch.Tensor, keys: torch.Tensor, positions: list[int], at: list[int]) -> torch.Tensor:
    """Summed causal softmax weights, one query and head at a time."""
    mass = torch.zeros(query.shape[0], keys.shape[1])
    group = query.shape[0] // keys.shape[0]
    for h in range(query.shape[0]):
        for i, place in enumerate(at):
            seen = [j for j, position in enumerate(positions) if 0 <= position <= place]
            if place >= 0:
                mass[h, seen] += torch.softmax(keys[h // group][seen] @ query[h, i] * 0.5, dim=-1)
    return mass


@pytest.mark.parametrize("elements", [1, 50, 2**24])
def test_attention_mass_equals_a_hand_loop_in_any_chunks(elements: int) -> None:
    torch.manual_seed(0)
    layer = KVLayer(0)
    positions = torch.tensor([list(range(12)), [-1, -1, -1, *range(9)]])
    layer.append(torch.randn(2, 2, 12, 4), torch.randn(2, 2, 12, 4), positions)
    layer.padded, layer.scale = True, 0.5
    query = torch.randn(2, 4, 12, 4)
    found = column_mass(layer, query, positions, elements)
    for row in range(2):
        expected = mass_by_hand(query[row], layer.keys[row], positions[row].tolist(), positions[row].tolist())
        torch.testing.assert_close(found[row], expected)
    torch.testing.assert_close(found.sum(-1), torch.tensor([[12.0] * 4, [9.0] * 4]))


def test_attention_mass_does_not_need_the_whole_matrix() -> None:
    """Largest tensor with 600 queries on 600 tokens: one chunk, not 600 x 600 for each head."""
    layer, largest = KVLayer(0), 0
    layer.append(torch.randn(1, 2, 600, 8), torch.randn(1, 2, 600, 8), torch.arange(600)[None])

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        column_mass(layer, torch.randn(1, 4, 600, 8), torch.arange(600)[None], elements=30_000)
    assert largest <= 30_000


def test_the_prompt_pass_records_what_methods_observe(network: LlamaForCausalLM, prompt: list[int]) -> None:
    """Mass against transformers' own attention weights; a prompt in two calls gives the same."""
    network.set_attn_implementation("eager")
    weights = network(torch.tensor([prompt]), output_attentions=True).attentions
    network.set_attn_implementation("sdpa")
    ids, found = torch.tensor([prompt]), []
    for cuts in ([0, 40], [0, 17, 40]):
        cache = Cache(2)
        state = Reading(cache, None, observe=Observation(25, mass=True))
        with torch.inference_mode(), installed(network), reading(state):
            for start, end in itertools.pairwise(cuts):
                network(ids[:, start:end], past_key_values=cache)
        found.append(cache.layers)
    for index, layers in enumerate(zip(*found, strict=True)):
        for layer in layers:
            torch.testing.assert_close(layer.prompt_mass, weights[index].sum(2), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layers[0].prompt_queries, layers[1].prompt_queries, atol=1e-5, rtol=1e-5)
