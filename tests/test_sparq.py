"""SparQ against a loop written from Algorithm 1, and what each of its switches changes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fasa_bench.attention import attend
from fasa_bench.cache import KVLayer
from fasa_bench.methods.approximation import approximate_logits, mean_value
from fasa_bench.methods.sparq import SparQ
from tests.random_text import DIM, HEADS, KV_HEADS, Text


def sparq_by_hand(text: Text, token: int, budget: int, rank: int, local: int, reallocate: bool) -> Tensor:
    """Attention output [Hq, d] of one step by Algorithm 1, with the group of query heads of the authors' code."""
    tokens = range(token + 1)
    output = torch.zeros(HEADS, DIM)
    for kv in range(KV_HEADS):
        heads = [2 * kv, 2 * kv + 1]
        size = [sum(abs(float(text.q[head, token, i])) for head in heads) for i in range(DIM)]
        chosen = sorted(range(DIM), key=lambda i: -size[i])[:rank]
        approximate = {}
        for head in heads:
            q = text.q[head, token].tolist()
            temperature = math.sqrt(DIM * sum(abs(q[i]) for i in chosen) / sum(map(abs, q)))
            approximate[head] = [sum(q[i] * float(text.k[kv, j, i]) for i in chosen) / temperature for j in tokens]
        newest = list(tokens)[-(local + 1) :]
        others = sorted(
            (j for j in tokens if j not in newest), key=lambda j: -sum(approximate[head][j] for head in heads)
        )
        read = newest + others[: budget - len(newest)]
        for head in heads:
            attention = torch.zeros(DIM)
            for j, weight in text.weights(head, token, read).items():
                attention += weight * text.v[kv, j]
            exponentials = [math.exp(value) for value in approximate[head]]
            alpha = sum(exponentials[j] for j in read) / sum(exponentials) if reallocate else 1.0
            output[head] = alpha * attention + (1 - alpha) * text.v[kv, : token + 1].mean(0)
    return output


@pytest.mark.parametrize("reallocation", [True, False])
@pytest.mark.parametrize("local", [0, 3, 0.25])
@pytest.mark.parametrize("rank", [1, 3, 8, 0.5])
def test_sparq_equals_a_loop(rank: int | float, local: int | float, reallocation: bool) -> None:
    text, budget = Text(24), 9
    method = SparQ("sparq", rank=rank, local=local, reallocation=reallocation)
    layer = text.prompt(6, budget)  # the first steps read everything
    method.prefill(layer, None)
    for token in range(6, 24):
        text.append(layer, token, token + 1)
        query = text.q[None, :, token : token + 1]
        slots = method.select(layer, query) if layer.length > budget else None
        output, weights, _ = attend(layer, query, slots)
        if slots is not None:
            output = method.combine(layer, query, output)
            numbers = {0.5: 4, 0.25: 2}  # of 8 components; of 9 - 1 tokens
            hand = sparq_by_hand(text, token, budget, numbers.get(rank, rank), numbers.get(local, local), reallocation)  # type: ignore[arg-type]
            torch.testing.assert_close(output[0, 0], hand, rtol=1e-4, atol=1e-5)
        method.decoded(layer, query, weights)


def test_sparq_mean_follows_the_tokens_held() -> None:
    text, method = Text(24), SparQ("sparq")
    layer = text.prompt(6, 9)
    method.prefill(layer, None)
    for token in range(6, 24):
        text.append(layer, token, token + 1)
        torch.testing.assert_close(mean_value(layer)[0], text.v[:, : token + 1].mean(1), rtol=1e-5, atol=1e-6)
        method.decoded(layer, text.q[None, :, token : token + 1], text.q)
    assert layer.state["value_sum"].dtype == torch.float32


def test_sparq_keeps_no_mean_where_none_is_needed() -> None:
    text = Text(12)
    for method in (SparQ("sparq", reallocation=False), SparQ("sparq", dense_layers=[5])):
        layer = text.prompt(10, 6)
        method.prefill(layer, None)
        text.append(layer, 10, 11)
        method.decoded(layer, text.q, text.q)
        assert not layer.state


def test_sparq_uses_the_scale_of_the_model() -> None:
    """Where the logits' factor is not d ** -0.5, the approximate logits have to follow it."""
    text = Text(12)
    layer = text.prompt(12, 6)
    layer.scale = 0.3
    query = text.q[None, :, 11:12]
    logits, components = approximate_logits(layer, query, DIM)
    torch.testing.assert_close(logits, layer.dot(query)[:, :, 0] * 0.3)
    assert components.sort().values.tolist() == [[list(range(DIM))] * KV_HEADS]


def test_sparq_half_precision_keeps_its_type() -> None:
    text = Text(12)
    layer = KVLayer(0)
    layer.scale, layer.budget = DIM**-0.5, 6
    layer.append(text.k[None].half(), text.v[None].half(), torch.arange(12)[None])
    method, query = SparQ("sparq"), text.q[None, :, 11:12].half()
    method.prefill(layer, None)
    output, _, _ = attend(layer, query, method.select(layer, query))
    combined = method.combine(layer, query, output)
    assert combined.dtype == torch.float16
    assert not torch.equal(combined, output)
