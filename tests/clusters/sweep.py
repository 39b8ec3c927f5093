"""The same small multirun directly and through a launcher: what both leave must be the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fasa_bench.store import Run, find_runs
from tests.conftest import ROOT
from tests.test_sweep import MEASURED

# two groups (shards) of three methods; of the budgets one is too small for two of them
SWEEP = ("method=fkv,fasa_plus,snapkv", "budget=40,3", "shard=1/2,2/2", "limit=1", "model=tiny", "logger=none")
SWEEP += ("task.context=300", "task.decode=8", "task.code_tokens=4")
SWEEP += ("calibration.prefill=128", "calibration.decode=4", "calibration.k=32")
REFUSED = 4  # of the 12 jobs


def check(launcher: list[str], folder: Path, environ: Mapping[str, str] | None = None) -> None:
    """Run SWEEP both ways below `folder` and compare: rows but for times, summaries, stdout, exit status."""
    direct = _multirun([], folder / "direct", {})
    through = _multirun(launcher, folder / "through", environ or {})
    assert direct.returncode == through.returncode == 1, through.stderr
    for done in (direct, through):
        assert f"\n{REFUSED} of " in done.stderr, done.stderr  # 12 jobs, and whole runs of shards
        assert "budget=3 is not allowed: snapkv needs at least 34 tokens" in done.stderr
    outputs = [done.stdout.splitlines() for done in (direct, through)]  # submitit writes warnings there
    named = [{Path(line).name for line in lines if line.startswith("run: ")} for lines in outputs]
    assert named[0] == named[1], through.stderr  # two shards that end at the same time may both name the whole run
    expected, found = (_runs(folder / name) for name in ("direct", "through"))
    assert len(expected) == 9 + REFUSED  # of 3 methods 2 shards and the whole run
    assert found == expected


def _multirun(launcher: list[str], results: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, str(ROOT / "run.py"), "-m", *launcher, *SWEEP, f"results_dir={results}"]
    environ = {**os.environ, **environ}
    return subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environ)


def _runs(results: Path) -> dict[str, Any]:
    def told(run: Run) -> list[Any]:
        rows = [{key: value for key, value in row.items() if key not in MEASURED} for row in run.rows]
        return [sorted(rows, key=lambda row: row["id"]), run.status, run.summary["metrics"], run.summary.get("error")]

    return {run.folder.name: told(run) for run in find_runs(results)}
