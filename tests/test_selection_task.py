"""task=selection: a step small enough to see, kinds of tokens, and a whole run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors.torch import load
from torch import Tensor

from fasa_bench import runner
from fasa_bench.cache import KVLayer
from fasa_bench.errors import UserError
from fasa_bench.method import Method
from fasa_bench.models import Model, ModelSpec
from fasa_bench.study import Shadow
from fasa_bench.tasks.selection import Selection, SelectionTask
from fasa_bench.tasks.token_kinds import KINDS, kinds_of
from tests.conftest import ROOT


@dataclass
class TakesTheSame(Method):
    """Slots 0 and 5, whatever the query."""

    padding: ClassVar[bool] = False

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        return torch.tensor([0, 5]).expand(1, 1, 1, 2)


def test_a_step_small_enough_to_see() -> None:
    """Six tokens whose attention is 1/10, 4/10, 1/10, 1/10, 1/10, 2/10: the Oracle takes slots 1 and 5 of two."""
    weights = torch.tensor([1.0, 4, 1, 1, 1, 2]) / 10
    layer = KVLayer(0)
    keys = torch.stack([weights.log(), torch.zeros(6)], dim=-1)[None, None]
    layer.append(keys, keys, torch.arange(6)[None])
    task = SelectionTask(distances=[1, 4], first=1)
    kinds = [KINDS.index(kind) for kind in ("word", "digit", "part", "word", "newline")]  # the last is generated
    recorder = Selection(task, Shadow(TakesTheSame("same"), {0: 2}), kinds)
    recorder.decoded(layer, torch.tensor([1.0, 0])[None, None, None], None)
    numbers, file = recorder.found()
    assert (numbers["mass"], numbers["oracle_mass"], numbers["tokens"]) == (pytest.approx(30), pytest.approx(60), 2)
    places = {name: [round(float(number), 6) for number in found] for name, found in numbers["places"].items()}
    assert places == {  # Oracle's tokens, those of them that are taken, attention on the others, steps
        "all": [2, 1, 0.4, 1],
        "distance=0": [1, 1, 0, 1],
        "distance=4+": [1, 0, 0.4, 1],  # slot 1; slot 0 is the first token
        "kind=digit": [1, 0, 0.4, 1],
        "kind=generated": [1, 1, 0, 1],
        "layer=0": [2, 1, 0.4, 1],
    }
    assert task.bands == ["0", "1-3", "4+", "first"]
    assert load(file)["wanted"].shape == (1, 1, len(task.bands) + len(KINDS))
    rows = [{"id": name, "scores": numbers} for name in "ab"]
    values = {name: sample.metric()["value"] for name, sample in task.samples(rows).items()}
    assert (values["recall"], values["recall/distance=4+"], values["share/kind=digit"]) == (50, 0, 50)
    assert values["lost"] == values["lost/kind=digit"] == pytest.approx(40)


def test_kinds_of_tokens() -> None:
    tokenizer = Model(ModelSpec("tiny", 64, source="random")).tokenizer
    ids = tokenizer("Paris, the 3 unbelievables\n 日", add_special_tokens=False)["input_ids"]
    found = dict(zip((tokenizer.decode([token]) for token in ids), kinds_of(tokenizer, ids), strict=True))
    assert {found[","], found["3"], found[" the"], found["\n"]} == {"punctuation", "digit", "word", "newline"}
    assert [found[","], found["3"], found[" the"], found["\n"]] == ["punctuation", "digit", "word", "newline"]
    assert kinds_of(tokenizer, ids)[0] == "part"  # the text's first word has no blank before it
    assert set(found.values()) <= set(KINDS)
    assert kinds_of(tokenizer, [tokenizer.eos_token_id]) == ["special"]


@pytest.mark.parametrize(("method", "recall"), [("oracle", 100), ("fasa", None)])
def test_a_run_holds_its_method_against_the_oracle(tmp_path: Path, method: str, recall: float | None) -> None:
    settings = ["model=tiny", "logger=none", "task=selection", "task.prefill=160", "task.decode=4", "task.n_samples=1"]
    settings += ["calibration.prefill=128", "calibration.decode=4", "calibration.k=16", f"results_dir={tmp_path}"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        job = runner.Job.of(compose("config", [*settings, f"method={method}", "budget=40"]))
        with pytest.raises(UserError, match="method='fkv'"):
            runner.Job.of(compose("config", [*settings, "method=fkv"]))
    summary = json.loads((runner.run(job) / "summary.json").read_text())
    values = {name: entry["value"] for name, entry in summary["metrics"].items()}
    assert (values["tokens"], summary["method"], summary["budget"]) == (40, job.method.name, 40)
    if recall:
        assert (values["recall"], values["lost"]) == (100, 0)
        assert values["mass"] == values["oracle_mass"]
    else:
        assert 30 < values["recall"] < 95
        assert values["mass"] < values["oracle_mass"]
    for parts in ("distance", "kind"):
        own = {name: value for name, value in values.items() if f"/{parts}=" in name}
        assert sum(value for name, value in own.items() if name.startswith("share")) == pytest.approx(100)
        assert sum(value for name, value in own.items() if name.startswith("lost")) == pytest.approx(values["lost"])
