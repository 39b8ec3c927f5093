"""task=calibration: planted chunks, compound agreement against sets, texts, and files that are whole or not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from safetensors import safe_open
from safetensors.torch import load, load_file

from fasa_bench import runner
from fasa_bench.errors import UserError
from fasa_bench.method import Observation
from fasa_bench.study import Shadow
from fasa_bench.tasks.calibration import AgreementOf, CalibrationTask
from tests.conftest import ROOT
from tests.random_text import DIM, HEADS, KV_HEADS, Text
from tests.test_study import method_of

SMALL = ["logger=none", "task=calibration", "task.prefill=160", "task.decode=5", "task.k=24"]
SMALL += ["task.n_samples=2", "task.budgets=[40]", "task.n_tips=[2]"]
SMALL += ["calibration.prefill=128", "calibration.decode=4", "calibration.k=16"]


class FourChunks:
    layers = ()

    @staticmethod
    def units(pairing: str) -> torch.Tensor:
        return torch.arange(DIM).reshape(2, -1).T


class Eight:
    """What a task wants of a model whose heads have four chunks of two dimensions."""

    name, fingerprint, rope = "eight", "0", FourChunks()


def test_shares_and_bands_of_planted_agreement() -> None:
    """One layer, one head, four chunks; three steps, K = 4 in two bands. CA 1, 0.5, 0.25 and 0."""
    task = CalibrationTask(k=4, band_ends=[0.5, 1.0], budgets=[], prefill=8)
    recorder = AgreementOf(task, Eight, {}, Observation())  # type: ignore[arg-type]
    tokens = torch.tensor([[2, 2], [2, 0], [1, 0], [0, 0]], dtype=torch.float64)
    recorder.agreement._found[0], recorder.agreement.steps[0] = 3 * tokens[None], 3
    numbers, _ = recorder.found()
    assert (numbers["dominant"], numbers["non_dominant"]) == (50, 25)  # above 0.4: 1 and 0.5
    chunks = {name.removeprefix("predictive_accuracy/"): value for name, value in numbers.items() if "accuracy" in name}
    assert chunks == {
        "chunks=dominant/band=0-50": 100,
        "chunks=dominant/band=50-100": 50,
        "chunks=non_dominant/band=0-50": 0,
        "chunks=non_dominant/band=50-100": 0,
    }
    task.band_most = 1
    assert recorder.found()[0]["predictive_accuracy/chunks=dominant/band=50-100"] == 100
    task.band_skip_layers = [0]
    assert recorder.found()[0]["predictive_accuracy/chunks=dominant/band=50-100"] is None
    task.band_ends = [2, 4]  # ranks, as the authors' code has them
    assert "predictive_accuracy/chunks=dominant/band=2-4" in recorder.found()[0]


def test_compound_agreement_against_sets() -> None:
    """Sinks and newest tokens against the head's own best, with Python's sets."""
    text, steps, budget = Text(50), 4, 12
    task = CalibrationTask(k=5, budgets=[budget], prefill=46)
    method = method_of("streamingllm", start=2)
    name = "compound_ca/method=streamingllm/budget=12"
    shadows = {(name, budget): Shadow(method, dict.fromkeys(range(6), budget))}
    recorder = AgreementOf(task, Eight, shadows, Observation())  # type: ignore[arg-type]
    layer = text.prompt(50 - steps, budget)
    layer.budget = None
    recorder.prefill(layer, None)
    shares = []
    for token in range(50 - steps, 50):
        text.append(layer, token, token + 1)
        recorder.decoded(layer, text.q[None, :, token : token + 1], None)
        kept = {0, 1, *range(token - budget + 3, token + 1)}
        for head in range(HEADS):
            best = sorted(range(token + 1), key=lambda key: -text.logit(head, token, key))[:budget]
            shares.append(len(kept & set(best)) / budget)
    recorder.agreement._found = {0: recorder.agreement._found[5]}
    recorder.agreement.steps = {0: recorder.agreement.steps[5]}
    assert recorder.found()[0][name] == pytest.approx(100 * sum(shares) / len(shares), rel=1e-6)
    assert len(shares) == steps * HEADS
    assert HEADS > KV_HEADS


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., runner.Job]]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def job(*overrides: str) -> runner.Job:
            settings = [] if "task=stdlib" in overrides else SMALL
            return runner.Job.of(compose("config", ["model=tiny", *settings, f"results_dir={tmp_path}", *overrides]))

        yield job


def rows_of(folder: Path) -> dict[str, Any]:
    rows = map(json.loads, (folder / "predictions.jsonl").read_text().splitlines())
    return {row["id"]: row for row in rows}


def test_the_files_of_a_run_are_whole_or_their_examples_run_again(
    make: Callable[..., runner.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = runner.run(make())
    before = rows_of(folder)
    assert list(before) == ["docs/0", "docs/1"]
    assert before["docs/0"]["step_ms"] == []
    summary = json.loads((folder / "summary.json").read_text())
    names = set(summary["metrics"])
    assert {f"compound_ca/method={name}/budget=40" for name in ("random", "streamingllm", "snapkv")} < names
    assert "compound_ca/method=fasa/n_tip=2/budget=40" in names
    assert summary["method"] == "fkv"
    file = folder / "agreement" / "docs" / "1.safetensors"
    whole = file.read_bytes()
    computed = []
    evaluate = runner.evaluate

    def count(session: Any, job: Any, example: Any, prompts: Any) -> Any:
        computed.append(example.id)
        return evaluate(session, job, example, prompts)

    monkeypatch.setattr(runner, "evaluate", count)
    runner.run(make())
    assert computed == []
    file.write_bytes(whole[:-7])  # as a copy that broke off
    runner.run(make())
    assert computed == ["docs/1"]
    file.unlink()
    runner.run(make())
    assert computed == ["docs/1"] * 2
    assert all(torch.equal(tensor, load(whole)[name]) for name, tensor in load_file(file).items())
    assert {key: row["scores"] for key, row in rows_of(folder).items()} == {k: r["scores"] for k, r in before.items()}
    assert json.loads((folder / "summary.json").read_text())["metrics"] == summary["metrics"]


def test_an_agreement_file_calibrates_a_method(make: Callable[..., runner.Job]) -> None:
    job = make("task.n_samples=1", "task.methods={}")
    folder = runner.run(job)
    file = folder / "agreement" / "docs" / "0.safetensors"
    tensors = load_file(file)
    assert tensors["agreement"].shape == (2, 4, 8)
    assert tensors["by_band"].shape == (2, 4, 8, 5)
    with safe_open(file, framework="pt") as stored:
        facts = stored.metadata()
    assert (facts["k"], facts["steps"], facts["pairing"]) == ("24", "5", "rope")
    sizes = torch.tensor([5, 5, 4, 5, 5])  # ends 5, 10, 14, 19, 24
    torch.testing.assert_close((tensors["by_band"] * sizes).sum(-1) / 24, tensors["agreement"])
    other = make("task=stdlib", "method=fasa", f"calibration.file={file}")
    other.prepare()  # refused if it did not fit
    assert torch.equal(other.calibration.agreement(other.model, "rope"), tensors["agreement"])


def test_shards_bring_their_files(make: Callable[..., runner.Job]) -> None:
    runner.run(make("shard=1/2"))
    runner.run(make("shard=2/2"))
    whole = make().results_dir / "runs" / make().run_id
    assert len(list(whole.glob("agreement/docs/*.safetensors"))) == 2
    assert json.loads((whole / "summary.json").read_text())["status"] == "complete"


def test_what_it_refuses(make: Callable[..., runner.Job], tmp_path: Path) -> None:
    for override, key in {
        "method=oracle": "method",
        "task.k=165": "task.k",
        "task.sources=[nowhere]": "task.sources",
        "task.band_ends=[0.5]": "task.band_ends",
        "cache.bits=4": "cache.bits",
        "task.sources=[math500]": "task.queries",
        "protocol.first_token=sparse": "protocol.first_token",
        "task.methods.snapkv.window=0": "task.methods.snapkv.window|method.window",
    }.items():
        with pytest.raises(UserError, match=key):
            make(override)
    (tmp_path / "short.txt").write_text("Nothing much. ")
    with pytest.raises(UserError, match=r"task\.sources"):
        list(make(f"task.sources=[{tmp_path / 'short.txt'}]").task.examples(make().model, None))


def test_where_texts_come_from(make: Callable[..., runner.Job], tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("It was a long day, and nobody had counted the hours. " * 100)
    job = make(f"task.sources=[docs,stdlib,{tmp_path / 'book.txt'}]")
    examples = {example.id: example for example in job.task.examples(job.model, None)}
    assert list(examples) == [f"{name}/{i}" for name in ("docs", "stdlib", "book") for i in (0, 1)]
    assert {(len(e.prompt_ids), len(e.target_ids or [])) for e in examples.values()} == {(160, 6)}
    ids = job.calibration._ids(job.model, 133)  # the sample that n_tip is chosen by: no text is part of it
    assert ids[:20] != examples["docs/0"].prompt_ids[:20]
    assert examples["stdlib/1"].fields["document"] == "calendar/0"
    first, second = (job.model.tokenizer.decode(examples[f"docs/{i}"].prompt_ids) for i in (0, 1))
    from fasa_bench.texts import calibration_text

    assert calibration_text().index(first[50:200]) > calibration_text().index(second[50:200])  # from its end
    assert [e.id for e in job.task.examples(job.model, 1)] == ["docs/0", "stdlib/0", "book/0"]
    moved = tmp_path / "elsewhere" / "book.txt"
    moved.parent.mkdir()
    moved.write_bytes((tmp_path / "book.txt").read_bytes())
    same = make(f"task.sources=[docs,stdlib,{moved}]")
    assert same.run_id == job.run_id  # where a file lies is no part of a run
    assert make("task.methods.snapkv.window=16").run_id != make().run_id


def test_prompts_of_benchmarks(make: Callable[..., runner.Job], shared_data: Path) -> None:
    """Their middle is cut; forced takes the prompt's last tokens, generated what the model says."""
    places = [f"task.data_dir={shared_data}/longbench", f"task.data_file={shared_data}/math500.jsonl"]
    places += [f"task.prompts_file={shared_data}/longbench_config/dataset2prompt.json", "task.n_samples=1"]
    job = make("task.sources=[qasper]", *places)
    (forced,) = job.task.examples(job.model, None)
    assert (len(forced.prompt_ids), len(forced.target_ids or [])) == (160, 6)
    assert forced.fields["truncated"]
    job = make("task.sources=[qasper,math500]", "task.queries=generated", *places)
    generated, question = job.task.examples(job.model, None)
    assert generated.prompt_ids[:80] == forced.prompt_ids[:80]
    assert generated.prompt_ids[-6:] == forced.target_ids
    assert generated.max_new_tokens == generated.min_new_tokens == 6
    assert question.prompt_ids
    folder = runner.run(make("task.sources=[qasper]", "task.queries=generated", "task.methods={}", *places))
    (row,) = rows_of(folder).values()
    assert row["generated_tokens"] == 6
    assert row["scores"]["non_dominant"] is not None
