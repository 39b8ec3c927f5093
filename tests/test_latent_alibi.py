"""DeepSeek-V2's latent attention, and the ALiBi of BLOOM and MPT: tiny random models against plain transformers."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from fasa_bench.alibi import check_alibi, slopes_of
from fasa_bench.calibration import Calibration
from fasa_bench.errors import UserError
from fasa_bench.filling import filled
from fasa_bench.latent import LatentRows
from fasa_bench.methods.fasa import FasaC
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.oracle import Oracle
from fasa_bench.methods.streamingllm import StreamingLLM
from fasa_bench.models import Model, ModelSpec
from fasa_bench.plain import Plain
from fasa_bench.rope import Rope
from fasa_bench.runner import Job, run
from fasa_bench.segments import BLOCK, Packing
from fasa_bench.session import Session
from fasa_bench.softmax import biased, position_bias, scaled
from tests.conftest import ROOT
from tests.test_methods import METHODS, decode, prepared

R, P, PLAIN, V, HEADS = 24, 8, 16, 12, 4  # latent, rotary and other dimensions of a key, dimensions of a value
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "kv_lora_rank": R,
        "q_lora_rank": None,
        "qk_nope_head_dim": PLAIN,
        "qk_rope_head_dim": P,
        "v_head_dim": V,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 512,
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": HEADS},
    "mpt": {"d_model": 48, "n_layers": 2, "n_heads": 3, "expansion_ratio": 2, "max_seq_len": 256},
}
every = pytest.mark.parametrize("family", FAMILIES)
with_alibi = pytest.mark.parametrize("family", ["bloom", "mpt"])


def make(family: str, seed: int = 0, vocabulary: int = 101, **changes: Any) -> Any:
    """Random weights of unit size, so that attention is not flat; biases and norms drawn, too."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **FAMILIES[family] | {"vocab_size": vocabulary, "initializer_range": 0.125})
    for key, value in changes.items():
        setattr(config, key, value)
    network = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, parameter in network.named_parameters():
        if name.endswith("bias"):
            parameter.normal_(std=0.3)
    return network


@functools.cache
def of(family: str) -> Any:
    return make(family)


LATENTS = hasattr(DeepseekV2Attention, "expand_kv")
latents = pytest.mark.skipif(not LATENTS, reason="before transformers 5 MLA caches whole keys and values")
# no token twice: without a rotation two of the same would be tied in the first layer
IDS = torch.randperm(101, generator=torch.Generator().manual_seed(1))[:40].tolist()


def plain(network: Any, ids: list[int]) -> Tensor:
    """Logits of transformers' own attention and mask, [n, vocabulary]."""
    with torch.no_grad():
        return network(torch.tensor([ids])).logits[0]


# --- full KV equals plain transformers


@every
def test_full_kv_equals_plain_transformers(family: str) -> None:
    network = of(family)
    expected = plain(network, IDS)
    logits, _ = decode(network, FullKV("fkv"), None, IDS, 30)
    torch.testing.assert_close(logits, expected[29:], atol=1e-5, rtol=0)
    with Session(network) as session:  # and in one pass
        prefilled = session.prefill(IDS[:30])
        losses = torch.nn.functional.cross_entropy(expected[29:39], torch.tensor(IDS[30:]), reduction="none")
        for parallel in (False, True):
            with prefilled.fork(FullKV("fkv"), None) as decoder:
                forced = torch.tensor(decoder.force(IDS[30:], parallel))
            torch.testing.assert_close(forced, losses, atol=1e-5, rtol=0)
    assert torch.equal(plain(network, IDS), expected)  # the network is as it was


