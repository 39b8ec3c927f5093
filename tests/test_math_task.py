"""MATH500 and AIME24: the problems, the prompt, how answers are drawn, and what a run and its numbers hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hydra import compose, initialize_config_dir

from fasa_bench import runner
from fasa_bench.errors import UserError
from fasa_bench.models import Model, ModelSpec
from fasa_bench.score import main
from fasa_bench.task import Example, Prediction
from fasa_bench.tasks.math import TOP_K, Aime24, Math500, MathTask
from fasa_bench.tasks.math_data import content_hash, read
from tests.conftest import ROOT

PROBLEMS = [
    {"problem": "What is $1+1$?", "answer": "2", "unique_id": "a", "subject": "Algebra", "level": 1},
    {"problem": "Half of $1$?", "answer": r"\frac{1}{2}", "unique_id": "b", "subject": "Algebra", "level": 2},
    {"problem": "The set of {0} and 1?", "answer": r"\{0,1\}", "unique_id": "c", "subject": "Algebra", "level": 3},
]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(ModelSpec("tiny", max_input=2048, source="random"))


@pytest.fixture
def problems(tmp_path: Path) -> str:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS), encoding="utf-8")
    return str(path)


def task(problems: str, **parameters: Any) -> Math500:
    return Math500(**{"data_file": problems, "max_new_tokens": 8} | parameters)


def predicted(*answers: str, cut: int = 0) -> Prediction:
    """The last `cut` of the answers were cut; each has as many tokens as characters."""
    samples = [
        Prediction([0] * len(text), text, "length" if place >= len(answers) - cut else "stop")
        for place, text in enumerate(answers)
    ]
    return Prediction(samples[0].token_ids, samples[0].text, samples[0].finish_reason, samples=samples)


def test_prompt_is_the_chat_form_of_the_problem(model: Model, problems: str) -> None:
    first, _, third = task(problems).examples(model, None)
    text = model.tokenizer.decode(first.prompt_ids)
    assert text == model.chat(
        "What is $1+1$?\n\nWork the problem out step by step. Close with a line of this form, the result inside the "
        "box:\nFinal answer: \\boxed{}"
    )
    assert "The set of {0} and 1?" in model.tokenizer.decode(third.prompt_ids)
    (plain, *_) = task(problems, chat_template="off", prompt="Q: {problem} A:").examples(model, 1)
    assert model.tokenizer.decode(plain.prompt_ids) == "Q: What is $1+1$? A:"
    assert first.fields["unique_id"] == "a"
    assert [e.id for e in task(problems).examples(model, 2)] == ["math500/0", "math500/1"]  # the first `limit`


def test_lengths_count_the_prompt(model: Model, problems: str) -> None:
    for example in task(problems, max_length=500, max_new_tokens=None).examples(model, None):
        assert len(example.prompt_ids) + example.max_new_tokens == 500
    assert next(task(problems).examples(model, 1)).max_new_tokens == 8
    with pytest.raises(UserError, match=r"task\.max_length=20 .*prompt alone has"):
        list(task(problems, max_length=20, max_new_tokens=None).examples(model, None))
    with pytest.raises(UserError, match=r"task\.max_length=16384 .*4096 positions"):
        list(task(problems, max_new_tokens=None).examples(model, None))
    assert (Math500().max_length, Math500().n) == (16384, 1)
    assert (Aime24().max_length, Aime24().n) == (32768, 16)


def test_seeds_belong_to_problem_and_number(model: Model, problems: str) -> None:
    def seeds(**parameters: Any) -> list[list[int]]:
        examples = task(problems, **parameters).examples(model, None)
        return [example.sampling.seeds for example in examples if example.sampling]

    four = seeds(n=4)
    assert [row[:1] for row in four] == seeds(n=1)
    assert len({seed for row in four for seed in row}) == 12
    assert not {seed for row in four for seed in row} & {seed for row in seeds(n=4, seed=1) for seed in row}


@pytest.mark.parametrize(
    ("checkpoint", "parameters", "expected"),
    [
        ({}, {}, (0.6, 1.0, TOP_K)),
        ({"do_sample": True, "temperature": 0.9, "top_p": 0.95}, {}, (0.6, 0.95, TOP_K)),
        ({"do_sample": True, "temperature": 0.9, "top_k": 20}, {"temperature": None, "top_p": 0.5}, (0.9, 0.5, 20)),
        ({"do_sample": True}, {"temperature": None, "top_k": 0}, (1.0, 1.0, 0)),
        ({"do_sample": False}, {}, (0.0, 1.0, TOP_K)),
        ({"do_sample": False}, {"do_sample": True}, (0.6, 1.0, TOP_K)),
        ({"do_sample": True}, {"do_sample": False}, (0.0, 1.0, TOP_K)),
    ],
)
def test_what_is_not_set_comes_from_the_checkpoint(
    problems: str, checkpoint: dict[str, Any], parameters: dict[str, Any], expected: tuple[float, float, int]
) -> None:
    model = Model(ModelSpec("tiny", max_input=2048, source="random"))
    model.__dict__["sampling_defaults"] = checkpoint
    made = task(problems, n=2, **parameters)
    sampling = next(made.examples(model, 1)).sampling
    assert sampling is not None
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected
    assert any("greedy" in warning for warning in made.warnings) == (expected[0] == 0)


def test_the_generation_config_is_read_and_part_of_the_identity(tmp_path: Path) -> None:
    def model(text: str | None) -> Model:
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        if text is not None:
            (tmp_path / "generation_config.json").write_text(text)
        (tmp_path / "model.safetensors").write_bytes(b"")
        return Model(ModelSpec("x", max_input=10, source="local", path=str(tmp_path)))

    assert model(None).sampling_defaults == {}
    given = model('{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": null, "eos_token_id": 3}')
    assert given.sampling_defaults == {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    silent, other = (Model(ModelSpec("tiny", max_input=2048, source="random")) for _ in range(2))
    other.__dict__["sampling_defaults"] = given.sampling_defaults
    assert silent.identity() != other.identity()


def test_scores_are_per_answer(model: Model, problems: str) -> None:
    made = task(problems, n=4)
    half = list(made.examples(model, None))[1]
    scores = made.score(half, predicted(r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{2}", "0.5", cut=1))
    assert scores == {
        "score": 0.5,
        "correct": [1, 1, 0, 0],
        "truncated": [0, 0, 0, 1],
        "box": ["0.5", r"\frac12", "2", None],
        "prefill_tokens": len(half.prompt_ids),
        "decode_tokens": [11, 15, 9, 3],
    }


def test_numbers_are_means_over_problems() -> None:
    def row(correct: list[int], truncated: list[int], prefill: int, decode: list[int]) -> dict[str, Any]:
        scores = {"correct": correct, "truncated": truncated, "prefill_tokens": prefill, "decode_tokens": decode}
        return {"id": str(prefill), "fields": {}, "scores": scores}

    rows = [
        row([1, 1, 0, 0], [0, 0, 0, 1], 10, [4, 8, 4, 8]),
        row([0, 0, 0, 0], [1, 1, 1, 1], 20, [10] * 4),
        row([1, 1, 1, 1], [0, 0, 0, 0], 30, [2] * 4),
    ]
    found = Math500(n=4).metrics(rows)
    assert {name: metric["value"] for name, metric in found.items()} == pytest.approx(
        {
            "pass@1": 50.0,
            "pass@4": 200 / 3,
            "truncated": 125 / 3,
            "tokens/prefill": 20.0,
            "tokens/decode": 6.0,
            "tokens/total": 26.0,
        }
    )
    assert {metric["n"] for metric in found.values()} == {3}  # problems, not the 12 answers
    assert found["pass@1"]["ci_low"] == 0
    assert list(Math500(n=1).metrics(rows)) == [
        "pass@1",
        "truncated",
        "tokens/prefill",
        "tokens/decode",
        "tokens/total",
    ]
    # 8 answers where 16 were asked for: half right is 50, not 25
    eight = [row([1] * 4 + [0] * 4, [0] * 8, 1, [1] * 8)]
    assert Aime24().metrics(eight)["pass@1"]["value"] == 50
    assert Aime24().metrics(eight)["pass@16"]["value"] == 100


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"n": 0}, r"task\.n=0"),
        ({"max_length": 0}, r"task\.max_length=0"),
        ({"max_new_tokens": 0}, r"task\.max_new_tokens=0"),
        ({"temperature": -0.1}, r"task\.temperature=-0\.1"),
        ({"top_p": 0.0}, r"task\.top_p=0"),
        ({"top_p": 1.1}, r"task\.top_p=1\.1"),
        ({"top_k": -1}, r"task\.top_k=-1"),
        ({"prompt": "Solve it"}, r"task\.prompt='Solve it'.*\{problem\}"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Math500(**parameters)


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        (Math500, "{", "line 1: not JSON"),
        (Math500, "[]", "line 1: must be a JSON object"),
        (Math500, "", "has no rows"),
        (Math500, '{"problem": "x"}', 'row 1: "answer" must be a text'),
        (Math500, '{"problem": "", "answer": "1"}', 'row 1: "problem" must be a text'),
        (Aime24, '{"problem": "x", "answer": "1000"}', "whole number from 0 to 999"),
        (Aime24, '{"problem": "x", "answer": "1.5"}', "whole number from 0 to 999"),
    ],
)
def test_bad_files(kind: type[MathTask], content: str, message: str, tmp_path: Path, model: Model) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        list(kind(data_file=str(path), max_new_tokens=4).examples(model, None))


def test_missing_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.data_file='.*gone.jsonl'.*no such file"):
        Math500(data_file=str(tmp_path / "gone.jsonl")).fingerprint()

    def offline(*args: Any, **kwargs: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(UserError, match=r"test\.jsonl of .*MATH-500 could not be had .*no network.*task\.data_file"):
        Math500().fingerprint()


def test_the_hubs_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Model) -> None:
    """AIME24's is parquet, here with upper-case names and whole numbers, as some copies have."""
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    path = tmp_path / "x.parquet"
    pd.DataFrame({"ID": [60], "Problem": ["How many?"], "Answer": [25]}).to_parquet(path)
    asked = []

    def download(repo: str, file: str, repo_type: str) -> str:
        asked.append((repo, file, repo_type))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    made = Aime24(max_new_tokens=4)
    (example,) = made.examples(model, None)
    assert asked == [("HuggingFaceH4/aime_2024", "data/train-00000-of-00001.parquet", "dataset")]
    assert (example.fields["answer"], example.fields["id"]) == ("25", 60)
    assert example.sampling is not None
    assert len(example.sampling.seeds) == 16
    assert made.warnings == ["1 problems instead of 30: scores do not compare with others'"]
    assert made.score(example, predicted(r"\boxed{025}", r"\boxed{25}", r"\boxed{1025}"))["correct"] == [1, 1, 0]


