"""Perplexity: windows are the right ids, the score is the mean over tokens, and known values come out."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from fasa_bench import runner
from fasa_bench.errors import UserError
from fasa_bench.methods.full import FullKV
from fasa_bench.models import Model, ModelSpec
from fasa_bench.session import Session
from fasa_bench.task import Example, Prediction
from fasa_bench.tasks.perplexity import Perplexity

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(ModelSpec("tiny", max_input=64, source="random", positions=96))


def ids(model: Model, text: str) -> list[int]:
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def examples(model: Model, limit: int | None = None, **parameters: Any) -> list[Example]:
    return list(Perplexity(**{"prefill": 8, "decode": 3, "windows": None} | parameters).examples(model, limit))


def all_ids(made: list[Example]) -> list[int]:
    return [token for example in made for token in [*example.prompt_ids, *(example.target_ids or [])]]


def forced(nll: list[float]) -> Prediction:
    return Prediction([1] * len(nll), "", "forced", nll)


def row(task: Perplexity, nll: list[float]) -> dict[str, Any]:
    return {"id": "x", "fields": {}, "scores": task.score(Example("x", [1], [1] * len(nll)), forced(nll))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files of every kind; each word is a token."""
    (tmp_path / "b.txt").write_text(" one" * 25)
    (tmp_path / "a.md").write_text(" two" * 11)
    rows = [{"text": " three" * 10}, {"text": " four" * 22}]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    (tmp_path / "notes.pdf").write_text("not text")
    return tmp_path


