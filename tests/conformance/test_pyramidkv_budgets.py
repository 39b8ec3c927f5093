"""Tokens that the official PyramidKV code keeps in each layer (pyramidkv_budgets.json), exactly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fasa_bench.layer_budget import pyramid

FOLDERS = [Path(__file__).parent / "cases", *map(Path, filter(None, [os.environ.get("FASA_BENCH_CASES")]))]
FILES = [folder / "pyramidkv_budgets.json" for folder in FOLDERS]
CASES = {case["id"]: case for file in FILES if file.is_file() for case in json.loads(file.read_text())["cases"]}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_case(case: dict[str, Any]) -> None:
    params = case["params"]
    length = params["q_len"]
    budgets = pyramid(
        params["max_capacity_prompt"],
        params["num_hidden_layers"],
        length=length,
        window=params["window_size"],
        beta=params["beta"],
        rounding="official",
    )
    if case.get("expected_error"):  # one layer, or a budget of the window alone: no pyramid to build
        assert budgets == [params["max_capacity_prompt"]] * params["num_hidden_layers"]
    else:
        assert [min(tokens, length) for tokens in budgets] == case["kept_per_layer"]
