"""What FASA's paper rejects and what it leaves out, by hand: TIP scores as weights; chunks and tokens by need."""

from __future__ import annotations

import math

import pytest
import torch

from fasa_bench.errors import UserError
from fasa_bench.methods.dominant import Dominant
from fasa_bench.methods.fasa_adaptive import FasaAdaptive, spread
from fasa_bench.methods.fasa_tip import FasaTip
from tests.random_text import DIM, HEADS, KV_HEADS, Text

CHUNKS = [0, 1, 4]  # dimensions that score
AGREEMENT = torch.tensor([[[0.0, 0.1, 0.9, 0.0], [0.30, 0.20, 0.15, 0.25]]])  # two heads, four chunks


def dominant() -> list[Dominant]:
    mask = torch.zeros(HEADS, DIM)
    mask[:, CHUNKS] = 1
    return [Dominant.of(mask, KV_HEADS)] * 6  # the layer of the text is number 5


def predicted(text: Text, head: int, query: int) -> list[float]:
    """The softmax that the chunks alone predict, over all tokens up to the query's."""
    keys = text.k[head // (HEADS // KV_HEADS)]
    scores = [float(text.q[head, query, CHUNKS] @ keys[i, CHUNKS]) * DIM**-0.5 for i in range(query + 1)]
    total = sum(map(math.exp, scores))
    return [math.exp(score) / total for score in scores]


def test_tip_scores_as_weights() -> None:
    text, method = Text(31), FasaTip("fasa_tip", recent=2)
    method._layers = dominant()
    layer = text.prompt(30, 6)
    method.prefill(layer, None)
    text.append(layer, 30, 31)
    found = method.step(layer, text.q[None, :, 30:31])
    assert found is not None
    assert found[1] == 6
    for head in range(HEADS):
        weights = predicted(text, head, 30)
        chosen = {29, 30, *sorted(range(29), key=lambda i: -weights[i])[:4]}
        total = sum(weights[i] for i in chosen)
        output = sum(weights[i] / total * text.v[head // (HEADS // KV_HEADS), i] for i in chosen)
        torch.testing.assert_close(found[0][0, 0, head], output, atol=1e-5, rtol=1e-5)
    with pytest.raises(UserError, match=r"method\.token_granularity"):
        FasaTip("fasa_tip", token_granularity="kv_head")


@pytest.mark.parametrize(
    ("rule", "mean", "expected"),
    [
        # 0.9 and 0.30 in any case, then the next best of both heads
        ("agreement", 2, [[2], [0, 3, 1]]),
        ("agreement", 1, [[2], [0]]),
        # what the better chunks hold: 0 and 90 % in the first head, 0, 33, 61 and 83 % in the second
        ("coverage", 2, [[2], [0, 3, 1]]),
        ("coverage", 3, [[2, 1], [0, 1, 2, 3]]),
    ],
)
def test_chunks_by_need(rule: str, mean: int, expected: list[list[int]]) -> None:
    chosen = spread(AGREEMENT, mean, rule)  # type: ignore[arg-type]
    assert [set(head.nonzero().flatten().tolist()) for head in chosen[0]] == [set(head) for head in expected]


def test_rules_differ_where_one_head_agrees_more_throughout() -> None:
    """The second head's chunks are all better, and evenly so: the largest are hers; half of each curve is even."""
    agreement = torch.tensor([[[0.2, 0.2, 0.19, 0.21], [0.6, 0.59, 0.58, 0.57]]])
    assert spread(agreement, 2, "agreement").sum(-1).tolist() == [[1, 3]]
    assert spread(agreement, 2, "coverage").sum(-1).tolist() == [[2, 2]]


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_tokens_by_predicted_weight(least: float) -> None:
    """Four heads, budget 6: the 24 largest predicted weights of all heads, each head's best few in any case."""
    text, method = Text(31), FasaAdaptive("fasa_adaptive", least=least)
    method._layers = dominant()
    layer = text.prompt(30, 6)
    text.append(layer, 30, 31)
    slots = method.select(layer, text.q[None, :, 30:31])[0, :, 0]
    sure, every = max(1, round(6 * least)), []
    chosen: list[set[int]] = []
    for head in range(HEADS):
        weights = predicted(text, head, 30)
        ranked = sorted(range(31), key=lambda i: -weights[i])
        chosen.append(set(ranked[:sure]))
        every += [(weights[i], head, i) for i in ranked[sure:]]
    for _, head, token in sorted(every, reverse=True)[: HEADS * (6 - sure)]:
        chosen[head].add(token)
    found = [{slot for slot in row if slot >= 0} for row in slots.tolist()]
    assert found == chosen
    assert len({len(one) for one in chosen}) > 1
    assert sum(map(len, found)) == HEADS * 6


def test_what_it_refuses() -> None:
    with pytest.raises(UserError, match=r"method\.least"):
        FasaAdaptive("fasa_adaptive", least=1.5)