@every
def test_padded_batches_and_shared_prompts_equal_their_single_runs(family: str) -> None:
    network = of(family)
    ids, padding = torch.zeros(2, 30, dtype=torch.long), torch.ones(2, 30, dtype=torch.bool)
    ids[0], ids[1, 11:], padding[1, :11] = torch.tensor(IDS[:30]), torch.tensor(IDS[:19]), False
    both = torch.tensor([IDS[30:34], IDS[19:23]])
    method = Oracle("oracle")
    with Session(network) as session, session.prefill(ids, padding).fork(method, 9) as decoder:
        together = torch.stack([decoder.logits] + [decoder.step(both[:, i : i + 1]) for i in range(4)], dim=1)
    for row, (start, end) in enumerate([(30, 34), (19, 23)]):
        alone, _ = decode(network, method, 9, IDS[:end], start)
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=0)
    with Session(network) as session, session.prefill(IDS[:30]).fork(method, 9, samples=2) as decoder:
        first, second = decoder.step(torch.tensor([[IDS[30]], [5]]))
        first, second = decoder.step(torch.tensor([[IDS[31]], [7]]))
    for found, tail in ((first, IDS[30:32]), (second, [5, 7])):
        alone, _ = decode(network, method, 9, IDS[:30] + tail, 30)
        torch.testing.assert_close(found, alone[-1], atol=1e-5, rtol=0)


# --- units, scores and biases


