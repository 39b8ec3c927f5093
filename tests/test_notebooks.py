"""Every notebook runs from top to bottom; committed ones hold no outputs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def executed(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """What it prints, and how many pictures it draws."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": path.parent}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = sum("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output.get("text", "") for output in outputs), shown


def test_functional_sparsity(monkeypatch: pytest.MonkeyPatch) -> None:
    text, pictures = executed(ROOT / "notebooks" / "functional_sparsity.ipynb", monkeypatch)
    assert pictures == 2
    assert "32 frequency chunks of 64 dimensions" in text
    by_chance, every, best = map(float, re.findall(r"(\d\.\d+)", next(x for x in text.split("\n") if "by chance" in x)))
    assert by_chance < every < best  # the claim of the notebook
    found, top = map(float, re.findall(r"tokens: (\d\.\d+).*: (\d\.\d+)", text)[0])
    assert 0.5 < found <= top
    fasa, newest = map(float, re.findall(r"head's output (\d+\.\d+)", text))
    assert fasa < newest
    full, large, small = map(float, re.findall(r"perplexity +(\d+\.\d+)", text))
    assert abs(large - full) < abs(small - full)


def test_own_method(monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = executed(ROOT / "notebooks" / "own_method.ipynb", monkeypatch)
    assert len(re.findall(r"like_the_newest +budget", text)) == 2
    assert "never above the budget; with room for everything, as full KV" in text


def test_exploring_results(monkeypatch: pytest.MonkeyPatch) -> None:
    text, pictures = executed(ROOT / "notebooks" / "exploring_results.ipynb", monkeypatch)
    assert re.search(r"\d+ runs", text)
    assert pictures == 1


def test_committed_notebooks_hold_no_outputs() -> None:
    assert len(NOTEBOOKS) == 3
    for path in NOTEBOOKS:
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells), path.name
