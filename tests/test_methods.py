"""What holds for every method, driven by one list; then what is particular to each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from fasa_bench.attention import reading
from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method, group_softmax, top_slots
from fasa_bench.methods.fasa import FasaC
from fasa_bench.methods.fasa_adaptive import FasaAdaptive
from fasa_bench.methods.fasa_m import FasaM
from fasa_bench.methods.fasa_tip import FasaTip
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.h2o import H2O
from fasa_bench.methods.h2o_mask_sim import H2OMaskSim
from fasa_bench.methods.knorm import KNorm
from fasa_bench.methods.loki import Loki
from fasa_bench.methods.oracle import Oracle
from fasa_bench.methods.quest import Quest
from fasa_bench.methods.random import Random
from fasa_bench.methods.rkv import RKV
from fasa_bench.methods.snapkv import SnapKV
from fasa_bench.methods.sparq import SparQ
from fasa_bench.methods.streamingllm import StreamingLLM
from fasa_bench.methods.tova import Tova
from fasa_bench.rope import Rope
from fasa_bench.segments import Packing
from fasa_bench.session import Session
from fasa_bench.split import SplitRows

METHODS: dict[str, Callable[[], Method]] = {
    "oracle": lambda: Oracle("oracle"),
    "fasa_c": lambda: FasaC("fasa_c"),
    "fasa_c_adjacent": lambda: FasaC("fasa_c", pairing="adjacent", n_tip=2),
    "fasa_plus": lambda: FasaC(
        "fasa_plus", fc_granularity="kv_head", token_granularity="kv_head", share="max", recent=4, sinks=1
    ),
    "fasa_softmax": lambda: FasaC("fasa_plus", token_granularity="kv_head", share="softmax"),
    "fasa_c_single_dimensions": lambda: FasaC("fasa_c", pairing="single", n_tip=0.5),
    "fasa_tip": lambda: FasaTip("fasa_tip"),
    "fasa_adaptive": lambda: FasaAdaptive("fasa_adaptive"),
    "fasa_adaptive_kv_head": lambda: FasaAdaptive(
        "fasa_adaptive", fc_granularity="kv_head", token_granularity="kv_head", n_tip_rule="agreement", recent=2
    ),
    "fasa_m": lambda: FasaM("fasa_m"),
    "fasa_m_next_layer": lambda: FasaM("fasa_m", prefetch="next_layer"),
    "fasa_m_kv_head": lambda: FasaM("fasa_m", fc_granularity="kv_head", token_granularity="kv_head", prefetch="none"),
    "snapkv": lambda: SnapKV("snapkv", window=3, kernel=3, interval=1),
    "snapkv_query_head": lambda: SnapKV("snapkv", window=3, kernel=3, interval=1, heads="query_head", pooling="avg"),
    "snapkv_max_logit": lambda: SnapKV("snapkv", window=3, kernel=3, interval=1, group="max_logit"),
    "rkv": lambda: RKV("rkv", window=3, kernel=3, interval=1),
    "h2o": lambda: H2O("h2o"),
    "h2o_query_head": lambda: H2O("h2o", heads="query_head", recent=3),
    "h2o_mask_sim": lambda: H2OMaskSim("h2o_mask_sim"),
    "quest": lambda: Quest("quest", page=4, min_pages=1),
    "quest_forced": lambda: Quest("quest", page=4, min_pages=1, newest="forced"),
    "quest_tokens": lambda: Quest("quest", page=4, unit="tokens", recent=2),
    "sparq": lambda: SparQ("sparq"),
    "sparq_plain": lambda: SparQ("sparq", rank=4, local=2, reallocation=False),
    "loki": lambda: Loki("loki"),
    "loki_pre": lambda: Loki("loki", r=3, rotary="pre"),
    "tova": lambda: Tova("tova", recent=1),
    "knorm": lambda: KNorm("knorm", recent=1),
    "random": lambda: Random("random"),
    "random_all": lambda: Random("random", current=False),
    "streamingllm": lambda: StreamingLLM("streamingllm", start=2),
    "streamingllm_cache": lambda: StreamingLLM("streamingllm", start=2, positions="cache"),
}
sparse = pytest.mark.parametrize("name", METHODS)
# whole pages, or one token fewer than the budget: at most the budget instead of exactly the budget
AT_MOST = {"quest", "quest_forced", "h2o_mask_sim"}


class FakeCalibration:
    """Agreement that differs between heads and chunks, drawn once."""

    def agreement(self, model: Any, pairing: str) -> Tensor:
        config = model.config
        shape = (len(model.rope.layers), config.num_attention_heads, len(model.rope.units(pairing)))
        return torch.rand(shape, generator=torch.Generator().manual_seed(3))

    def basis(self, model: Any, rotary: str) -> Tensor:
        """Any orthonormal basis of each KV head's keys."""
        config, dim = model.config, model.rope.head_dim
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        shape = (len(model.rope.layers), heads, dim, dim)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(4))
        return torch.linalg.qr(drawn).Q


