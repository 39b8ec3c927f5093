"""Where the dense pass ends: switches of first token, question and begin token; rows with and without text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from fasa_bench import runner
from fasa_bench.errors import UserError
from fasa_bench.method import Method
from fasa_bench.models import Model, ModelSpec
from fasa_bench.protocol import Protocol
from fasa_bench.store import load_run, run_id
from fasa_bench.task import Example
from tests.conftest import ROOT

SMALL = ["model=tiny", "logger=none", "budget=16", "limit=1"]
SMALL += ["calibration.prefill=128", "calibration.decode=8", "calibration.k=32"]
STDLIB = ["task.context=96", "task.decode=24", "task.code_tokens=8"]
SPARSE, FED = "protocol.first_token=sparse", "protocol.question=decode"
PASSKEY = "task.parts=[passkey]"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(ModelSpec("tiny", max_input=2048, source="random"))


@pytest.fixture
def job(tmp_path: Path, model: Model) -> Iterator[Any]:
    """Compose a job as the command line does; all share one loaded model."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def make(*overrides: str) -> runner.Job:
            task = [] if any(item.startswith("task=") for item in overrides) else STDLIB
            made = runner.Job.of(compose("config", [*SMALL, *task, f"results_dir={tmp_path}", *overrides]))
            made.model = model
            return made

        yield make


def run(job: runner.Job) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    stored = load_run(runner.run(job))
    return stored.summary, stored.rows


# --- which tokens belong to the dense pass


def test_the_prompt_is_split() -> None:
    example = Example("x", [5, 6, 7, 8, 9], context_tokens=2)
    assert Protocol().split(example) == ([5, 6, 7, 8, 9], [])
    assert Protocol(first_token="sparse").split(example) == ([5, 6, 7, 8], [9])
    assert Protocol(question="decode").split(example) == ([5, 6], [7, 8, 9])
    assert Protocol("dense", "decode") == Protocol("sparse", "decode")  # one run, not two
    with pytest.raises(UserError, match=r"protocol\.question='decode' .* x has no mark where its question begins"):
        Protocol(question="decode").split(Example("x", [5, 6]))
    for protocol, bad in (
        (Protocol(first_token="sparse"), Example("x", [5])),
        (Protocol(question="decode"), Example("x", [5, 6], context_tokens=0)),
    ):
        with pytest.raises(UserError, match=r"nothing of x .* is left to prefill"):
            protocol.split(bad)


class Begun:
    name = "m"

    def __init__(self, begin: int | None) -> None:
        self.tokenizer = self
        self.bos_token_id = begin


@pytest.mark.parametrize(
    ("switch", "ids", "expected", "context", "there"),
    [
        ("auto", [1, 5, 6], [1, 5, 6], 2, True),
        ("auto", [5, 6], [5, 6], 2, False),
        ("on", [5, 6], [1, 5, 6], 3, True),
        ("on", [1, 5, 6], [1, 5, 6], 2, True),
        ("off", [1, 5, 6], [5, 6], 1, False),
        ("off", [5, 6], [5, 6], 2, False),
        ("off", [1, 5, 1, 6], [1, 5, 1, 6], 2, True),  # it opens every turn of a chat
    ],
)
def test_begin_token(switch: Any, ids: list[int], expected: list[int], context: int, there: bool) -> None:
    given = Example("x", ids, context_tokens=2, fields={"kept": 1})
    (example,) = Protocol(begin_token=switch).apply([given], Begun(1))  # type: ignore[arg-type]
    assert (example.prompt_ids, example.context_tokens) == (expected, context)
    assert example.fields == {"kept": 1, "begin_token": there}
    assert given.prompt_ids == ids


def test_a_tokenizer_without_begin_token() -> None:
    model: Any = Begun(None)
    (example,) = Protocol(begin_token="off").apply([Example("x", [5])], model)
    assert (example.prompt_ids, example.fields) == ([5], {"begin_token": False})
    with pytest.raises(UserError, match=r"protocol\.begin_token='on' .* m has no begin token"):
        Protocol(begin_token="on").apply([Example("x", [5])], model)


def test_begin_token_of_a_real_tokenizer(job: Any, model: Model) -> None:
    _, (plain,) = run(job("method=fkv", PASSKEY))
    _, (begun,) = run(job("method=fkv", PASSKEY, "protocol.begin_token=on"))
    assert begun["prompt_tokens"] == plain["prompt_tokens"] + 1
    assert (plain["fields"]["begin_token"], begun["fields"]["begin_token"]) == (False, True)
    tokens = next(job(PASSKEY).task.examples(model, 1)).prompt_ids
    ids = ",".join(map(str, [model.tokenizer.bos_token_id, *tokens]))
    assert begun["prompt_ids_sha256"] == hashlib.sha256(ids.encode()).hexdigest()


# --- what the method sees, and what comes out


