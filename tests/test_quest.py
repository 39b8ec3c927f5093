"""Quest against a loop written from the formulas, and what each of its switches changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fasa_bench.methods.quest import Quest
from tests.random_text import DIM, HEADS, KV_HEADS, Text


def bound(text: Text, head: int, query: int, keys: range) -> float:
    """|q| times the largest sign(q) * k of the page, summed over the dimensions."""
    q, k = text.q[head, query].tolist(), text.k[head // 2].tolist()
    return sum(abs(q[i]) * max(math.copysign(1, q[i]) * k[key][i] for key in keys) for i in range(DIM))


def quest_by_hand(text: Text, token: int, page: int, pages: int, forced: bool, recent: int = 0) -> list[list[int]]:
    """Tokens of the best pages, per query head, and the recent ones."""
    end = token + 1 - recent
    cut = [range(start, min(start + page, end)) for start in range(0, end, page)]
    rows = []
    for head in range(HEADS):
        order = sorted(cut, key=lambda keys: -bound(text, head, token, keys))
        if forced:
            order = [cut[-1], *(keys for keys in order if keys != cut[-1])]
        rows.append(sorted(key for keys in order[:pages] for key in keys) + list(range(end, token + 1)))
    return rows


def compact(rows: Tensor) -> list[list[int]]:
    """Without the places that stand for nothing, which come first."""
    for row in rows.tolist():
        assert row == sorted(row)
    return [[slot for slot in row if slot >= 0] for row in rows.tolist()]


@pytest.mark.parametrize("newest", ["free", "forced"])
@pytest.mark.parametrize("recent", [0, 3])
@pytest.mark.parametrize("prompt", [1, 5, 16, 21])
def test_quest_reads_the_pages_that_a_loop_reads(prompt: int, recent: int, newest: Any) -> None:
    text, budget = Text(40), 13 + recent
    method = Quest("quest", page=4, min_pages=2, newest=newest, recent=recent)
    layer = text.prompt(prompt, budget)
    method.prefill(layer, None)
    for token in range(prompt, 40):
        read = text.step(method, layer, token)
        if token + 1 <= budget:
            assert read.shape[1] == token + 1
            continue
        assert compact(read) == quest_by_hand(text, token, 4, 3, newest == "forced", recent)
        assert layer.state["least"].shape == (1, KV_HEADS, (token + 1 - recent) // 4, DIM)


def test_quest_pages_fill_up_as_if_built_at_once() -> None:
    """Pages that fill while nothing is selected are added at the next selection, whatever their number."""
    text, method = Text(40), Quest("quest", page=4)
    grown = text.prompt(3, 12)
    method.prefill(grown, None)
    assert grown.state["most"].shape[2] == 0
    text.append(grown, 3, 39)
    at_once = text.prompt(39, 12)
    method.prefill(at_once, None)
    query = text.q[None, :, 38:39]
    assert torch.equal(method.page_scores(grown, query), method.page_scores(at_once, query))
    for name in ("least", "most"):
        assert torch.equal(grown.state[name], at_once.state[name])
    torch.testing.assert_close(at_once.state["most"][0, 1, 2], text.k[1, 8:12].amax(0))


def test_quest_reads_at_least_min_pages() -> None:
    text = Text(33)
    for min_pages, expected in ((1, 1), (2, 2), (3, 3), (50, 9)):
        method, layer = Quest("quest", page=4, min_pages=min_pages), text.prompt(33, 4)
        method.prefill(layer, None)
        assert method.select(layer, text.q[None, :, 32:33]).shape[-1] == 4 * expected
        assert method.smallest_budget() == 4 * min_pages
    assert Quest("quest").smallest_budget() == 48


def test_quest_free_pages_can_leave_the_current_token_out() -> None:
    """The newest key is turned away from the query: only `forced` and `recent` read it."""
    text = Text(33)
    text.k[:, 32] = -10 * text.q[::2, 32]
    text.q[1::2, 32] = text.q[::2, 32]
    query = text.q[None, :, 32:33]

    def reads_it(**fields: Any) -> bool:
        method, layer = Quest("quest", page=4, min_pages=1, **fields), text.prompt(33, 9)
        method.prefill(layer, None)
        return bool((method.select(layer, query)[..., -1] == 32).all())

    assert not reads_it()
    assert reads_it(newest="forced")
    assert reads_it(recent=1)
    assert not reads_it(unit="tokens")


@pytest.mark.parametrize("recent", [0, 3])
@pytest.mark.parametrize("budget", [4, 9, 12, 15, 31])
@pytest.mark.parametrize("tokens", [32, 33, 35])
def test_quest_tokens_are_cut_to_the_exact_budget(tokens: int, budget: int, recent: int) -> None:
    """As many pages as could be needed, then their first tokens."""
    text = Text(tokens)
    method = Quest("quest", page=4, unit="tokens", recent=recent)
    layer = text.prompt(tokens, budget + recent)
    if layer.length <= budget + recent:
        return  # the engine would not ask
    method.prefill(layer, None)
    slots = method.select(layer, text.q[None, :, -1:])[0, :, 0]
    pages = math.ceil(budget / 4) + ((tokens - recent) % 4 > 0)
    whole = quest_by_hand(text, tokens - 1, 4, pages, False, recent)
    newest = list(range(tokens - recent, tokens))
    assert slots.tolist() == [row[: len(row) - recent][:budget] + newest for row in whole]
    assert slots.shape == (HEADS, budget + recent)
