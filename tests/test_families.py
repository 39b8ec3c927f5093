"""Every supported architecture: full KV is the plain model, units add up, methods act on full attention only."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor

from fasa_bench import runner
from fasa_bench.attention import attend, forward
from fasa_bench.cache import KVLayer
from fasa_bench.calibration import Calibration
from fasa_bench.errors import UserError
from fasa_bench.filling import filled
from fasa_bench.method import Observation, group_softmax
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.sparq import SparQ
from fasa_bench.plain import Plain
from fasa_bench.rope import Rope
from fasa_bench.session import Session
from fasa_bench.windows import check_window, windows
from tests.conftest import ROOT
from tests.families import FAMILIES, FULL, WINDOW, network
from tests.test_methods import METHODS, FakeCalibration

IDS = torch.randperm(98, generator=torch.Generator().manual_seed(1))[:36] + 3
PROMPT = 30
LENGTH_DEPENDENT = ["llama_dynamic", "phi3_longrope"]  # frequencies of RoPE
SLIDING = ["qwen2_sliding", "gemma2", "gemma3", "cohere2", "gpt_oss"]


@functools.cache
def rope_of(name: str) -> Rope:
    return Rope.of(network(name))


def plain(name: str, ids: Tensor, prompt: int) -> Tensor:
    """Logits of the model with transformers' cache and attention after a prompt and each later token, [m, vocabulary].

    Frequencies may depend on the length of the text so far, so that one pass over everything would be another thing.
    """
    net, found, state = network(name), [], {}
    net.set_attn_implementation("eager")
    with torch.no_grad():
        for part in (ids[:prompt], *ids[prompt:, None]):
            output = net(part[None], use_cache=True, **state)
            state = {key: output[key] for key in ("cache", "past_key_values") if key in output}
            found.append(output.logits[0, -1])
    return torch.stack(found)


# --- full KV is the model


@pytest.mark.parametrize("name", FAMILIES)
def test_full_kv_equals_the_plain_model(name: str) -> None:
    """The prompt in one pass, then token by token; then several tokens at once."""
    expected = plain(name, IDS, PROMPT)
    with Session(network(name)) as session:
        prefilled = session.prefill(IDS[:PROMPT])
        torch.testing.assert_close(prefilled.logits[0], expected[0], atol=1e-5, rtol=1e-5)
        with prefilled.fork(FullKV("fkv"), None) as decoder:
            for token, wanted in zip(IDS[PROMPT:], expected[1:], strict=True):
                torch.testing.assert_close(decoder.step(token[None, None])[0], wanted, atol=1e-5, rtol=1e-5)
        if name not in LENGTH_DEPENDENT:  # whose frequencies would be those of the last token
            with prefilled.fork(FullKV("fkv"), None) as decoder:
                losses = decoder.force(IDS[PROMPT:].tolist(), parallel=True)
            wanted = -expected[:-1].log_softmax(-1).gather(1, IDS[PROMPT:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(losses).double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "mistral_sliding", "gemma2"])
def test_a_padded_row_and_samples_equal_runs_of_their_own(name: str) -> None:
    net, short = network(name), IDS[:14]
    batch = torch.stack([IDS[:PROMPT], torch.cat([torch.zeros(PROMPT - 14, dtype=torch.long), short])])
    padding = torch.ones_like(batch, dtype=torch.bool)
    padding[1, : PROMPT - 14] = False
    tail = IDS[-4:]
    expected = [plain(name, torch.cat([ids, tail]), len(ids)) for ids in (IDS[:PROMPT], short)]
    with Session(net) as session:
        with session.prefill(batch, padding).fork(FullKV("fkv"), None) as decoder:
            steps = [decoder.logits, *(decoder.step(token.expand(2, 1)) for token in tail)]
        with session.prefill(IDS[:PROMPT]).fork(FullKV("fkv"), None, samples=2) as decoder:
            samples = [decoder.logits, *(decoder.step(token.expand(2, 1)) for token in tail)]
    for row in (0, 1):
        torch.testing.assert_close(torch.stack(steps)[:, row], expected[row], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(samples)[:, row], expected[0], atol=1e-5, rtol=1e-5)


# --- units


@pytest.mark.parametrize("name", FULL)
def test_scores_of_all_units_add_up_to_the_logits(name: str) -> None:
    """Before the scale, of the queries and keys that the model itself makes; every dimension is in one unit."""
    rope = rope_of(name)
    units = rope.units("rope")
    assert sorted(units[units >= 0].tolist()) == list(range(rope.head_dim))
    with Session(network(name)) as session:
        layers = session.prefill(IDS, observe=Observation(window=2)).cache.full
        assert [layer.index for layer in layers] == list(rope.layers)
        for layer in layers:
            query, keys = layer.prompt_queries, layer.keys.repeat_interleave(2, dim=1)
            scores = torch.zeros(1, 4, 2, len(IDS), dtype=torch.float64)
            for unit in units:
                dims = unit[unit >= 0]
                scores += query[..., dims] @ keys[..., dims].mT
            torch.testing.assert_close(scores, layer.dot(query), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", FULL)
def test_a_step_of_one_position_acts_inside_each_unit(name: str) -> None:
    """Moved keys are those that the model makes there; what belongs to different units never mixes."""
    rope = rope_of(name)
    units = rope.units("rope")
    member = torch.zeros(len(units), rope.head_dim + 1).scatter(1, units % (rope.head_dim + 1), 1.0)[:, :-1]
    together = (member.T @ member).bool()
    if rope.scaled:
        with pytest.raises(UserError, match="cannot be moved"):
            rope.rotate(torch.eye(rope.head_dim), 1)
        return
    turned = rope.rotate(torch.eye(rope.head_dim), 1)
    assert not turned[~together].any()
    torch.testing.assert_close(turned @ turned.T, torch.eye(rope.head_dim))
    assert torch.equal(turned[rope.plain], torch.eye(rope.head_dim)[rope.plain])
    assert all(turned[b, a] != 0 for a, b in rope.pairs)


LAYOUTS = {  # where it is not 8 pairs of halves
    "glm": ("interleaved", 4),
    "glm4": ("interleaved", 4),
    "phi": ("half", 4),
    "phi3": ("half", 6),
    "stablelm": ("half", 2),
    "cohere2": ("none", 0),  # only its sliding layers rotate
}


@pytest.mark.parametrize("name", FULL)
def test_which_dimensions_rotate_together(name: str) -> None:
    rope = rope_of(name)
    assert (rope.layout, len(rope.pairs)) == LAYOUTS.get(name, ("half", 8))
    assert rope.scaled == (name in LENGTH_DEPENDENT)
    if name == "gemma3":  # theta is 1,000,000 in its layers of full attention, 10,000 in the others
        assert rope.inv_freq[-1].item() == pytest.approx(1e6 ** (-14 / 16), rel=1e-5)


# --- methods


@pytest.mark.parametrize("name", FULL)
def test_a_budget_of_the_whole_context_equals_full_kv(name: str) -> None:
    model = SimpleNamespace(config=network(name).config, rope=rope_of(name))
    methods = {label: make() for label, make in METHODS.items()}
    if rope_of(name).scaled or not rope_of(name).pairs:  # cached keys cannot be moved
        del methods["streamingllm_cache"]
    if rope_of(name).scaled:
        del methods["loki_pre"]
    for method in methods.values():
        method.prepare(model, FakeCalibration())  # type: ignore[arg-type]

    def decode(prefilled: Any, method: Any, budget: Any) -> Tensor:
        with prefilled.fork(method, budget) as decoder:
            return torch.stack([decoder.step(IDS[None, i : i + 1])[0] for i in (PROMPT, PROMPT + 1)])

    with Session(network(name)) as session:
        observe = functools.reduce(Observation.union, (method.observes() for method in methods.values()))
        prefilled = session.prefill(IDS[:PROMPT], observe=observe)
        full = decode(prefilled, FullKV("fkv"), None)
        for label, method in methods.items():
            torch.testing.assert_close(decode(prefilled, method, 40), full, atol=1e-9, rtol=1e-9, msg=label)
            if name in SLIDING or name == "llama":
                assert not torch.equal(decode(prefilled, method, 12), full), label


@pytest.mark.parametrize("name", SLIDING)
def test_methods_act_on_full_attention_only_and_windows_stay(name: str) -> None:
    model, rope = SimpleNamespace(config=network(name).config, rope=rope_of(name)), rope_of(name)
    assert rope.layers == ((0,) if name == "qwen2_sliding" else (1,))
    with Session(network(name)) as session:
        for label in ("oracle", "snapkv", "h2o", "streamingllm", "quest"):
            method = METHODS[label]()
            method.prepare(model, FakeCalibration())  # type: ignore[arg-type]
            prefilled = session.prefill(IDS[:PROMPT], observe=method.observes())
            assert [layer.length for layer in prefilled.cache.layers] == [
                PROMPT if index in rope.layers else WINDOW - 1 for index in range(3)
            ]
            with prefilled.fork(method, 12) as decoder:
                for i in range(PROMPT, len(IDS)):
                    decoder.step(IDS[None, i : i + 1])
                tally = decoder.state.tally
                assert set(tally.sparse) == set(rope.layers)
                assert tally.layer_steps == (len(IDS) - PROMPT) * len(rope.layers)
                assert tally.attended / tally.layer_steps <= 12
                budgets = [layer.budget for layer in decoder.cache.layers]
                assert budgets == [12 if index in rope.layers else None for index in range(3)]


def test_a_sliding_layer_holds_little_more_than_its_window_however_long_the_answer() -> None:
    with Session(network("gemma3")) as session, session.prefill(IDS[:5]).fork(FullKV("fkv"), None) as decoder:
        decoder.step(IDS.repeat(5)[None])
        assert [layer.length for layer in decoder.cache.layers] == [
            WINDOW - 1 + (185 - (WINDOW - 1)) % 65 if index != 1 else 185 for index in range(3)
        ]
        last = decoder.logits[0]
        prefilled = filled(session, 50)  # what the latency task decodes from
        assert [(layer.length, layer.seen) for layer in prefilled.cache.layers] == [(7, 50), (50, 50), (7, 50)]
    expected = plain("gemma3", torch.cat([IDS[:5], IDS.repeat(5)]), 185)[0]
    torch.testing.assert_close(last, expected, atol=1e-5, rtol=1e-5)


# --- softmax with sinks and soft caps, by hand


@pytest.mark.parametrize(("cap", "sinks"), [(None, True), (2.0, False), (2.0, True)])
def test_attention_over_some_tokens_has_caps_and_sinks(cap: float | None, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    query, keys, values = (torch.randn(1, h, n, 8, generator=generator) for h, n in ((4, 1), (2, 9), (2, 9)))
    layer = KVLayer(0)
    layer.append(keys, values, torch.arange(9)[None])
    layer.scale, layer.cap = 0.7, cap
    layer.sinks = torch.randn(4, generator=generator) if sinks else None
    chosen = [1, 4, 8]
    output, weights, _ = attend(layer, query, torch.tensor(chosen).expand(1, 2, 1, 3))
    for head in range(4):
        logits = [0.7 * float(query[0, head, 0] @ keys[0, head // 2, slot]) for slot in chosen]
        if cap:
            logits = [cap * torch.tensor(x / cap).tanh().item() for x in logits]
        raised = torch.tensor([*logits, float(layer.sinks[head]) if sinks else -torch.inf]).exp()
        share = raised[:-1] / raised.sum()
        torch.testing.assert_close(weights[0, head], share)
        torch.testing.assert_close(output[0, 0, head], share @ values[0, head // 2, chosen])
    if sinks:  # a head that looks at its sink counts less when a group chooses
        assert (group_softmax(layer.dot(query)[:, :, 0], layer).sum(-1) < 0.999).all()


def test_sparq_counts_the_sink_as_covered() -> None:
    """With all components its estimate is exact: alpha is 1 less the exact weight of what is not read."""
    generator = torch.Generator().manual_seed(3)
    query, keys, values = (torch.randn(1, h, n, 8, generator=generator) for h, n in ((4, 1), (2, 9), (2, 9)))
    layer, method = KVLayer(0), SparQ("sparq", rank=8, local=0)
    layer.append(keys, values, torch.arange(9)[None])
    layer.scale, layer.budget, layer.sinks = 0.7, 4, torch.rand(4, generator=generator)
    method.prefill(layer, None)
    slots = method.select(layer, query)
    _, weights, _ = attend(layer, query, None)
    read = torch.zeros(2, 9, dtype=torch.bool).scatter(1, slots[0, :, 0], True).repeat_interleave(2, dim=0)
    rest = weights[0].masked_fill(read, 0).sum(-1)
    assert (weights.sum(-1) < 0.999).all()
    torch.testing.assert_close(layer.state["alpha"][0, :, 0], 1 - rest)


# --- calibration


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("llama", [[0, 8], [3, 11]]),
        ("qwen2_sliding", [[1, 9], [2, 10]]),
        ("glm", [[2, 3], [9, -1]]),  # neighbours rotate, and a dimension that does not
        ("stablelm", [[1, 3], [12, -1]]),
        ("gemma2", [[0, 8], [5, 13]]),
        ("gpt_oss", [[2, 10], [4, 12]]),
    ],
)
def test_calibration_finds_the_units_that_carry_the_content(
    name: str, planted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries and keys made small in all dimensions but those of two units, whose agreement must be the highest."""
    net, rope = network(name), rope_of(name)
    quiet = torch.full((16, 1), 0.03, dtype=torch.float64)
    quiet[[dimension for unit in planted for dimension in unit if dimension >= 0]] = 1
    for layer in net.model.layers:
        for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            heads = projection.out_features // 16
            monkeypatch.setattr(projection.weight, "data", projection.weight.data * quiet.repeat(heads, 1))
            if projection.bias is not None:
                monkeypatch.setattr(projection.bias, "data", projection.bias.data * quiet[:, 0].repeat(heads))
    ids = torch.randint(3, 101, (200,), generator=torch.Generator().manual_seed(4)).tolist()
    model: Any = SimpleNamespace(
        network=net, rope=rope, prefill_backend="sdpa", tokenizer=lambda text, **_: {"input_ids": ids}
    )
    agreement = Calibration(k=12, prefill=120, decode=30).measure(model, "rope")
    units = rope.units("rope").tolist()
    assert agreement.shape == (len(rope.layers), 4, len(units))
    best = agreement.topk(2, dim=-1).indices.sort(dim=-1).values
    assert (best == torch.tensor(sorted(units.index(unit) for unit in planted))).all()
    agreement.scatter_(-1, best, 0.0)
    assert agreement.max() < 0.4  # the others say little