def test_the_pinned_problems(shared_data: Path, model: Model, tmp_path: Path) -> None:
    for kind, file, count in ((Math500, "math500.jsonl", 500), (Aime24, "aime24.jsonl", 30)):
        made = kind(data_file=str(shared_data / file), max_new_tokens=4)
        examples = list(made.examples(model, None))
        assert len(examples) == count
        assert made.warnings == []
        wrong = [json.loads(line) for line in (shared_data / file).read_text(encoding="utf-8").splitlines()]
        wrong[3]["answer"] = "1"
        path = tmp_path / file
        path.write_text("\n".join(json.dumps(row) for row in wrong))
        made = kind(data_file=str(path), max_new_tokens=4)
        assert [e.prompt_ids for e in made.examples(model, None)] == [e.prompt_ids for e in examples]
        assert len(made.warnings) == 1
        assert "pinned copy" in made.warnings[0]
    assert content_hash(read(path)) != Aime24.source.sha256


# --- a whole run ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, problems: str) -> Iterator[Any]:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def start(*overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
            settings = ["model=tiny", "logger=none", "budget=32", "calibration.prefill=128", "calibration.decode=8"]
            settings += ["calibration.k=32", "task=math500", f"task.data_file={problems}", "task.max_new_tokens=10"]
            folder = runner.run(runner.Job.of(compose("config", [*settings, f"results_dir={tmp_path}", *overrides])))
            rows = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
            return json.loads((folder / "summary.json").read_text()), rows

        yield start


