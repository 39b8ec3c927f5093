"""What a budget and a count mean: tokens or shares, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from fasa_bench.errors import UserError
from fasa_bench.method import check_budget, resolve_budget, resolve_count
from fasa_bench.methods.full import FullKV
from fasa_bench.methods.oracle import Oracle
from fasa_bench.methods.streamingllm import StreamingLLM


def test_a_ratio_is_a_share_of_the_prompt() -> None:
    assert resolve_budget(0.25, 100) == 25
    assert resolve_budget(0.01, 8) == 1  # never an empty cache
    assert resolve_budget(1, 100) == 1  # one token
    assert resolve_budget(1.0, 100) is None  # everything
    assert resolve_budget(None, 100) is None


@pytest.mark.parametrize("budget", [0, -3, 0.0, 1.5, -0.1, "many", None, True])
def test_budgets_that_mean_nothing_are_refused(budget: Any) -> None:
    with pytest.raises(UserError, match=r"budget=.*(in \(0, 1\]|at least)"):
        check_budget(budget, Oracle("oracle"))


def test_a_budget_below_sinks_and_current_token_is_refused() -> None:
    with pytest.raises(UserError, match="needs at least 9 tokens"):
        check_budget(8, StreamingLLM("streamingllm"))
    assert check_budget(9, StreamingLLM("streamingllm")) == 9
    assert check_budget(0, FullKV("fkv")) is None


def test_a_share_or_a_number_becomes_a_count() -> None:
    assert [resolve_count("k", count, 32) for count in (0.25, 8, 32, 0.001, 1.0)] == [8, 8, 32, 1, 32]
    for wrong in (33, 0, 1.5, -1):
        with pytest.raises(UserError, match="from 1 to 32"):
            resolve_count("method.n_tip", wrong, 32)
