"""Which layers Quest's official evaluation leaves dense: a deviation of ours, which counts layers from the first one.

It numbers the layers from the last to the first, down from 32, and leaves those dense whose number is below 2.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from tests.conftest import ROOT

FOLDERS = [Path(__file__).parent / "cases", *map(Path, filter(None, [os.environ.get("FASA_BENCH_CASES")]))]
CASES: dict[int, dict[str, Any]] = {
    case["num_layers"]: case
    for folder in FOLDERS
    for path in folder.glob("quest_layer_ids.json")
    for case in json.loads(path.read_text())["cases"]
}


def official_layer_ids(layers: int) -> list[int]:
    return list(range(32 - layers, 32))


def official_dense_layers(layers: int) -> list[int]:
    return [layer for layer, number in enumerate(official_layer_ids(layers)) if number < 2]


@pytest.mark.parametrize("layers", sorted(CASES))
def test_layers_left_dense_by_the_official_counter(layers: int) -> None:
    assert official_layer_ids(layers) == CASES[layers]["assigned_layer_id"]
    assert official_dense_layers(layers) == CASES[layers]["layers_with_full_attention"]


def test_ours_are_those_of_a_model_of_32_layers() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        ours = list(compose("config", ["method=quest"]).method.dense_layers)
    assert ours == official_dense_layers(32) == [0, 1]
    assert official_dense_layers(28) == []
    assert official_dense_layers(36) == list(range(6))