@every
def test_all_units_scores_and_the_bias_are_the_full_logits(family: str) -> None:
    """The logits themselves are what the model's own attention weights are made of."""
    network = of(family)
    rope = Rope.of(network)
    attention = "num_heads" if family != "mpt" else "n_heads"
    with torch.no_grad():
        network.set_attn_implementation("eager")
        weights = network(torch.tensor([IDS]), output_attentions=True).attentions
    seen: dict[int, Tensor] = {}

    class Recorder(FullKV):
        def decoded(self, layer: Any, query: Tensor, found: Tensor | None) -> None:
            units = rope.units("rope")
            keys = layer.keys.repeat_interleave(query.shape[1] // layer.keys.shape[1], dim=1)
            products = [(query[..., dims[dims >= 0]] * keys[..., dims[dims >= 0]]).sum(-1) for dims in units]
            total = torch.stack(products).sum(0) * layer.scale
            bias = position_bias(layer)
            seen[layer.index] = (total if bias is None else total + bias)[0]
            torch.testing.assert_close(scaled(layer, layer.dot(query))[0, :, 0], seen[layer.index], atol=1e-4, rtol=0)

    decode(network, Recorder("fkv"), None, IDS, 39)
    assert len(seen) == 2
    for index, logits in seen.items():
        assert len(logits) == (HEADS if attention == "num_heads" else 3)
        torch.testing.assert_close(torch.softmax(logits, -1), weights[index][0, :, -1], atol=1e-5, rtol=0)


def test_units_of_deepseek_are_its_rotary_pairs_then_each_other_dimension() -> None:
    rope = Rope.of(of("deepseek_v2"))
    pairs = [[PLAIN + 2 * i, PLAIN + 2 * i + 1] for i in range(P // 2)]
    assert rope.layout == "interleaved"
    assert rope.units("rope").tolist() == pairs + [[i, -1] for i in range(PLAIN)]
    torch.testing.assert_close(rope.inv_freq, torch.tensor([1e4 ** (-2 * i / P) for i in range(P // 2)]))


@with_alibi
def test_units_with_alibi_are_single_dimensions(family: str) -> None:
    rope = Rope.of(of(family))
    assert rope.layout == "none"
    assert rope.units("rope").tolist() == [[i] for i in range(16)]


@pytest.mark.parametrize(
    ("family", "heads", "expected"),
    [
        ("bloom", 4, [2**-2, 2**-4, 2**-6, 2**-8]),
        ("bloom", 6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),  # the paper's rule where heads are no power of two
        ("mpt", 4, [2**-2, 2**-4, 2**-6, 2**-8]),
        ("mpt", 3, [2**-4, 2**-8, 2**-2]),  # MPT has its own
    ],
)
def test_slopes_are_those_of_the_model(family: str, heads: int, expected: list[float]) -> None:
    key, size = ("n_head", "hidden_size") if family == "bloom" else ("n_heads", "d_model")
    network = make(family, **{key: heads, size: 8 * heads})
    assert slopes_of(network).tolist() == expected  # type: ignore[union-attr]


def test_the_bias_counts_true_distances_after_an_eviction() -> None:
    network = of("bloom")
    method = StreamingLLM("streamingllm", start=2)
    with Session(network) as session, session.prefill(IDS[:30]).fork(method, 6) as decoder:
        decoder.step(torch.tensor([[5]]))
        layer = decoder.cache.layers[0]
        assert layer.positions.flatten().tolist() == [0, 1, 28, 29, 30]
        expected = torch.tensor([-30.0, -29, -2, -1, 0]) * slopes_of(network)[:, None]  # type: ignore[index]
        torch.testing.assert_close(position_bias(layer)[0], expected)  # type: ignore[index]
        scores = torch.zeros(1, HEADS, 1, 5)
        torch.testing.assert_close(biased(layer, scores, 0.5)[0, :, 0], 2 * expected)


# --- methods


@every
@pytest.mark.parametrize("name", METHODS)
def test_a_budget_of_the_whole_context_equals_full_kv(family: str, name: str) -> None:
    network = of(family)
    if name == "streamingllm_cache":
        return  # see below
    full, _ = decode(network, FullKV("fkv"), None, IDS, 33)
    logits, decoder = decode(network, prepared(METHODS[name](), network), 40, IDS, 33)
    torch.testing.assert_close(logits, full, atol=1e-6, rtol=0)
    assert sum(decoder.state.tally.sparse.values()) == 0


@every
@pytest.mark.parametrize("name", METHODS)
def test_a_small_budget_is_kept_and_read_exactly(family: str, name: str) -> None:
    network = of(family)
    if name == "streamingllm_cache" and (LATENTS or family != "deepseek_v2"):
        with pytest.raises(UserError, match=r"method\.positions='cache'"):
            decode(network, prepared(METHODS[name](), network), 12, IDS, 33)
        return
    full, _ = decode(network, FullKV("fkv"), None, IDS, 33)
    logits, decoder = decode(network, prepared(METHODS[name](), network), 12, IDS, 33)
    tally = decoder.state.tally
    assert tally.layer_steps == 14
    assert tally.attended / 14 <= 12
    assert tally.attended / 14 == 12 or name in ("quest", "quest_forced", "h2o_mask_sim")
    assert torch.equal(logits[0], full[0])
    assert not torch.allclose(logits[1:], full[1:], atol=1e-3)


PARALLEL = [name for name, method in METHODS.items() if method().parallel]


@every
@pytest.mark.parametrize("name", PARALLEL)
def test_one_pass_scores_as_steps_do(family: str, name: str) -> None:
    network = of(family)
    method = prepared(METHODS[name](), network)
    with Session(network) as session:
        prefilled = session.prefill(IDS[:30], observe=method.observes())
        losses = []
        for parallel in (False, True):
            with prefilled.fork(method, 12) as decoder:
                losses.append(torch.tensor(decoder.force(IDS[30:], parallel)))
    torch.testing.assert_close(*losses, atol=1e-4, rtol=0)


@with_alibi
def test_the_bias_is_part_of_the_choice(family: str) -> None:
    """All units together rank tokens as the Oracle does; without the bias they do not."""
    network = of(family)
    oracle, _ = decode(network, Oracle("oracle"), 8, IDS, 30)
    for switch in (True, False):
        method = prepared(FasaC("fasa_c", n_tip=1.0, position_bias=switch), network)
        logits, _ = decode(network, method, 8, IDS, 30)
        assert torch.allclose(logits, oracle, atol=1e-5) == switch


def test_quest_bounds_the_logits_of_each_page_with_alibi() -> None:
    network = of("bloom")
    method: Any = prepared(METHODS["quest"](), network)
    with Session(network) as session, session.prefill(IDS[:30]).fork(method, 8) as decoder:
        for layer in decoder.cache.layers:
            query = torch.randn(1, HEADS, 1, 16)
            logits = biased(layer, layer.dot(query), layer.scale)[0, :, 0]
            bounds = method.page_scores(layer, query)[0]
            largest = torch.stack([part.amax(-1) for part in logits.split(4, dim=-1)], dim=-1)
            assert (bounds >= largest - 1e-5).all()
            slack = biased(layer, torch.zeros_like(logits)[None], layer.scale)[0, :, -3:]
            assert slack[:, -1].abs().max() == 0  # the newest page's newest token is where distances start


# --- the cache of latents


@latents
def test_latents_are_what_is_held_and_read() -> None:
    network = of("deepseek_v2")
    with Session(network) as session, session.prefill(IDS[:30]).fork(FullKV("fkv"), None) as decoder:
        for token in IDS[30:]:
            decoder.step(torch.tensor([[token]]))
        assert decoder.cache.device_bytes == 2 * BLOCK * ((R + P) * 4 + 8)
        assert decoder.read_bytes == 2 * sum(range(31, 41)) * (R + P + R) * 4  # once to score, once to mix
        layer = decoder.cache.layers[0]
        assert isinstance(layer.segments[0], LatentRows)
        assert layer.keys.shape == (1, HEADS, 40, PLAIN + P)
        assert layer.values.shape == (1, HEADS, 40, V)


@latents
@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("streamingllm", (R + P) * 4 + 8),  # one set of tokens for all heads: latents stay
        ("tova", (R + P) * 4 + 8),
        ("knorm", HEADS * ((PLAIN + P + V) * 4 + 8)),  # a set for each head: each has keys and values of its own
    ],
)
def test_what_evicting_methods_hold_of_latents(name: str, held: int) -> None:
    method = prepared(METHODS[name](), of("deepseek_v2"))
    with Session(of("deepseek_v2")) as session:
        prefilled = session.prefill(IDS[:30], observe=method.observes())
        with prefilled.fork(method, 12) as decoder:
            decoder.step(torch.tensor([[5]]))
            assert decoder.cache.device_bytes == 2 * BLOCK * held
        assert prefilled.cache.device_bytes == 2 * BLOCK * ((R + P) * 4 + 8)  # the prompt's own stays as it was


@latents
def test_selecting_methods_read_latents_of_what_they_choose() -> None:
    network = of("deepseek_v2")
    method = prepared(FasaC("fasa_c"), network)
    with Session(network) as session, session.prefill(IDS[:30]).fork(method, 12) as decoder:
        decoder.step(torch.tensor([[5]]))
        assert decoder.read_bytes == 2 * (31 * (R + P) + HEADS * 12 * (R + P)) * 4
        assert decoder.cache.device_bytes == 2 * BLOCK * ((R + P) * 4 + 8)


def test_fasa_m_keeps_the_dominant_dimensions_of_each_head_near() -> None:
    network = of("deepseek_v2")
    method: Any = prepared(METHODS["fasa_m"](), network)
    logits, decoder = decode(network, method, 12, IDS, 30)
    expected, _ = decode(network, prepared(METHODS["fasa_c"](), network), 12, IDS, 30)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    width = sum(PLAIN + P - method._layers[i].lead + V for i in range(2))
    assert decoder.peak_host_bytes == BLOCK * HEADS * width * 4 + 2 * HEADS * 12 * 8


@latents
def test_latents_are_not_quantised() -> None:
    with Session(of("deepseek_v2")) as session:
        forked = session.prefill(IDS).fork(FullKV("fkv"), None, packing=Packing(bits=4))
        with pytest.raises(UserError, match=r"cache\.bits=4 .*latents"):
            forked.__enter__()


# --- calibration


def saved(family: str, folder: Path) -> Model:
    """A checkpoint of the family with the tokenizer of the embedded model, as a user would have one in a folder."""
    tokenizer = Model(ModelSpec("tiny", 64, source="random")).tokenizer
    network = make(family, vocabulary=len(tokenizer))
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Model(ModelSpec("mine", 512, source="local", path=str(folder)))


def planted(network: Any, family: str, layer: int, head: int, dims: list[int]) -> None:
    """Make some dimensions of one head's queries and keys large."""
    dim = PLAIN + P
    if family == "deepseek_v2":
        attention = network.model.layers[layer].self_attn
        for d in dims:
            attention.q_proj.weight[head * dim + d] *= 6
            if d < PLAIN:
                attention.kv_b_proj.weight[head * (PLAIN + V) + d] *= 6
            else:  # one rotary key for all heads
                attention.kv_a_proj_with_mqa.weight[R + d - PLAIN] *= 6
    elif family == "bloom":
        linear = network.transformer.h[layer].self_attention.query_key_value
        for row in (head * 48 + part * 16 + d for part in (0, 1) for d in dims):
            linear.weight[row] *= 6
            linear.bias[row] = 0
    else:
        for row in (part * 48 + head * 16 + d for part in (0, 1) for d in dims):
            network.transformer.blocks[layer].attn.Wqkv.weight[row] *= 6


@pytest.mark.parametrize(
    ("family", "unit"),
    [("deepseek_v2", 1), ("deepseek_v2", 4 + 7), ("bloom", 5), ("mpt", 9)],  # a rotary pair; single dimensions
)
def test_calibration_finds_the_planted_unit(family: str, unit: int, tmp_path: Path) -> None:
    model = saved(family, tmp_path)
    dims = model.rope.units("rope")[unit]
    head = 1 if family == "mpt" else 2  # of those with a small slope: more depends on the products
    planted(model.network, family, layer=1, head=head, dims=dims[dims >= 0].tolist())
    agreement = Calibration(k=16, prefill=64, decode=8).measure(model, "rope")
    assert agreement.shape == (2, 3 if family == "mpt" else HEADS, len(model.rope.units("rope")))
    assert agreement[1, head].argmax() == unit
    assert agreement[1, head, unit] > 1.5 * agreement[1, head].sort().values[-2]


# --- models: what is taken, refused and run


def test_a_model_that_cannot_be_decoded_is_refused() -> None:
    falcon = AutoConfig.for_model("falcon", alibi=True)
    with pytest.raises(UserError, match="model=rw is not supported: of the models with ALiBi only bloom, mpt are"):
        check_alibi("rw", falcon)
    baichuan = AutoConfig.for_model("bloom")
    baichuan.model_type = "baichuan"
    with pytest.raises(UserError, match=r"model=b cannot be run: Baichuan's own code.*bloom, mpt"):
        check_alibi("b", baichuan)
    with pytest.raises(UserError, match="slow_but_exact"):
        check_alibi("b", AutoConfig.for_model("bloom", slow_but_exact=True, pretraining_tp=2))
    check_alibi("b", AutoConfig.for_model("bloom", pretraining_tp=4))


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v2", "deepseek_v2_lite"), ("bloom", "bloomz_7b1"), ("mpt", "mpt_7b_chat")]
)
def test_run_of_a_local_checkpoint(family: str, name: str, tmp_path: Path) -> None:
    saved(family, tmp_path / "checkpoint")
    settings = [f"model={name}", f"model.path={tmp_path}/checkpoint", "method=fasa", "task=stdlib", "budget=16"]
    settings += ["limit=1", "logger=none", f"results_dir={tmp_path}/results", "task.parts=[perplexity,code]"]
    settings += ["task.context=96", "task.decode=12", "task.code_tokens=4"]
    settings += ["calibration.k=16", "calibration.prefill=64", "calibration.decode=2"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        job = Job.of(compose("config", settings))
    summary = json.loads((run(job) / "summary.json").read_text())
    assert (summary["status"], summary["model"]) == ("complete", name)
    assert summary["realised"]["attended_tokens"] == 16
    assert math.isfinite(summary["metrics"]["perplexity"]["value"])
    assert "method.position_bias" in summary["deviations"]


def test_filled_cache_and_plain_transformers_for_timing() -> None:
    """`task=latency` fills caches with random rows, latents too, and steps transformers' own attention beside it."""
    for family in FAMILIES:
        with Session(of(family)) as session:
            prefilled = filled(session, 70, seed=1)
            assert prefilled.cache.layers[1].length == 70
            theirs = Plain(prefilled)
            theirs.step(torch.tensor([[5]]))
            keys, values = prefilled.cache.layers[1].tables
            assert torch.equal(theirs.cache.layers[1].keys[:, :, :70], keys)
            assert torch.equal(theirs.cache.layers[1].values[:, :, :70], values)
            assert theirs.cache.get_seq_length() == 71