def ready(name: str, network: LlamaForCausalLM) -> Method:
    return prepared(METHODS[name](), network)


def prepared(method: Method, network: LlamaForCausalLM) -> Method:
    model = SimpleNamespace(config=network.config, rope=Rope.of(network))
    method.prepare(model, FakeCalibration())  # type: ignore[arg-type]
    return method


def decode(network: LlamaForCausalLM, method: Method, budget: int | float | None, ids: list[int], split: int) -> Any:
    with Session(network) as session:
        prefilled = session.prefill(ids[:split], observe=method.observes())
        with prefilled.fork(method, budget) as decoder:
            logits = [decoder.logits[0]] + [decoder.step(torch.tensor([[token]]))[0] for token in ids[split:]]
    return torch.stack(logits), decoder


@sparse
@pytest.mark.parametrize("shape", [(2, 4, 2, 16), (1, 4, 1, 64), (3, 3, 3, 32), (30, 6, 2, 16), (2, 4, 1, 256)])
def test_a_budget_of_the_whole_context_equals_full_kv(
    name: str, network_of: Callable[..., LlamaForCausalLM], prompt: list[int], shape: tuple[int, int, int, int]
) -> None:
    network = network_of(*shape)
    full, _ = decode(network, FullKV("fkv"), None, prompt, 33)
    for budget in (40, 1000, 1.0):
        logits, decoder = decode(network, ready(name, network), budget, prompt, 33)
        assert torch.equal(logits, full)
        assert sum(decoder.state.tally.sparse.values()) == 0