# --- windows of a config, and what is refused


def config(**entries: Any) -> Any:
    made = SimpleNamespace(model_type="mine", num_hidden_layers=2, max_position_embeddings=100, **entries)
    made.get_text_config = lambda: made
    return made


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, [None, None]),
        ({"sliding_window": None}, [None, None]),
        ({"sliding_window": 10}, [10, 10]),  # Mistral 7B v0.1
        ({"sliding_window": 200}, [None, None]),  # Phi-3.5: wider than the model's positions
        ({"sliding_window": 10, "layer_types": ["full_attention"] * 2}, [None, None]),  # Qwen2.5
        ({"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}, [10, None]),
    ],
)
def test_windows_of_a_config(entries: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(config(**entries)) == expected


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="mine is not supported: layers of type chunked_attention"):
        windows(config(layer_types=["full_attention", "chunked_attention"]))
    with pytest.raises(UserError, match=r"layers of type sliding_attention \(sliding_window=None\)"):
        windows(config(layer_types=["full_attention", "sliding_attention"]))
    check_window("Attention", 200, None, 100)
    for found, expected in ((10, None), (None, 10), (10, 11)):
        with pytest.raises(UserError, match=f"the window {expected}, but the layer uses {found}"):
            check_window("Attention", found, expected, 100)
    with pytest.raises(UserError, match="Linear is not supported: it adds a learned position bias"):
        forward(torch.nn.Linear(1, 1), *torch.zeros(3, 1, 1, 1, 1), None, position_bias=torch.zeros(1))
    with pytest.raises(UserError, match="no layer has full attention"):
        Rope.of(network("mistral_sliding"))


@pytest.fixture
def job() -> Iterator[Any]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield lambda *lines: runner.Job.of(compose("config", ["model=tiny", "logger=none", "budget=16", *lines]))


def test_a_run_says_where_its_method_acts(job: Any) -> None:
    told = job("model.model_type=gpt_oss").deviations["model.windows"]
    assert told["value"] == {"window": 128, "full_attention_layers": [1]}
    assert "keeps it and is read whole" in told["note"]
    assert "model.windows" not in job().deviations


def test_transformers_takes_no_part_in_timings_of_windows() -> None:
    for name in ("gemma3", "gpt_oss", "mistral_sliding"):
        with (
            Session(network(name)) as session,
            pytest.raises(UserError, match=r"task\.plain=True is not allowed: .* sliding windows"),
        ):
            Plain(session.prefill(IDS))


def test_a_method_needs_a_layer_to_act_on(job: Any) -> None:
    lines = ["model.model_type=mistral", "model.positions=8192"]  # its window of 4,096 in every layer
    with pytest.raises(UserError, match="method='oracle' is not allowed: fkv for tiny: all its layers have a sliding"):
        job("method=oracle", *lines).prepare()
    job("method=fkv", *lines).prepare()
