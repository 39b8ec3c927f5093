"""H2O against a loop written from the formulas, and what each of its switches changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fasa_bench.methods.h2o import H2O
from fasa_bench.methods.h2o_mask_sim import H2OMaskSim
from tests.random_text import HEADS, KV_HEADS, Text


def h2o_by_hand(
    text: Text, prompt: int, budget: int, recent: int, interval: int | None, heads: str, group: str
) -> list[list[list[int]]]:
    """Kept positions of each head after the prompt and after each step."""
    sets = [[0, 1], [2, 3]] if heads == "kv_head" else [[0], [1], [2], [3]]  # query heads that share one set
    held = [list(range(prompt)) for _ in sets]
    score = {head: dict.fromkeys(range(prompt), 0.0) for head in range(HEADS)}
    reduced = {"sum": sum, "max": max, "mean": lambda values: sum(values) / len(values)}[group]

    def evict() -> None:
        for i, members in enumerate(sets):
            newest = held[i][len(held[i]) - (recent - 1) :]
            older = [token for token in held[i] if token not in newest]
            older.sort(key=lambda token: -reduced([score[head][token] for head in members]))
            held[i] = sorted(older[: budget - recent] + newest)

    for head in range(HEADS):
        for query in range(prompt):
            for token, weight in text.weights(head, query, list(range(query + 1))).items():
                score[head][token] += weight
    if prompt >= budget:
        evict()
    history = [list(held)]
    for token in range(prompt, text.tokens):
        for i, members in enumerate(sets):
            held[i] = [*held[i], token]
            for head in members:
                score[head][token] = 0.0
                for read, weight in text.weights(head, token, held[i]).items():
                    score[head][read] += weight
        if interval is not None and len(held[0]) >= budget - 1 + interval:
            evict()
        history.append(list(held))
    return history


@pytest.mark.parametrize(
    ("recent", "interval", "heads", "group"),
    [
        (4, 1, "kv_head", "sum"),
        (4, 1, "kv_head", "max"),
        (4, 1, "query_head", "sum"),
        (1, 1, "kv_head", "mean"),
        (9, 1, "kv_head", "sum"),
        (5, 4, "kv_head", "sum"),
        (5, 3, "query_head", "sum"),
        (4, None, "kv_head", "max"),
    ],
)
@pytest.mark.parametrize("prompt", [3, 9, 16])
def test_h2o_keeps_what_a_loop_keeps(prompt: int, recent: int, interval: int | None, heads: Any, group: Any) -> None:
    text, budget = Text(26), 9
    expected = h2o_by_hand(text, prompt, budget, recent, interval, heads, group)
    method = H2O("h2o", recent=recent, interval=interval, heads=heads, group=group)
    layer = text.prompt(prompt, budget)
    method.prefill(layer, None)
    for step, token in enumerate(range(prompt - 1, text.tokens)):
        if step:
            text.step(method, layer, token)
        positions = layer.positions[0].expand(len(expected[step]), -1).tolist()
        assert positions == expected[step]
        if interval is not None:
            assert layer.length <= budget + interval - 2  # the next step reads at most budget + interval - 1
    assert layer.length == (len(expected[-1][0]))


def test_h2o_mass_of_16_tokens_is_causal() -> None:
    text = Text(16)
    layer = text.prompt(16, 8)
    assert layer.prompt_mass is not None
    for head in range(HEADS):
        rows = [text.weights(head, query, list(range(query + 1))) for query in range(16)]
        column = [sum(row.get(key, 0.0) for row in rows) for key in range(16)]
        assert layer.prompt_mass[0, head].tolist() == pytest.approx(column, rel=1e-5)


def test_h2o_scores_of_evicted_tokens_are_lost() -> None:
    text = Text(20, seed=1)
    method, layer = H2O("h2o"), text.prompt(16, 8)
    method.prefill(layer, None)
    assert layer.state["mass"].shape == (1, HEADS, 7)
    for token in range(16, 20):
        before, weights = layer.state["mass"], {}
        slots = layer.positions[0].clone()
        text.step(method, layer, token)
        for head in range(HEADS):
            weights = text.weights(head, token, [*slots[head // 2].tolist(), token])
            old = dict(zip(slots[head // 2].tolist(), before[0, head].tolist(), strict=True))
            now = [old.get(p, 0.0) + weights[p] for p in layer.positions[0, head // 2].tolist()]
            assert layer.state["mass"][0, head].tolist() == pytest.approx(now, rel=1e-4)


def test_h2o_share_of_recent_tokens_counts_the_current_one() -> None:
    """Budget 8, half recent: 4 heavy hitters, 3 cached recent tokens and the coming one."""
    assert H2O("h2o").recent_of(8) == 4
    text = Text(17)
    layer = text.prompt(16, 8)
    layer.prompt_mass = torch.arange(16.0).flip(0).expand(1, HEADS, 16).clone()
    H2O("h2o").prefill(layer, None)
    assert layer.positions[0].tolist() == [[0, 1, 2, 3, 13, 14, 15]] * KV_HEADS
    layer = text.prompt(16, 8)
    layer.prompt_mass = torch.arange(16.0).flip(0).expand(1, HEADS, 16).clone()
    H2O("h2o", recent=0.25).prefill(layer, None)
    assert layer.positions[0].tolist() == [[0, 1, 2, 3, 4, 5, 15]] * KV_HEADS


def test_h2o_leaves_dense_layers_and_unlimited_runs_alone() -> None:
    text = Text(20)
    for method, budget in ((H2O("h2o", dense_layers=[5]), 8), (H2O("h2o"), None)):
        layer = text.prompt(16, 8)
        layer.budget = budget
        method.prefill(layer, None)
        text.append(layer, 16, 17)
        method.decoded(layer, text.q[None, :, 16:17], torch.ones(1, HEADS, 17) / 17)
        assert layer.length == 17
        assert not layer.state


def mask_sim_by_hand(
    text: Text, prompt: int, heavy: int, recent: int
) -> tuple[list[list[list[int]]], list[list[float]]]:
    """By the official mask arithmetic: positions that each query head may read at each step, and its last scores."""
    score = [[0.0] * prompt for _ in range(HEADS)]
    visible = [list(range(prompt)) for _ in range(HEADS)]
    for head in range(HEADS):
        for query in range(prompt):
            for token, weight in text.weights(head, query, list(range(query + 1))).items():
                score[head][token] += weight
    history = []
    for token in range(prompt, text.tokens + 1):
        for head in range(HEADS):
            visible[head] = list(range(token + 1))
            if token > heavy + recent:
                mask = [0] * (token + 1 - recent) + [1] * recent  # one column more than tokens
                best = sorted(range(token - recent), key=lambda key: -score[head][key])[:heavy]
                for key in best:
                    mask[key] = 1
                visible[head] = [key for key in range(token + 1) if mask[key]]
                alive = {*best, *range(token - recent, token)}
                score[head] = [value if key in alive else 0.0 for key, value in enumerate(score[head])]
        history.append([list(row) for row in visible])
        if token < text.tokens:
            for head in range(HEADS):
                score[head].append(0.0)
                for key, weight in text.weights(head, token, visible[head]).items():
                    score[head][key] += weight
    return history, score


@pytest.mark.parametrize("prompt", [5, 8, 16])
def test_h2o_mask_simulation_equals_the_mask_arithmetic(prompt: int) -> None:
    text, heavy, recent = Text(26), 4, 4
    expected, scores = mask_sim_by_hand(text, prompt, heavy, recent)
    method, layer = H2OMaskSim("h2o", recent=recent + 1, heads="query_head"), text.prompt(prompt, heavy + recent + 1)
    method.prefill(layer, None)
    for step, token in enumerate(range(prompt, text.tokens)):
        read = text.step(method, layer, token).expand(HEADS, -1).tolist()
        assert read == expected[step]
        if token > heavy + recent:
            assert all(token - recent not in row for row in read)  # the token that is off by one
            assert len(read[0]) == heavy + recent
    assert layer.length == text.tokens  # nothing is evicted
    torch.testing.assert_close(layer.state["mass"][0], torch.tensor(scores), rtol=1e-4, atol=1e-6)
    assert method.speed == "simulated"
    assert H2O.speed == "physical"


def test_h2o_mask_simulation_shares_tokens_in_a_kv_head() -> None:
    text = Text(20)
    method, layer = H2OMaskSim("h2o"), text.prompt(16, 8)
    method.prefill(layer, None)
    for token in range(16, 20):
        assert text.step(method, layer, token).shape == (KV_HEADS, 7)
        assert layer.state["mass"].shape == (1, HEADS, token + 1)