@pytest.mark.parametrize("method", ["fkv", "fasa", "oracle", "streamingllm", "snapkv", "h2o", "quest"])
def test_with_the_whole_context_all_settings_give_the_same(job: Any, method: str) -> None:
    """A budget that leaves nothing out: where the dense pass ends makes no difference."""
    budget = f"budget={'1.0' if method in ('fasa', 'oracle', 'quest') else 500}"
    dense, fed = (run(job(f"method={method}", budget, PASSKEY, *more)) for more in ([], [FED]))
    sparse = run(job(f"method={method}", budget, PASSKEY, SPARSE))
    assert dense[1][0]["prediction"] == sparse[1][0]["prediction"] == fed[1][0]["prediction"]
    assert (dense[1][0]["prefill_tokens"], sparse[1][0]["prefill_tokens"]) == (96, 95)
    window = ["task.parts=[perplexity]", f"method={method}", budget]
    one, two = (run(job(*window, *more))[1][0]["scores"] for more in ([], [SPARSE]))
    assert one["nll"] == pytest.approx(two["nll"], abs=1e-4)
    assert one["first_nll"] == pytest.approx(two["first_nll"], abs=1e-5)


def test_a_sparse_first_token_is_the_method_s(job: Any) -> None:
    def first(*overrides: str) -> float:
        return run(job("task.parts=[perplexity]", *overrides))[1][0]["scores"]["first_nll"]

    dense = first("method=fkv")
    assert first("method=fkv", SPARSE) == pytest.approx(dense, abs=1e-5)
    assert first("method=oracle", "budget=4") == dense  # the dense pass knows no method
    assert abs(first("method=oracle", "budget=4", SPARSE) - dense) > 1e-3


def test_deviations_and_id_tell(job: Any) -> None:
    plain = job()
    ids = {run_id(job(*more).identity) for more in ([], [SPARSE], [FED], ["protocol.begin_token=on"])}
    assert len(ids) == 4
    assert run_id(job(FED, SPARSE).identity) == run_id(job(FED).identity)
    assert run_id(job("store_text=false").identity) == run_id(plain.identity)  # it changes no output
    assert job(FED).config["protocol"]["first_token"] == "sparse"  # what tables name the run by
    told = job(FED).deviations
    assert {key: told[f"protocol.{key}"]["value"] for key in Protocol.notes} == {
        "first_token": "sparse",
        "question": "decode",
        "begin_token": "auto",
    }


class Watch(Method):
    """Full KV that writes down what it is shown."""

    takes_budget = False

    def prefill(self, layer: Any, query: Any) -> None:
        self.prompts = [*getattr(self, "prompts", []), layer.length]


def test_a_fed_question_is_not_in_the_prompt_of_the_method(job: Any) -> None:
    made = job(PASSKEY, "method=fkv", FED)
    made.method = Watch("watch")
    (example,) = made.protocol.apply(list(made.task.examples(made.model, 1)), made.model)
    tokenizer = made.model.tokenizer
    assert tokenizer.decode(example.prompt_ids[example.context_tokens :]).endswith("Answer: the secret pass key is")
    with runner.Session(made.model.network) as session:
        row = runner.evaluate(session, made, example)
    assert made.method.prompts == [example.context_tokens] * 2  # layers
    assert example.context_tokens is not None
    assert row["prefill_tokens"] == example.context_tokens < row["prompt_tokens"] == 96
    fed = 96 - example.context_tokens
    assert row["layer_steps"] == 2 * (fed + row["generated_tokens"] - 1)  # tokens that were fed, each in two layers
    assert len(row["step_ms"]) == row["generated_tokens"] - 2  # the question is no decode step; the first is warm-up
    assert row["feed_s"] > 0


