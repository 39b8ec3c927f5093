"""Frequency chunks are read off the network: pairs, frequencies and moving of keys agree with what it computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from fasa_bench.errors import UserError
from fasa_bench.rope import Rope

HALF_16 = [(i, i + 8) for i in range(8)]
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
GPT = {"n_embd": 64, "n_head": 4, "n_layer": 2}  # the sizes' names in older architectures


def network(model_type: str, **changes: Any) -> Any:
    sizes = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes | changes)).eval()


def keys_at(net: Any, positions: list[int]) -> Tensor:
    """First layer's cached keys of the same 4 tokens, standing at `positions`: [kv_heads, 4, d]."""
    with torch.no_grad():
        output = net(input_ids=torch.tensor([[7, 20, 33, 60]]), position_ids=torch.tensor([positions]), use_cache=True)
    cache = getattr(output, "cache", None)
    return (output.past_key_values if cache is None else cache).layers[0].keys[0]


@pytest.mark.parametrize(
    ("model_type", "changes", "layout", "pairs", "plain"),
    [
        ("llama", {}, "half", HALF_16, []),
        ("llama", {"rope_scaling": LLAMA3}, "half", HALF_16, []),
        ("llama", {"rope_scaling": YARN}, "half", HALF_16, []),
        ("qwen2", {}, "half", HALF_16, []),
        ("qwen3", {"head_dim": 4}, "half", [(0, 2), (1, 3)], []),  # keys are normalised before they rotate
        ("cohere", {}, "interleaved", [(2 * i, 2 * i + 1) for i in range(8)], []),
        ("glm", {"head_dim": 16}, "interleaved", [(0, 1), (2, 3), (4, 5), (6, 7)], list(range(8, 16))),
        ("phi", {}, "half", [(0, 4), (1, 5), (2, 6), (3, 7)], list(range(8, 16))),
        ("gpt_neox", {}, "half", [(0, 2), (1, 3)], list(range(4, 16))),
    ],
)
def test_pairs_of_an_architecture(
    model_type: str, changes: dict[str, Any], layout: str, pairs: list[tuple[int, int]], plain: list[int]
) -> None:
    net = network(model_type, **changes)
    rope = Rope.of(net)
    assert (rope.layout, rope.pairs, rope.plain) == (layout, pairs, plain)
    assert (rope.n_chunks, rope.scaled) == (len(pairs), False)
    # Turning cached keys by 200 positions gives the keys that the network itself computes there.
    torch.testing.assert_close(
        rope.rotate(keys_at(net, [0, 3, 50, 90]), 200), keys_at(net, [200, 203, 250, 290]), atol=2e-4, rtol=1e-4
    )
    moved = rope.rotate(keys_at(net, [0, 3, 50, 90]), torch.tensor([5, -3, 100, 0]))  # each token its own way
    torch.testing.assert_close(moved, keys_at(net, [5, 0, 150, 90]), atol=2e-4, rtol=1e-4)


def test_frequencies_are_powers_of_theta() -> None:
    rope = Rope.of(network("llama", head_dim=32, rope_theta=100_000.0))
    expected = 100_000.0 ** (-2 * torch.arange(16, dtype=torch.float64) / 32)
    torch.testing.assert_close(rope.inv_freq.double(), expected, rtol=1e-6, atol=0)


def test_tiny_frequencies_are_read_exactly() -> None:
    rope = Rope.of(network("llama", head_dim=64, rope_theta=5e7))
    assert rope.inv_freq[-1].item() == pytest.approx(5e7 ** (-62 / 64), rel=1e-6)  # 3.5e-8 rad per position


def test_llama3_scaling_slows_the_low_frequencies_by_its_factor() -> None:
    plain, scaled = Rope.of(network("llama")), Rope.of(network("llama", rope_scaling=LLAMA3))
    ratio = plain.inv_freq / scaled.inv_freq
    wavelength = 2 * torch.pi / plain.inv_freq
    torch.testing.assert_close(ratio[wavelength < 128 / 4.0], torch.ones(2))
    torch.testing.assert_close(ratio[wavelength > 128 / 1.0], torch.full((5,), 8.0))


