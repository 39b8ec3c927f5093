"""The house rules that a reader relies on: who imports whom, sizes, and a README that works."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

SOURCES = [
    path
    for part in ("src/fasa_bench", "src/fasa_bench/site", "methods", "tasks", "kernels")
    for path in (ROOT / part).glob("*.py")
]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_the_engine_knows_no_method_task_or_kernel() -> None:
    for path in (ROOT / "src" / "fasa_bench").glob("*.py"):
        for name in imports(path):
            assert not re.match(r"fasa_bench\.(methods|tasks|kernels)\.", name), f"{path.name} imports {name}"


def test_kernels_need_torch_and_triton_only() -> None:
    siblings = {path.stem for path in (ROOT / "kernels").glob("*.py")}  # imported relative to each other
    for path in (ROOT / "kernels").glob("*.py"):
        needed = {name.split(".")[0] for name in imports(path)} - siblings - sys.stdlib_module_names
        assert needed <= {"torch", "triton"}, path


def test_reports_never_load_a_model() -> None:
    for name in (
        "report",
        "tables",
        "figures",
        "latency_tables",
        "exhibits",
        "exhibit_tables",
        "derived",
        "experiments",
        *(f"drawings/{path.stem}" for path in (ROOT / "src" / "fasa_bench" / "drawings").glob("*.py")),
        "paper",
        "paper_checks",
        "paper_claims",
        "publish",
    ):
        assert not {"torch", "transformers", "fasa_bench.models"} & imports(ROOT / "src" / "fasa_bench" / f"{name}.py")
    for path in (ROOT / "src" / "fasa_bench" / "site").glob("*.py"):
        assert not {"torch", "transformers", "fasa_bench.models"} & imports(path)


def test_no_device_is_named() -> None:
    """Tensors follow the model's device; "cpu" is the one place where results are kept."""
    for path in SOURCES:
        if path.name == "environment.py":  # reports the version of CUDA
            continue
        assert not re.search(r"""["']cuda|\.cuda\(""", path.read_text()), path


def test_files_stay_small() -> None:
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 500, path
    for path in (ROOT / "methods").glob("*.py"):
        assert len(path.read_text().splitlines()) <= 120, path
    for path in (ROOT / "conf").rglob("*.yaml"):
        if path.name != "config.yaml":
            assert len(path.read_text().splitlines()) <= 15, path


def test_the_architecture_names_every_module_once() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    named = [name for modules, knows in rows for name in re.findall(r"`(\w+)`", modules)]
    package = ROOT / "src" / "fasa_bench"
    assert sorted(named) == sorted(path.stem for path in package.glob("*.py") if path.stem != "__init__")
    for folder in ("site", "drawings"):
        [knows] = [knows for modules, knows in rows if modules == f"`{folder}/`"]
        modules = {path.stem for path in (package / folder).glob("*.py")} - {"__init__"}
        assert modules == set(re.findall(r"`(\w+)`", knows))


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


COMMANDS = [
    line.split("  #")[0].strip() for block in blocks("sh") for line in block.splitlines() if not line.startswith("make")
]


def test_make_targets_of_the_readme_exist() -> None:
    named = {line.split()[1] for block in blocks("sh") for line in block.splitlines() if line.startswith("make")}
    assert {"demo", "test"} <= named
    for target in named:
        subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the README's commands mention: a book, predictions, a method of one's own, LongBench rows."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "book.txt").write_text("It was a long day, and nobody had counted the hours. " * 400)
    (folder / "predictions").mkdir()
    (folder / "predictions" / "qasper.jsonl").write_text(
        '{"pred": "a cat", "answers": ["a cat"], "all_classes": null, "length": 10}\n'
    )
    (python,), (yaml,) = blocks("python"), blocks("yaml")
    for text in (python, yaml):
        path = folder / text.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("qasper", "lcc"):
        row = {"input": "Why?", "context": "Because.", "answers": ["x"], "length": 2, "all_classes": None}
        (folder / f"{name}.jsonl").write_text(json.dumps({**row, "dataset": name}) + "\n")
    (folder / "problems.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
    (folder / "answers.jsonl").write_text('{"pred": "So it is \\\\boxed{2}.", "answer": "2"}\n')
    (folder / "prompts.json").write_text('{"qasper": "{context} {input}", "lcc": "{context}"}')
    return folder


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_readme_runs(line: str, workshop: Path) -> None:
    """As written, but on the random model, so that it takes seconds; hub models are replaced by it."""
    words = shlex.split(line)
    environment = dict(os.environ)
    while re.match(r"\w+=", words[0]):
        key, value = words.pop(0).split("=")
        environment[key] = value
    assert words[0] == "python"
    words[0] = sys.executable
    if words[1] == "run.py":
        words[1] = str(ROOT / "run.py")
        words = [word for word in words if not word.startswith("model=")]
        words += ["model=tiny", "logger=none", "calibration.prefill=128", "calibration.decode=4", "calibration.k=32"]
        experiment = any(word.startswith("+experiment=") for word in words)
        if "task=longbench" in words or experiment:
            words += [
                f"task.data_dir={workshop}",
                f"task.prompts_file={workshop}/prompts.json",
                "task.max_new_tokens=4",
            ]
        if "task=math500" in words:
            words += [f"task.data_file={workshop}/problems.jsonl", "task.max_new_tokens=4"]
        if not any(word.startswith("limit=") for word in words):
            words.append("limit=1")
        if not experiment and not any(word.startswith("task=") for word in words):
            words += ["task.context=300", "task.decode=8", "task.code_tokens=4"]
    done = subprocess.run(words, cwd=workshop, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    if words[1].endswith("run.py"):
        assert re.fullmatch(r"run: \S+/runs/[0-9a-f]+", done.stdout.splitlines()[-1])
    elif "fasa_bench.score" in line:
        assert json.loads(done.stdout)["pass@1" if "math" in line else "qasper"] == 100.0