def test_a_question_of_longbench_is_fed(
    job: Any, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a prompt that was cut."""
    monkeypatch.setattr(model, "max_input", 101)
    row = {"context": "The sky is blue. " * 40, "input": "Which colour?", "answers": ["blue"], "all_classes": None}
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "prompts.json").write_text(json.dumps({"qasper": "Text: {context}\nQ: {input}\nA:"}))
    task = ["task=longbench", "task.datasets=qasper", f"task.data_dir={tmp_path}", "task.max_new_tokens=6"]
    task += [f"task.prompts_file={tmp_path}/prompts.json"]
    (dense,), (fed,), (small,), (other,) = (
        run(job("method=oracle", *task, *more))[1]
        for more in (["budget=1.0"], ["budget=1.0", FED], ["budget=4"], ["budget=4", FED])
    )
    assert dense["prediction"] == fed["prediction"]
    assert dense["prompt_ids_sha256"] == fed["prompt_ids_sha256"] == other["prompt_ids_sha256"]
    assert small["prediction"] != other["prediction"]
    assert fed["prefill_tokens"] < dense["prefill_tokens"] == dense["prompt_tokens"]
    assert dense["prompt_truncated"]
    assert dense["prompt_tokens_before"] > 101


def test_a_share_is_one_of_the_whole_prompt(job: Any) -> None:
    for more in ([], [SPARSE], [FED]):
        assert run(job(PASSKEY, "method=oracle", "budget=0.25", *more))[1][0]["budget_tokens"] == 24


def test_tasks_without_a_question_refuse_to_feed_it(job: Any) -> None:
    with pytest.raises(UserError, match=r"protocol\.question='decode' .*perplexity/0 has no mark"):
        runner.run(job(FED))
    with pytest.raises(UserError, match="a timing has no prompt"):
        runner.run(job("task=latency", "task.contexts=[64]", "task.steps=4", SPARSE))
    with pytest.raises(UserError, match=r"protocol\.first_token='x'.*'dense' or 'sparse'"):
        job("protocol.first_token=x")
    with pytest.raises(UserError, match=r"store_text=1 is not allowed: must be true or false"):
        job("store_text=1")


# --- rows


def test_rows_have_what_is_asked_of_them(job: Any) -> None:
    _, rows = run(job("method=oracle"))
    assert {row["id"].split("/")[0] for row in rows} == {"perplexity", "code", "passkey"}
    for row in rows:
        assert len(row["prompt_ids_sha256"]) == 64
        assert (row["prompt_tokens"], row["prompt_tokens_before"], row["prompt_truncated"]) == (96, 96, False)
        assert row["truncated"] == (row["finish_reason"] == "length")
        assert row["decode_s"] > 0
        assert row["attended_tokens"] == 16
    assert len({row["prompt_ids_sha256"] for row in rows}) == 3


def test_rows_without_text_score_the_same(job: Any, tmp_path: Path) -> None:
    whole, rows = run(job("method=oracle", "limit=2"))
    silent = [f"results_dir={tmp_path}/silent", "store_text=false", "method=oracle", "limit=2"]
    made = job(*silent)
    folder = runner.run(made)
    text = (folder / "predictions.jsonl").read_text()
    for row in rows:
        assert row["fields"].get("answer", "no reference") not in text
    stored = load_run(folder)
    # what is forced has no text to leave out
    assert [row["prediction"] for row in stored.rows] == [None if row["prediction"] else "" for row in rows]
    assert sum(row["prediction"] is None for row in stored.rows) == 4
    assert [row["scores"] for row in stored.rows] == [row["scores"] for row in rows]
    assert stored.summary["metrics"] == whole["metrics"]
    (folder / "predictions.jsonl").write_text("".join(text.splitlines(keepends=True)[:4]))
    assert len(load_run(runner.run(job(*silent))).rows) == 6  # and goes on like any other run
    assert load_run(folder).summary["metrics"] == whole["metrics"]


@pytest.mark.parametrize("kept", [6, 4])  # a complete run, and one to be gone on with
@pytest.mark.parametrize("first", [True, False])
def test_rows_with_and_without_text_do_not_mix_in_silence(
    job: Any, first: bool, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = runner.run(job("method=fkv", "limit=2", f"store_text={first}")) / "predictions.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    before = load_run(path.parent).rows
    assert "were stored" not in caplog.text
    _, rows = run(job("method=fkv", "limit=2", f"store_text={not first}"))
    number = sum(bool(row["prediction"]) == first for row in before if row["prediction"] != "")
    told = "with their texts" if first else "without texts"
    assert f"{number} rows were stored {told} and stay so" in caplog.text
    assert (rows[:kept], len(rows)) == (before, 6)


@pytest.mark.parametrize("first", [True, False])
def test_perplexity_has_no_texts_to_mix(job: Any, first: bool, caplog: pytest.LogCaptureFixture) -> None:
    for text in (first, not first):
        _, rows = run(job("method=fkv", "limit=2", "task.parts=[perplexity]", f"store_text={text}"))
        assert [row["prediction"] for row in rows] == ["", ""]
    assert "were stored" not in caplog.text


DAMAGE = {
    "no scores": lambda row: row.pop("scores"),
    "a score that is missing": lambda row: row["scores"].clear(),
    "no fields": lambda row: row.pop("fields"),
    "fields of another type": lambda row: row.update(fields=3),
    "a time that is missing": lambda row: row.pop("step_ms"),
    "a time that is text": lambda row: row.update(prefill_s="soon"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_rows_count_as_not_there(job: Any, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    whole, rows = run(job("method=fkv", "limit=2"))
    folder = runner.run(job("method=fkv", "limit=2"))
    DAMAGE[damage](rows[3])
    (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "summary.json").unlink()
    again, mended = run(job("method=fkv", "limit=2"))
    assert f"line 4 ({rows[3]['id']}) lacks parts of a row; dropped, its example runs again" in caplog.text
    assert len(mended) == 6
    assert again["metrics"] == whole["metrics"]