def test_windows_follow_one_another_without_overlap(model: Model, folder: Path) -> None:
    whole = ids(model, " one" * 25)
    assert len(whole) == 25
    text = " ".join(f"{i}" for i in range(40))
    (folder / "b.txt").write_text(text)
    made = examples(model, path=str(folder / "b.txt"))
    whole = ids(model, text)
    assert [example.id for example in made] == [f"b.txt/{i}" for i in range(len(whole) // 11)]
    assert all_ids(made) == whole[: 11 * len(made)]
    assert {(len(example.prompt_ids), len(example.target_ids or [])) for example in made} == {(8, 3)}


def test_every_document_of_a_folder_in_order(model: Model, folder: Path) -> None:
    made = examples(model, path=str(folder))
    assert [example.id for example in made] == ["a.md/0", "b.txt/0", "b.txt/1", "c.jsonl/1/0", "c.jsonl/1/1"]
    assert made[3].prompt_ids == ids(model, " four" * 8)
    assert [example.id for example in examples(model, path=str(folder), windows=2)] == ["a.md/0", "b.txt/0"]
    assert len(examples(model, limit=3, path=str(folder), windows=4)) == 3


def test_documents_joined_by_blank_lines(model: Model, folder: Path) -> None:
    made = examples(model, path=str(folder), documents="joined")
    text = "\n\n".join([" two" * 11, " one" * 25, " three" * 10, " four" * 22])
    assert len(made) == len(ids(model, text)) // 11 == 6
    assert all_ids(made) == ids(model, text)[:66]


def test_rows_as_plain_text_and_plain_text_as_rows(model: Model, folder: Path) -> None:
    raw = examples(model, path=str(folder / "c.jsonl"), text_format="plain")
    assert raw[0].prompt_ids == ids(model, (folder / "c.jsonl").read_text())[:8]
    with pytest.raises(UserError, match=r"b\.txt, line 1: not a JSON object"):
        examples(model, path=str(folder / "b.txt"), text_format="lines")


def test_begin_token_comes_on_top(model: Model, folder: Path) -> None:
    plain = examples(model, path=str(folder / "b.txt"))
    begun = examples(model, path=str(folder / "b.txt"), special_tokens=True)
    assert [example.prompt_ids for example in begun] == [[1, *example.prompt_ids] for example in plain]
    assert [example.target_ids for example in begun] == [example.target_ids for example in plain]
    assert (plain[0].fields["begin_token"], begun[0].fields["begin_token"]) == (False, True)


class Letters:
    """Model and tokenizer in one: a token is a character; the tokenizer puts 94, its begin token, before a text."""

    name, max_input, bos_token_id, config = "letters", 10**6, 94, None

    def __init__(self) -> None:
        self.tokenizer = self

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [94] * add_special_tokens + [ord(char) for char in text]}


@pytest.mark.parametrize(
    ("setting", "texts", "marked"),
    [
        ("auto", ["^abcd", "^efgh", "^mnop"], [True, True, True]),
        (True, ["^abcd", "^efgh", "^mnop"], [True, True, True]),
        (False, ["abcd", "efgh", "mnop"], [False, False, False]),
        ("once", ["^abc", "defg", "^mno"], [True, False, True]),
    ],
)
def test_begin_token_as_the_tokenizer_puts_it(tmp_path: Path, setting: Any, texts: list[str], marked: Any) -> None:
    """Two documents; `once` (authors' code) is inside the first window, the others are in front of each."""
    rows = [{"text": "abcdefghij"}, {"text": "mnopq"}]
    (tmp_path / "two.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    made = examples(Letters(), path=str(tmp_path), prefill=2, decode=2, special_tokens=setting)  # type: ignore[arg-type]
    assert ["".join(map(chr, [*one.prompt_ids, *(one.target_ids or [])])) for one in made] == texts
    assert [one.fields["begin_token"] for one in made] == marked


def test_joined_documents_are_tokenised_only_as_far_as_needed(tmp_path: Path) -> None:
    """The same windows as of the whole text, at most so many times their length in characters read."""
    read: list[int] = []

    class Counting(Letters):
        def __call__(self, text: str, *args: Any, **kwargs: Any) -> dict[str, list[int]]:
            read.append(len(text))
            return super().__call__(text, *args, **kwargs)

    texts = [f"document {number} of many. " * 5 for number in range(2000)]
    (tmp_path / "many.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    settings: dict[str, Any] = {"path": str(tmp_path), "documents": "joined", "special_tokens": False, "prefill": 40}
    few = examples(Counting(), windows=5, **settings)  # type: ignore[arg-type]
    assert max(read) < 20 * 5 * 43 < len("".join(texts)) / 10
    assert all_ids(few) == [ord(char) for char in "\n\n".join(texts)[: 5 * 43]]
    assert len(examples(Counting(), **settings)) == len("\n\n".join(texts)) // 43  # type: ignore[arg-type]


def test_separate_documents_are_scored_as_each_alone(tmp_path: Path) -> None:
    """Nothing of one document is left when the next one is scored: nats and tokens add up."""
    documents = {"a.txt": " one two three" * 9, "b.txt": " night and day and" * 12}
    runs = {}
    for name, files in (("both", ["a.txt", "b.txt"]), ("a", ["a.txt"]), ("b", ["b.txt"])):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text(documents[file])
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            overrides = ["model=tiny", "logger=none", "task=ppl", "method=oracle", "budget=4", "task.prefill=8"]
            overrides += ["task.decode=3", f"task.path={tmp_path / name}", f"results_dir={tmp_path / 'results'}"]
            made = runner.run(runner.Job.of(compose("config", overrides)))
        rows = [json.loads(line) for line in (made / "predictions.jsonl").read_text().splitlines()]
        metric = json.loads((made / "summary.json").read_text())["metrics"]["perplexity"]["value"]
        runs[name] = metric, sum(row["scores"]["tokens"] for row in rows)
    weighted = sum(math.log(metric) * tokens for metric, tokens in (runs["a"], runs["b"]))
    assert runs["both"][1] == runs["a"][1] + runs["b"][1]
    assert runs["a"][0] != pytest.approx(runs["b"][0], rel=1e-3)
    assert math.log(runs["both"][0]) == pytest.approx(weighted / runs["both"][1], rel=1e-9)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"path": None}, r"task\.path=None"),
        ({"path": "/no/such/file"}, r"task\.path='/no/such/file'"),
        ({"prefill": 0}, r"task\.prefill=0"),
        ({"decode": 0}, r"task\.decode=0"),
        ({"windows": 0}, r"task\.windows=0"),
        ({"decode": 1, "drop_first": True}, r"task\.decode=1"),
        ({"prefill": 30}, r"needs documents of 33 tokens; the longest in .* has 25"),
        ({"prefill": 65}, r"task\.prefill=65.*at most 64 tokens"),
        ({"prefill": 64, "decode": 33}, r"task\.prefill=64.*96 positions"),
    ],
)
def test_bad_input_names_the_key(model: Model, folder: Path, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        examples(model, **{"path": str(folder / "b.txt")} | parameters)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity(folder: Path) -> None:
    task = Perplexity(path=str(folder))
    rows = [row(task, [math.log(49_152)] * n) for n in (3, 5)]
    assert rows[0]["scores"]["perplexity"] == pytest.approx(49_152, rel=1e-9)
    assert task.metrics(rows)["perplexity"]["value"] == pytest.approx(49_152, rel=1e-9)


def test_windows_count_by_their_tokens(folder: Path) -> None:
    task = Perplexity(path=str(folder))
    rows = [row(task, [1.0]), row(task, [3.0, 3.0, 3.0])]
    metric = task.metrics(rows)["perplexity"]
    assert metric["value"] == pytest.approx(math.exp(10 / 4))  # and neither exp(2) nor the mean of exponentials
    assert metric["n"] == 2
    assert (metric["ci_low"], metric["ci_high"]) == (pytest.approx(math.exp(1)), pytest.approx(math.exp(3)))


def test_first_token_can_be_left_out(model: Model, folder: Path) -> None:
    nll = [9.0, 1.0, 2.0]
    kept, dropped = (Perplexity(path=str(folder), prefill=4, decode=3, drop_first=drop) for drop in (False, True))
    told = [next(iter(task.examples(model, 1))).fields["first_token"] for task in (kept, dropped)]
    assert told == ["counted", "left out"]  # whether it is dense is for the protocol to say
    assert row(kept, nll)["scores"] == {"nll": 12.0, "tokens": 3, "perplexity": math.exp(4), "first_nll": 9.0}
    assert row(dropped, nll)["scores"] == {"nll": 3.0, "tokens": 2, "perplexity": math.exp(1.5), "first_nll": 9.0}


def test_fingerprint_is_of_the_content(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    copy = tmp_path_factory.mktemp("copy")
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    first, second = (Perplexity(path=str(path)) for path in (folder, copy))
    assert first.fingerprint() == second.fingerprint()
    assert first.identity() == second.identity()
    (copy / "a.md").write_text("other")
    assert first.fingerprint() != Perplexity(path=str(copy)).fingerprint()


def test_known_perplexities(shared_data: Path) -> None:
    """Full KV by a plain forward pass; the values come from an independent implementation."""
    model = Model(ModelSpec("smollm2_135m", 7680, source="embedded", device="cpu"))
    task = Perplexity(path=str(shared_data / "ppl" / "pg19" / "10146.txt"), prefill=768, decode=256, windows=2)
    for example, expected in zip(task.examples(model, None), (16.703, 22.520), strict=True):
        target = torch.tensor(example.target_ids)
        with torch.inference_mode():
            logits = model.network(torch.tensor([example.prompt_ids + target.tolist()])).logits[0, 767:-1]
        nll = torch.nn.functional.cross_entropy(logits, target, reduction="none").tolist()
        assert task.score(example, forced(nll))["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_yaml_holds_every_parameter() -> None:
    lines = (ROOT / "conf" / "task" / "ppl.yaml").read_text().splitlines()
    keys = {line.split(":")[0] for line in lines if not line.startswith("#")}
    assert keys == {"_target_", *(field.name for field in fields(Perplexity))}
    assert len(lines) <= 15


def test_parallel_is_for_methods_that_allow_it(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Stepwise and parallel runs give the same rows; what cannot be scored so is refused before anything is loaded."""
    results = tmp_path_factory.mktemp("results")
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def job(*overrides: str) -> runner.Job:
            base = ["model=tiny", "logger=none", "task=ppl", f"task.path={folder}", "task.prefill=8", "task.decode=10"]
            return runner.Job.of(compose("config", [*base, f"results_dir={results}", *overrides]))

        for method, budget in (("fkv", 1), ("oracle", 6), ("oracle", 0.5), ("streamingllm", 10)):
            runs = []
            for mode in ("stepwise", "parallel"):
                made = runner.run(job(f"method={method}", f"budget={budget}", f"task.mode={mode}"))
                summary = json.loads((made / "summary.json").read_text())
                assert summary["config"]["task"]["mode"] == summary["deviations"]["task.mode"]["value"] == mode
                assert (summary["latency"]["decode_ms_per_token"]["n"] == 0) == (mode == "parallel")
                rows = [json.loads(line) for line in (made / "predictions.jsonl").read_text().splitlines()]
                runs.append((made.name, rows, summary))
            assert runs[0][0] != runs[1][0]
            for one, other in zip(runs[0][1], runs[1][1], strict=True):
                assert other["scores"]["nll"] == pytest.approx(one["scores"]["nll"], abs=1e-4)
                assert other["attended_tokens"] == pytest.approx(one["attended_tokens"])
                if budget == 0.5:
                    assert one["budget_tokens"] == other["budget_tokens"] == 4  # of the 8 that are prefilled
            assert runs[1][2]["realised"]["read_bytes"] is None  # a pass is no step
            assert runs[0][2]["realised"]["read_bytes"] > 0
        refused = r"task\.mode='parallel' is not allowed: {} must be scored with stepwise; parallel is for"
        for method in ("h2o", "snapkv", "rkv", "tova", "knorm", "h2o_mask_sim"):
            with pytest.raises(UserError, match=refused.format(method)):
                job(f"method={method}", "task.mode=parallel")
        for setting in ("cache.bits=4", "method.positions=cache"):
            with pytest.raises(UserError, match=r"(cache\.bits=4|task\.mode='parallel') is not allowed"):
                job("method=streamingllm", setting, "task.mode=parallel")
        with pytest.raises(UserError, match=r"task\.mode='both'"):
            job("task.mode=both")


def test_wikitext_without_a_decode_split_equals_a_plain_loop(shared_data: Path, tmp_path: Path) -> None:
    """Non-overlapping windows of 2,048 tokens, every token but the first scored: prefill=1 and one pass."""
    model = Model(ModelSpec("smollm2_135m", 7680, source="embedded", device="cpu"))
    text = (shared_data / "ppl" / "wikitext" / "wiki.test.raw").read_text(encoding="utf-8")[:12_000]
    (tmp_path / "wiki.raw").write_text(text, encoding="utf-8")
    task = Perplexity(path=str(tmp_path), prefill=1, decode=2047, mode="parallel")
    rows, total = [], 0.0
    ids = model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    for number, example in enumerate(task.examples(model, None)):
        assert example.target_ids is not None
        window = torch.tensor([ids[2048 * number :][:2048]])
        assert example.prompt_ids + example.target_ids == window[0].tolist()
        with Session(model.network) as session:
            prefilled = session.prefill(example.prompt_ids)
            with prefilled.fork(FullKV("fkv"), None) as decoder:
                nll = decoder.force(example.target_ids, example.parallel)
        rows.append({"scores": task.score(example, Prediction(example.target_ids, "", "forced", nll))})
        with torch.inference_mode():
            total += float(model.network(window, labels=window).loss) * 2047
    assert task.metrics(rows)["perplexity"]["value"] == pytest.approx(math.exp(total / (len(rows) * 2047)), rel=1e-4)
