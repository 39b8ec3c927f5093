"""Shadows choose what the methods choose when they decode themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fasa_bench.attention import attend
from fasa_bench.cache import KVLayer
from fasa_bench.config import build
from fasa_bench.method import Method
from fasa_bench.study import Shadow
from tests.random_text import DIM, HEADS, Text

ROOT = Path(__file__).resolve().parents[1]
PROMPT, STEPS, BUDGET = 60, 12, 20


def method_of(name: str, **changes: object) -> Method:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", [f"method={name}"]).method, resolve=True)
    assert isinstance(config, dict)
    return build("method", {**config, **changes}, Method)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("streamingllm", {}),
        ("snapkv", {"window": 4, "interval": 1}),
        ("snapkv", {"window": 4, "interval": 5, "heads": "query_head"}),
        ("rkv", {"window": 4, "interval": 3}),
        ("h2o", {}),
        ("h2o_mask_sim", {}),
        ("tova", {}),
        ("quest", {"page": 4, "dense_layers": []}),
        ("quest", {"page": 4, "dense_layers": [5]}),  # the layer of the text
        ("sparq", {}),
        ("oracle", {}),
        ("random", {}),
    ],
)
def test_equals_the_method_decoding_by_itself(name: str, changes: dict[str, object]) -> None:
    """The same queries and keys, so that both must read the same tokens at every step, evicting or not."""
    text, method = Text(PROMPT + STEPS), method_of(name, **changes)
    window = method.observes().window
    prompt_queries = text.q[None, :, PROMPT - window : PROMPT] if window else None
    alone = text.prompt(PROMPT, BUDGET)
    method.prefill(alone, prompt_queries)
    whole = text.prompt(PROMPT, BUDGET)
    whole.budget = None
    shadow = Shadow(method, dict.fromkeys(range(6), BUDGET))
    shadow.prefill(whole, text.q[None, :, :PROMPT])
    for token in range(PROMPT, PROMPT + STEPS):
        text.append(whole, token, token + 1)
        assert torch.equal(shadow.step(whole, text.q[None, :, token : token + 1]), own_step(text, method, alone, token))
    assert whole.length == PROMPT + STEPS  # the cache itself is as it was


def own_step(text: Text, method: Method, layer: KVLayer, token: int) -> torch.Tensor:
    """A step as the engine takes it; the positions that each query head read, [Hq, token + 1] bool."""
    text.append(layer, token, token + 1)
    query, positions, slots = text.q[None, :, token : token + 1], layer.positions[0].clone(), None
    if layer.length > BUDGET and layer.index not in method.dense_layers:
        slots = method.select(layer, query)
    method.decoded(layer, query, attend(layer, query, slots, method.ragged)[1])
    read = torch.zeros(HEADS, token + 1, dtype=torch.bool)
    for head in range(HEADS):
        held = positions[head * len(positions) // HEADS].tolist()
        chosen = range(len(held)) if slots is None else slots[0, head * slots.shape[1] // HEADS, 0].tolist()
        read[head, [held[slot] for slot in chosen if slot >= 0]] = True
    return read


def test_what_is_not_chosen_is_not_read() -> None:
    text, method = Text(41), method_of("oracle")
    whole = text.prompt(40, 8)
    whole.scale = DIM**-0.5
    shadow = Shadow(method, dict.fromkeys(range(6), 8))
    shadow.prefill(whole, None)
    text.append(whole, 40, 41)
    read = shadow.step(whole, text.q[None, :, 40:41])
    for head in range(HEADS):
        logits = [text.logit(head, 40, key) for key in range(41)]
        assert set(read[head].nonzero().flatten().tolist()) == set(sorted(range(41), key=lambda key: -logits[key])[:8])