@pytest.mark.parametrize("method", ["fkv", "fasa_c", "streamingllm"])
def test_a_run_of_four_equals_runs_of_one(run: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    four, rows = run(f"method={method}", "limit=2", "task.n=4")
    one, firsts = run(f"method={method}", "limit=2", "task.n=1")
    assert [row["prediction"][0] for row in rows] == [row["prediction"][0] for row in firsts]
    assert four["status"] == one["status"] == "complete"
    assert (len(rows), four["examples"]) == (2, 2)
    assert set(four["metrics"]) == {"pass@1", "pass@4", "truncated", "tokens/prefill", "tokens/decode", "tokens/total"}
    for row in rows:
        assert len(set(row["prediction"])) == 4  # other number, other text
        assert row["truncated"] == [reason == "length" for reason in row["finish_reason"]]
        assert row["generated_tokens"] == row["scores"]["decode_tokens"]
        assert len(row["step_ms"]) == max(row["generated_tokens"]) - 2  # the first token is the prompt's, then warm-up
        assert len(row["scores"]["correct"]) == 4
    assert four["metrics"]["truncated"]["value"] > 0
    if method != "fkv":
        assert four["realised"]["sparse_steps"] > 0
        assert four["realised"]["attended_tokens"] == 32
    monkeypatch.setattr(runner, "evaluate", None)
    again, same = run(f"method={method}", "limit=2", "task.n=4")
    assert (again, same) == (four, rows)


def test_the_same_seed_is_the_same_text(run: Any, tmp_path: Path) -> None:
    """In a run of its own, with another limit, and for every number of an answer."""
    first = run("method=oracle", "limit=2", "task.n=3")[1]
    again = run("method=oracle", "limit=1", "task.n=3", f"results_dir={tmp_path}/again")[1]
    assert [row["prediction"] for row in again] == [row["prediction"] for row in first[:1]]
    five = run("method=oracle", "limit=1", "task.n=5")[1]
    assert five[0]["prediction"][:3] == first[0]["prediction"]


def test_answers_whose_first_token_is_the_method_s(run: Any) -> None:
    """Each answer of the batch is fed the last token of the prompt."""
    dense, sparse = (
        run("method=fkv", "limit=1", "task.n=3", *more)[1][0] for more in ([], ["protocol.first_token=sparse"])
    )
    assert sparse["prediction"] == dense["prediction"]
    assert sparse["prefill_tokens"] == dense["prefill_tokens"] - 1
    assert sparse["scores"]["prefill_tokens"] == dense["scores"]["prefill_tokens"]  # Table 3's: of the prompt


def test_rows_without_text_hold_no_answer(run: Any) -> None:
    whole = run("method=fkv", "limit=1", "task.n=2", "task.max_new_tokens=9")
    silent = run("method=fkv", "limit=1", "task.n=2", "task.max_new_tokens=9", "store_text=false", "seed=3")[1][0]
    assert silent["prediction"] is None
    assert not {"answer", "box"} & {*silent["fields"], *silent["scores"]}
    assert silent["fields"]["unique_id"] == "a"
    assert {"answer", "box"} <= {*whole[1][0]["fields"], *whole[1][0]["scores"]}


def test_another_seed_is_another_text(run: Any) -> None:
    def texts(*overrides: str) -> list[list[str]]:
        return [row["prediction"] for row in run("method=fkv", "limit=1", *overrides)[1]]

    assert texts("seed=1") != texts("seed=2")
    (same,) = texts("task.temperature=0", "task.n=2")
    assert same[0] == same[1]


# --- python -m fasa_bench.score math --------------------------------------------------------------------------------


def test_score_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"

    def scored(*rows: dict[str, Any]) -> tuple[Any, str]:
        path.write_text("\n".join(json.dumps(row) for row in rows))
        assert main(["math", str(path)]) == 0
        out, err = capsys.readouterr()
        return json.loads(out), err

    rows = [
        {"pred": r"so \boxed{42}", "answer": "42"},
        {"pred": "42", "answer": "42"},
        {"pred": r"\boxed{7}", "answer": "073"},
    ]
    assert scored(*rows) == ({"pass@1": 33.33, "n": 3, "predictions": 3, "correct": 1}, "")
    assert scored({"pred": r"\boxed{42}", "answer": r"\boxed{42}"})[0]["pass@1"] == 100
    several = {"preds": [r"\boxed{0.5}", r"\boxed{2}", "", ""], "answer": r"\frac12", "problem": "Half of 1?"}
    result, note = scored(several, {"preds": [r"\boxed{5}", r"\boxed{6}"], "answer": 5})
    # pass@1: (1/4 + 1/2) / 2; pass@2: (1 - C(3,2)/C(4,2) + 1) / 2 = (1/2 + 1) / 2
    assert result == {"pass@1": 37.5, "pass@2": 75.0, "n": 2, "predictions": 6, "correct": 2}
    assert note == "note: rows have 2 to 4 predictions: each counts with those it has\n"


def test_bad_files_to_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    for content, message in (
        (None, "no such file"),
        ("", "has no rows"),
        ("{", "line 1: not JSON"),
        ('{"pred": "x"}', 'row 1: "answer" must be a text'),
        ('{"answer": "x"}', 'row 1: "pred" must be a text, or "preds" a list of texts'),
        ('{"answer": "x", "preds": []}', 'row 1: "pred" must be a text, or "preds" a list of texts'),
    ):
        if content is not None:
            path.write_text(content)
        assert main(["math", str(path)]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert message in err


def test_an_example_without_sampling_is_as_before() -> None:
    assert Example("x", [1]).sampling is None
    assert Prediction([], "", "stop").samples == []