@sparse
def test_every_budget_is_read_exactly(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    """Realised tokens at budgets from the least to T + 1: the budget, or all there is."""
    method = ready(name, network)
    for budget in range(method.smallest_budget(), 42):
        _, decoder = decode(network, method, budget, prompt, 33)
        steps = [min(budget, length) for length in range(34, 41)]
        tally = decoder.state.tally
        read = tally.attended / network.config.num_hidden_layers
        assert 0 < read <= sum(steps) if name in AT_MOST else read == pytest.approx(sum(steps))
        assert tally.layer_steps == 7 * network.config.num_hidden_layers
        assert sum(tally.sparse.values()) == 2 * sum(budget < length for length in range(34, 41))


@sparse
def test_a_small_budget_changes_the_output(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    full, _ = decode(network, FullKV("fkv"), None, prompt, 33)
    logits, _ = decode(network, ready(name, network), 8, prompt, 33)
    assert torch.equal(logits[0], full[0])  # the dense prompt pass
    assert all(not torch.allclose(logits[i], full[i], atol=1e-3) for i in range(1, 8))


@sparse
def test_nothing_leaks_into_the_next_sequence(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    method, other = ready(name, network), [*prompt[::-1], *prompt[:7]]
    alone, _ = decode(network, ready(name, network), 8, prompt, 33)
    decode(network, method, 8, other, 40)
    after, _ = decode(network, method, 8, prompt, 33)
    assert torch.equal(after, alone)


@sparse
@pytest.mark.parametrize("length", [1, 5, 15])
def test_short_prompts(name: str, network: LlamaForCausalLM, prompt: list[int], length: int) -> None:
    logits, decoder = decode(network, ready(name, network), 7, prompt[: length + 4], length)
    assert torch.isfinite(logits).all()
    read, expected = decoder.state.tally.attended / 2, sum(min(7, length + i) for i in range(1, 5))
    assert 0 < read <= expected if name in AT_MOST else read == pytest.approx(expected)


@sparse
def test_positions_ascend_and_stay_true(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    _, decoder = decode(network, ready(name, network), 10, prompt, 33)
    for layer in decoder.cache.layers:
        assert layer.length == 0  # the fork has ended and holds nothing
    with (
        Session(network) as session,
        session.prefill(prompt[:33], observe=ready(name, network).observes()).fork(ready(name, network), 10) as decoder,
    ):
        for token in prompt[33:]:
            decoder.step(torch.tensor([[token]]))
        for layer in decoder.cache.layers:
            assert (layer.positions.diff(dim=-1) > 0).all()
            assert (layer.positions[..., -1] == 39).all()


@sparse
def test_slots_are_ascending_and_without_repeats(name: str, network: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    layer = KVLayer(1)
    layer.append(torch.randn(2, 2, 50, 16), torch.randn(2, 2, 50, 16), torch.arange(50).expand(2, 50))
    layer.budget, layer.scale = 12, 0.25
    method = ready(name, network)
    if type(method).select is Method.select:
        pytest.skip("selects nothing: it evicts")
    layer.prompt_mass = torch.rand(2, 4, 50)
    method.prefill(layer, None)
    slots = method.select(layer, torch.randn(2, 4, 1, 16))
    assert slots is not None
    assert slots.shape[:3] in ((2, 2, 1), (2, 4, 1))
    if name.startswith("fasa_adaptive"):  # heads differ: 12 on average, and -1 where a head reads fewer
        assert (slots >= 0).sum(-1).float().mean() == 12
        assert all(len(set(row) - {-1}) == sum(slot >= 0 for slot in row) for row in slots.flatten(0, 2).tolist())
        return
    assert slots.shape[3] == 12 - (name == "h2o_mask_sim")
    assert ((slots.diff(dim=-1) > 0) | (slots[..., :-1] == -1)).all()


@sparse
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(
    name: str, network_of: Callable[..., LlamaForCausalLM], prompt: list[int], dtype: torch.dtype
) -> None:
    network = network_of(dtype=dtype)
    logits, _ = decode(network, ready(name, network), 9, prompt, 33)
    assert logits.dtype == dtype
    assert torch.isfinite(logits).all()


@sparse
def test_reported_bytes_are_those_held(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    with (
        Session(network) as session,
        session.prefill(prompt, observe=ready(name, network).observes()).fork(ready(name, network), 10) as decoder,
    ):
        decoder.step(torch.tensor([[3]]))
        held = {}
        for layer in decoder.cache.layers:
            found = walk(vars(layer))
            assert found
            for tensor in found:
                held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        assert decoder.cache.device_bytes + decoder.cache.host_bytes == sum(held.values())
        assert (decoder.cache.host_bytes > 0) == name.startswith("fasa_m")


@sparse
def test_a_question_in_one_call_equals_token_by_token(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    """After the method has acted on the prompt, eight tokens at once and one at a time."""
    method = ready(name, network)
    with Session(network) as session:
        prefilled = session.prefill(prompt[:32], observe=method.observes())
        with prefilled.fork(method, 9) as decoder:
            single = [decoder.step(torch.tensor([[token]])) for token in prompt[32:]][-1]
            lengths = [layer.length for layer in decoder.cache.layers]
        with prefilled.fork(method, 9) as decoder:
            together = decoder.step(torch.tensor([prompt[32:]]))
            assert [layer.length for layer in decoder.cache.layers] == lengths
    torch.testing.assert_close(together, single, atol=1e-5, rtol=1e-5)


def fill_unused(layer: KVLayer, value: float) -> None:
    own = layer._own
    assert own is not None
    if isinstance(own, SplitRows):
        lead, tail = own.buffer.lead, own.buffer.tail
        unused = torch.full((own.batch, own.heads, lead.capacity - own.tokens, own.split.lead), value)
        lead.write(own.tokens, unused)
        keys = torch.full((own.batch, own.heads, own.spare, own.split.order.shape[1]), value)
        tail.write(own.tokens, keys[..., own.split.lead :], keys)
    else:
        own.buffer.keys[:, :, own.tokens :] = value
        own.buffer.values[:, :, own.tokens :] = value


@sparse
def test_the_unused_tail_of_a_buffer_is_never_read(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    method = ready(name, network)

    def run(poison: float) -> Tensor:
        with Session(network) as session:
            prefilled = session.prefill(prompt[:33], observe=method.observes(), reserve=20)
            with prefilled.fork(method, 9) as decoder:
                for token in prompt[33:]:
                    for layer in decoder.cache.layers:
                        fill_unused(layer, poison)
                    decoder.step(torch.tensor([[token]]))
                return decoder.logits

    assert torch.equal(run(1e4), run(0.0))


@sparse
def test_a_manual_forward_without_position_ids_goes_on_at_the_true_position(
    name: str, network: LlamaForCausalLM, prompt: list[int]
) -> None:
    method, ids = ready(name, network), torch.tensor([[3]])
    with Session(network) as session:
        prefilled = session.prefill(prompt, observe=method.observes())
        with prefilled.fork(method, 9) as decoder:
            expected = decoder.step(ids)
        with prefilled.fork(method, 9) as decoder, reading(decoder.state):
            found = network(ids, past_key_values=decoder.cache).logits[:, -1]
    assert torch.equal(found, expected)


@sparse
def test_samples_of_one_prompt_equal_single_runs(name: str, network: LlamaForCausalLM, prompt: list[int]) -> None:
    """Three continuations decoded together, each with tokens of its own, against three runs of one."""
    method = ready(name, network)
    following = torch.tensor(sorted(set(range(101)) - set(prompt))[:18]).view(3, 6)
    with Session(network) as session:
        prefilled = session.prefill(prompt[:33], observe=method.observes())
        alone = []
        for row in following:
            with prefilled.fork(method, 9) as decoder:
                alone.append(torch.stack([decoder.step(token.view(1, 1))[0] for token in row]))
        with prefilled.fork(method, 9, samples=3) as decoder:
            together = torch.stack([decoder.step(tokens[:, None]) for tokens in following.T], dim=1)
            shared = decoder.cache.layers[0].segments[0]
            if isinstance(shared, SplitRows):  # a copy of the prompt, stored once
                assert (shared.tokens, shared.batch) == (33, 1)
            elif shared.tokens == 33:  # nothing was evicted: the prompt is stored once
                assert shared is prefilled.cache.layers[0].segments[0]
    torch.testing.assert_close(together, torch.stack(alone), atol=1e-5, rtol=1e-5)


@sparse
def test_padded_batches_equal_single_runs_or_are_refused(
    name: str, network: LlamaForCausalLM, prompt: list[int]
) -> None:
    method = ready(name, network)
    prompts, following = [prompt[:30], prompt[10:31]], prompt[31:36]
    ids = torch.tensor([prompts[0], [5] * 9 + prompts[1]])
    padding = torch.tensor([[True] * 30, [False] * 9 + [True] * 21])
    with Session(network) as session:
        prefilled = session.prefill(ids, padding, observe=method.observes())
        if not method.padding or name == "streamingllm_cache":
            with (
                pytest.raises(UserError, match=r"different lengths|padded batches"),
                prefilled.fork(method, 9) as decoder,
            ):
                pass
            return
        with prefilled.fork(method, 9) as decoder:
            together = [decoder.step(torch.tensor([[token], [token]])) for token in following]
        for row, one in enumerate(prompts):
            with session.prefill(one, observe=method.observes()).fork(method, 9) as decoder:
                alone = [decoder.step(torch.tensor([[token]]))[0] for token in following]
            torch.testing.assert_close(torch.stack(together)[:, row], torch.stack(alone), atol=1e-5, rtol=1e-4)


@sparse
def test_a_pyramid_of_budgets(name: str, network_of: Callable[..., LlamaForCausalLM], prompt: list[int]) -> None:
    """Layers get different budgets that sum to layers * budget, and read what they get."""
    network = network_of(layers=4)
    method = ready(name, network)
    method.layer_budget, method.pyramid_beta = "pyramid", 2
    budget = max(10, method.smallest_budget())
    _, decoder = decode(network, method, budget, prompt, 39)
    budgets = [layer.budget for layer in decoder.cache.layers]
    assert sum(budgets) == 4 * budget
    read, expected = decoder.state.tally.attended, sum(min(layer, 40) for layer in budgets)
    assert 0 < read <= expected if name in AT_MOST else read == pytest.approx(expected)


@pytest.mark.parametrize(
    "method",
    [
        SnapKV("snapkv", window=3, kernel=3, interval=5),
        RKV("rkv", window=3, kernel=3, interval=5),
        H2O("h2o", interval=5),
        KNorm("knorm", interval=5),
    ],
    ids=lambda method: method.name,
)
def test_between_evictions_the_cache_stays_below_budget_and_interval(
    method: Method, network: LlamaForCausalLM, prompt: list[int]
) -> None:
    """60 steps at budget 10: after each, what is held is under budget + interval, and it is cut again and again."""
    held = []
    with Session(network) as session:
        prefilled = session.prefill(prompt, observe=method.observes())
        with prefilled.fork(method, 10) as decoder:
            for token in [*prompt, *prompt[:20]]:
                decoder.step(torch.tensor([[token]]))
                held.append(max(layer.length for layer in decoder.cache.layers))
    assert max(held) < 10 + 5
    assert sum(after < before for before, after in itertools.pairwise(held)) >= 60 // 5 - 1


@sparse
@pytest.mark.parametrize("bits", [8, 2])
def test_with_a_quantised_cache(name: str, bits: int, network: LlamaForCausalLM, prompt: list[int]) -> None:
    """Combines with a method that keeps the whole cache; one that evicts while decoding is refused clearly."""
    method, packing = ready(name, network), Packing(bits=bits, group=4, residual=4)
    evicts = not isinstance(method, H2OMaskSim) and method.decoded.__func__ is not Method.decoded  # type: ignore[attr-defined]
    evicts = evicts and not isinstance(method, SparQ | FasaM)
    with Session(network) as session:
        prefilled = session.prefill(prompt[:33], observe=method.observes())
        with prefilled.fork(method, 9) as decoder:
            plain = [decoder.step(torch.tensor([[token]]))[0] for token in prompt[33:]]
        if evicts or name.startswith("fasa_m"):
            reason = "evicts while decoding" if evicts else "offloads no packed rows"
            with (
                pytest.raises(UserError, match=rf"cache.bits=\d .* {reason}"),
                prefilled.fork(method, 9, packing=packing) as decoder,
            ):
                decoder.force(prompt[33:])
            return
        with prefilled.fork(method, 9, packing=packing) as decoder:
            packed = [decoder.step(torch.tensor([[token]]))[0] for token in prompt[33:]]
            assert decoder.cache.layers[0].segments[0].tokens >= 28
    assert torch.isfinite(torch.stack(packed)).all()
    assert not torch.equal(torch.stack(packed), torch.stack(plain))


def test_full_kv_in_eight_bits_is_close_to_full_kv(network: LlamaForCausalLM, prompt: list[int]) -> None:
    full, _ = decode(network, FullKV("fkv"), None, prompt, 33)
    errors = []
    with Session(network) as session:
        prefilled = session.prefill(prompt[:33])
        for bits in (8, 4, 2):
            with prefilled.fork(FullKV("fkv"), None, packing=Packing(bits=bits, group=4, residual=4)) as decoder:
                packed = torch.stack([decoder.step(torch.tensor([[token]]))[0] for token in prompt[33:]])
            errors.append((packed - full[1:]).abs().mean().item())
    assert errors[0] < 0.02
    assert errors[0] < errors[1] < errors[2]


def walk(thing: Any) -> list[Tensor]:
    """Every tensor that can be reached from an object."""
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        return [tensor for value in thing.values() for tensor in walk(value)]
    if isinstance(thing, list | tuple):
        return [tensor for value in thing for tensor in walk(value)]
    return walk(vars(thing)) if hasattr(thing, "__dict__") else []


def layer_of(keys: Tensor) -> KVLayer:
    layer = KVLayer(0)
    layer.append(keys, keys, torch.arange(keys.shape[2]).expand(keys.shape[0], -1))
    return layer


def test_top_slots_by_hand() -> None:
    layer = layer_of(torch.zeros(1, 1, 6, 2))
    scores = torch.tensor([[[5.0, 1.0, 9.0, 2.0, 8.0, 0.0]]])
    assert top_slots(scores, layer, 3).tolist() == [[[0, 2, 4]]]
    assert top_slots(scores, layer, 3, recent=1).tolist() == [[[2, 4, 5]]]
    assert top_slots(scores, layer, 3, sinks=2).tolist() == [[[0, 1, 2]]]
    assert top_slots(scores, layer, 3, sinks=1, recent=2).tolist() == [[[0, 4, 5]]]
    assert scores.tolist() == [[[5.0, 1.0, 9.0, 2.0, 8.0, 0.0]]]  # the caller's scores are untouched


def test_top_slots_passes_padding_over() -> None:
    layer = KVLayer(0)
    layer.append(torch.zeros(1, 1, 6, 2), torch.zeros(1, 1, 6, 2), torch.tensor([[-1, -1, 0, 1, 2, 3]]))
    layer.padded = True
    scores = torch.tensor([[[99.0, 98.0, 0.0, 2.0, 1.0, -5.0]]])
    assert top_slots(scores, layer, 2).tolist() == [[[3, 4]]]
    assert top_slots(scores, layer, 2, sinks=1).tolist() == [[[2, 3]]]
    assert top_slots(scores, layer, 2, sinks=1, recent=1).tolist() == [[[2, 5]]]
    assert top_slots(scores, layer, 5).tolist()[0][0][1:] == [2, 3, 4, 5]


def test_group_softmax_by_hand() -> None:
    layer = layer_of(torch.zeros(1, 1, 2, 4))
    layer.scale = 0.5
    scores = torch.tensor([[[2.0, 0.0], [0.0, 4.0]]])  # two query heads on one KV head
    a, b = 1 / (1 + torch.e**-1), 1 / (1 + torch.e**2)  # softmax of (1, 0) and of (0, 2)
    torch.testing.assert_close(group_softmax(scores, layer), torch.tensor([[[(a + b) / 2, 1 - (a + b) / 2]]]))


def test_dense_layers_read_everything(network: LlamaForCausalLM, prompt: list[int]) -> None:
    _, decoder = decode(network, Oracle("oracle", dense_layers=[0]), 8, prompt, 33)
    assert decoder.state.tally.sparse == {0: 0, 1: 7}


def test_streamingllm_in_cache_positions_equals_a_short_text(
    network_of: Callable[..., LlamaForCausalLM], prompt: list[int]
) -> None:
    """One layer: what is kept does not depend on what was dropped, so the same tokens at 0.. give the same logits."""
    network = network_of(layers=1)
    method = ready("streamingllm_cache", network)
    logits, _ = decode(network, method, 10, prompt, 33)
    for step, last in enumerate(range(33, 40), start=1):
        short = [*prompt[:2], *prompt[last - 7 : last + 1]]
        torch.testing.assert_close(logits[step], network(torch.tensor([short])).logits[0, -1], atol=1e-5, rtol=1e-5)
    original, _ = decode(network, ready("streamingllm", network), 10, prompt, 33)
    assert not torch.allclose(original[1:], logits[1:], atol=1e-3)