def test_half_precision_network_keeps_exact_frequencies() -> None:
    exact = Rope.of(network("llama")).inv_freq
    torch.set_default_dtype(torch.bfloat16)
    try:
        net = network("llama")
    finally:
        torch.set_default_dtype(torch.float32)
    assert net.dtype == torch.bfloat16
    assert torch.equal(Rope.of(net).inv_freq, exact)


@pytest.mark.parametrize(("model_type", "changes"), [("gpt2", GPT), ("bloom", {"n_head": 4, "n_layer": 2})])
def test_model_without_rope(model_type: str, changes: dict[str, Any]) -> None:
    rope = Rope.of(network(model_type, **changes))
    assert (rope.layout, rope.pairs, rope.plain) == ("none", [], list(range(16)))
    assert rope.units("single").tolist() == [[i] for i in range(16)]
    keys = torch.randn(2, 5, 16)
    assert torch.equal(rope.rotate(keys, 9), keys)  # what does not rotate is the same anywhere
    assert torch.equal(rope.units("rope"), rope.units("single"))


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gptj", GPT | {"rotary_dim": 8}),  # rotates, but by functions of another kind
        ("smollm3", {"num_hidden_layers": 4}),  # every fourth layer does not rotate
    ],
)
def test_what_is_not_understood_is_refused(model_type: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"position embedding of .* is not understood"):
        Rope.of(network(model_type, **changes))


def mixed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Dimension 0 rotates with 1, and then 1 with 2."""
    rotated = x.clone()
    for i in (0, 1):
        c, s, a, b = cos[..., 0], sin[..., 0], rotated[..., i].clone(), rotated[..., i + 1].clone()
        rotated[..., i], rotated[..., i + 1] = a * c - b * s, a * s + b * c
    return rotated


def mirrored(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Dimension i rotates with d - 1 - i: pairs, but no known layout."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:].flip(-1)
    c, s = cos[..., :half], sin[..., :half]
    return torch.cat([a * c - b * s, (a * s + b * c).flip(-1)], dim=-1)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [(mixed, "rotates with"), (mirrored, "neither halves nor neighbours")],
)
def test_a_rotation_that_is_not_of_pairs_is_refused(monkeypatch: Any, turn: Any, reason: str) -> None:
    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return turn(q, cos, sin), turn(k, cos, sin)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", apply)
    with pytest.raises(UserError, match=reason):
        Rope.of(network("llama"))


def test_rotation_is_additive_and_keeps_scores_between_equal_shifts() -> None:
    rope = Rope.of(network("glm", head_dim=16))
    x, y = torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    torch.testing.assert_close(rope.rotate(rope.rotate(x, 17), 230), rope.rotate(x, 247), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rope.rotate(rope.rotate(x, 31), -31), x, atol=1e-5, rtol=1e-5)
    before, after = x @ y.mT, rope.rotate(x, 40) @ rope.rotate(y, 40).mT
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_length_dependent_frequencies_refuse_to_move_keys() -> None:
    rope = Rope.of(network("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}))
    assert rope.scaled
    with pytest.raises(UserError, match="cannot be moved"):
        rope.rotate(torch.zeros(1, 1, 16), 1)


def test_scores_of_all_chunks_add_up_to_the_full_score() -> None:
    rope = Rope.of(network("llama"))
    q, k = torch.randn(16), torch.randn(16)
    for pairing, size in (("rope", 2), ("adjacent", 2), ("single", 1)):
        units = rope.units(pairing)  # type: ignore[arg-type]
        assert units.shape == (16 // size, size)
        assert sorted(units.flatten().tolist()) == list(range(16))
        torch.testing.assert_close((q[units] * k[units]).sum(), q @ k)
    assert rope.units("adjacent")[1].tolist() == [2, 3]
    assert rope.units("rope")[1].tolist() == [1, 9]


def test_each_dimension_that_does_not_rotate_is_a_unit() -> None:
    rope = Rope.of(network("phi"))
    assert rope.units("rope").tolist() == [[i, i + 4] for i in range(4)] + [[i, -1] for i in range(8, 16)]
    assert rope.units("adjacent").max() == 15


def test_network_is_left_as_it_was() -> None:
    net = network("llama")
    net.set_attn_implementation("sdpa")
    Rope.of(net)
    assert net.config._attn_implementation == "sdpa"
