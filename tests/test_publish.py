"""Tables, figures and report as artefacts of an offline W&B run, read back from what it wrote."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import wandb
from PIL import Image

from fasa_bench.errors import UserError
from fasa_bench.experiments import load_experiments
from fasa_bench.publish import CELL, FOLDERS, RUN, publish
from fasa_bench.report import main
from fasa_bench.site.build import write_site
from tests.fake_results import METHODS, code, store


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods of Table 2 on the embedded model."""
    root = tmp_path_factory.mktemp("results")
    for one in load_experiments()["table2"].plan("mini", {"method": "fasa_plus"}):
        store(root, "smollm2_135m", "fasa_plus", one.given["budget"], one.config)
    write_site(root)
    (root / "figures").mkdir()
    Image.new("RGB", (2, 2)).save(root / "figures" / "figure6.png")
    return root


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def logged(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"files/media/table/{name}_*.table.json")
    content = json.loads(path.read_text())
    return [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]


def test_all_cells_runs_pictures_and_folders_are_logged(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[str] = []
    add_dir = wandb.Artifact.add_dir

    def spy(artifact: wandb.Artifact, path: str, *rest: Any, **more: Any) -> None:
        added.append(Path(path).name)
        add_dir(artifact, path, *rest, **more)

    monkeypatch.setattr(wandb.Artifact, "add_dir", spy)
    assert publish(results) == f"offline, under {results / 'wandb'}"
    wandb.teardown()
    (folder,) = results.glob("wandb/offline-run-*-report-*")
    cells = logged(folder, "cells")
    assert list(cells[0]) == CELL
    (cell,) = [
        cell
        for cell in cells
        if (cell["exhibit"], cell["profile"], cell["row"], cell["column"]) == ("table2", "mini", "FASA+ (ours)", "NQA")
    ]
    value = code("smollm2_135m", METHODS[-1], "narrativeqa")
    assert (cell["ours"], cell["ci_low"], cell["n"], cell["state"]) == (value, value - 2, 2, "complete")
    absent = [cell for cell in cells if cell["exhibit"] == "table3"]
    assert absent
    assert {(cell["ours"], cell["state"]) for cell in absent} == {(None, "not run")}
    runs = logged(folder, "runs")
    assert list(runs[0]) == RUN
    (run,) = [run for run in runs if run["metric"] == "narrativeqa"]
    assert (run["value"], run["tokens_read"], run["decode_ms"], run["cache_mib"]) == (value, 64, 41.25, 7.0)
    assert len([*folder.glob("files/media/images/figures/*.png")]) == 1
    assert added == [name for name in FOLDERS if (results / name).exists()] == ["figures", "report"]


def test_there_must_be_something_to_publish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wandb", "--results-dir", str(tmp_path)]) == 1
    assert "nothing to publish" in capsys.readouterr().err


def test_a_failure_is_an_error_here(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(wandb, "init", fail)
    with pytest.raises(UserError, match="W&B: OSError: no space"):
        publish(results)
