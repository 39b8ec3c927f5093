"""Text cases of the official LongBench code: FASA_BENCH_CASES=DIR pytest tests/conformance

Reads DIR/longbench_metrics.json and DIR/longbench_prompts.json. The prompt templates are not in this repository; they
are won back from the cases, whose expected prompts hold them, and checked by the hashes given there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from fasa_bench.task import Example, Prediction
from fasa_bench.tasks.longbench import LongBench, cut_middle
from fasa_bench.tasks.longbench_score import DATA_SETS, NO_CHAT_TEMPLATE, ROUGE, official_score, score_folder

Case = dict[str, Any]


def load(name: str) -> Case:
    folder = os.environ.get("FASA_BENCH_CASES")
    path = Path(folder) / name if folder else None
    return json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}


METRICS = load("longbench_metrics.json")
PROMPTS = load("longbench_prompts.json")
needs_metrics = pytest.mark.skipif(not METRICS, reason="no longbench_metrics.json (FASA_BENCH_CASES=DIR)")
needs_prompts = pytest.mark.skipif(not PROMPTS, reason="no longbench_prompts.json (FASA_BENCH_CASES=DIR)")


def some(cases: Case, part: str, *keys: str) -> Any:
    """One test per case, named by it; one skipped test where there are no cases."""
    found = [pytest.param(case, id="-".join(str(case[key]) for key in keys)) for case in cases.get(part, [])]
    return found or [pytest.param({}, id="none")]


def limited(dataset: str) -> dict[str, bool]:
    """The cases hold what the official scorer printed, the 0 of texts beyond Python's recursion limit included."""
    return {"recursion_limit": True} if DATA_SETS[dataset].metric in ROUGE else {}


@needs_metrics
@pytest.mark.parametrize("case", some(METRICS, "cases", "id"))
def test_metric(case: Case) -> None:
    dataset, prediction, classes = case["dataset"], case["prediction"], case["all_classes"]
    single = [official_score(dataset, prediction, [x], classes, **limited(dataset)) for x in case["ground_truths"]]
    score = official_score(dataset, prediction, case["ground_truths"], classes, **limited(dataset))
    assert score == pytest.approx(case["expected_score"], abs=1e-9, rel=0)
    if "expected_per_ground_truth" in case:
        assert single == pytest.approx(case["expected_per_ground_truth"], abs=1e-9, rel=0)
    if "expected_score_100" in case:
        assert round(100 * score, 2) == case["expected_score_100"]


@needs_metrics
@pytest.mark.parametrize("case", some(METRICS, "dataset_level", "dataset"))
def test_data_set_score(case: Case, tmp_path: Path) -> None:
    dataset = case["dataset"]
    cases = {one["id"]: one for one in METRICS["cases"]}
    chosen = [cases[name] for name in case["case_ids"]]
    rows = [
        {
            "pred": one["prediction"],
            "answers": one["ground_truths"],
            "all_classes": case["all_classes_used"],
            "length": one["length"],
        }
        for one in chosen
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / f"{dataset}.jsonl").write_text(lines, encoding="utf-8")
    scores, notes = score_folder(tmp_path)
    expected = case["expected_scorer"]
    # The scorer prints our value, without the recursion limit, and says so wherever the official one differs.
    assert scores[dataset] == expected or any(note.endswith(f" {expected}") for note in notes)

    task = LongBench(datasets=[dataset], by_length=True)
    stored = []
    for one in chosen:
        fields = {"dataset": dataset, "answers": one["ground_truths"], "all_classes": case["all_classes_used"]}
        fields["length"] = one["length"]
        scored = task.score(Example("x", [], fields=fields), Prediction([], one["prediction"], "stop"))
        if "score_recursion_limited" in scored:
            scored["score"] = scored["score_recursion_limited"]
        stored.append({"id": one["id"], "scores": scored, "fields": fields})
    result = task.metrics(stored)
    assert result[dataset]["value"] == pytest.approx(expected, abs=0.005 + 1e-9)
    for name, value in case.get("expected_scorer_e", {}).items():
        ours = result[f"{dataset}/{name}"]["value"]
        assert ours is None if value is None else ours == pytest.approx(value, abs=0.005 + 1e-9)


class StandIn:
    """Tokenizer and model in one. "t12 " is token 12 and any other character is one token; <s> (1) is special and goes
    before every text unless told otherwise, as in the tokenizer that the cases were recorded with."""

    name, has_chat_template, end_token_ids = "stand-in", True, (2,)

    def __init__(self, max_input: int = 10**9) -> None:
        self.max_input = max_input
        self.tokenizer = self

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        pieces = re.findall(r"<s>|t\d+ |.", text, flags=re.DOTALL)
        ids = [
            1 if piece == "<s>" else int(piece[1:]) if re.fullmatch(r"t\d+ ", piece) else 10**6 + ord(piece)
            for piece in pieces
        ]
        return {"input_ids": [1] * add_special_tokens + ids}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        kept = [token for token in ids if token != 1] if skip_special_tokens else ids
        return "".join("<s>" if t == 1 else f"t{t} " if t < 10**6 else chr(t - 10**6) for t in kept)

    def chat(self, text: str) -> str:
        return f"<s>[INST]{text}[/INST]"


def templates() -> dict[str, str]:
    """Template of each data set: an expected prompt with its context and input put back into braces."""
    hashes = {one["dataset"]: one["template_sha256"] for one in PROMPTS["datasets"]}
    found: dict[str, str] = {}
    for case in PROMPTS["prompts"]:
        text, context, given = (
            case[key].replace("{", "{{").replace("}", "}}") for key in ("expected_prompt", "context", "input")
        )
        text = text.replace(context, "{context}", 1).replace(given or "\0", "{input}", 1)
        if hashlib.sha256(text.encode()).hexdigest() == hashes[case["dataset"]]:
            found[case["dataset"]] = text
    return found


def build(tmp_path: Path, dataset: str, template: str, row: Case, model: StandIn, **options: Any) -> Example:
    """The one example of a data set whose file holds one row."""
    (tmp_path / "prompts.json").write_text(json.dumps({dataset: template}), encoding="utf-8")
    row = {"input": "", "answers": ["x"], "all_classes": None, "length": 1, "_id": "1", **row}
    (tmp_path / f"{dataset}.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    task = LongBench([dataset], str(tmp_path), str(tmp_path / "prompts.json"), **options)
    (example,) = task.examples(model, None)  # type: ignore[arg-type]
    return example


@needs_prompts
def test_templates_are_won_back() -> None:
    assert sorted(templates()) == sorted({case["dataset"] for case in PROMPTS["prompts"]})


@needs_prompts
@pytest.mark.parametrize("case", some(PROMPTS, "prompts", "dataset", "example"))
def test_prompt(case: Case, tmp_path: Path) -> None:
    row = {"context": case["context"], "input": case["input"]}
    model = StandIn()
    template = templates()[case["dataset"]]
    example = build(tmp_path, case["dataset"], template, row, model)
    assert example.fields["prompt_sha256"] == case["expected_prompt_sha256"]
    assert example.prompt_ids[0] == 1
    assert 1 not in example.prompt_ids[1:]  # one BOS, from the tokenizer or from the template, never both
    wrapped = case["expected_final_text_llama2_chat"]  # null for the sets without a chat template
    assert model.decode(example.prompt_ids[1:]) == (wrapped or case["expected_prompt"])
    plain = build(tmp_path, case["dataset"], template, row, model, chat_template="off")
    assert model.decode(plain.prompt_ids[1:]) == case["expected_prompt"]


@needs_prompts
@pytest.mark.parametrize("case", some(PROMPTS, "datasets", "dataset"))
def test_data_set_settings(case: Case, tmp_path: Path) -> None:
    dataset = case["dataset"]
    assert (dataset not in NO_CHAT_TEMPLATE) == case["chat_template_used"]
    example = build(tmp_path, dataset, "{context}", {"context": "t5 "}, StandIn())
    assert example.max_new_tokens == case["max_gen"]
    official = case["generate_kwargs"]
    assert example.min_new_tokens == (1 if "min_length" in official else 0)
    newline = tuple(StandIn()("\n", add_special_tokens=False)["input_ids"])
    assert example.stop_token_ids == (newline if "eos_token_id" in official else ())


@needs_prompts
@pytest.mark.parametrize("case", some(PROMPTS, "truncation", "id"))
def test_truncation(case: Case, tmp_path: Path) -> None:
    model, ids = StandIn(case["max_length"]), case["ids_in"]
    kept = [token for part in cut_middle(ids, model.max_input) for token in part] if case["truncated"] else ids
    assert kept == case["expected_ids_kept"]

    assert ids[0] == 1  # put there by the tokenizer, so not part of the text
    example = build(tmp_path, case["dataset"], "{context}", {"context": model.decode(ids[1:])}, model)
    assert example.fields["truncated"] == case["truncated"]
    assert example.fields["prompt_tokens_before"] == len(ids)
    assert len(example.prompt_ids) == case["expected_final_model_input_len"]
    text = model.decode(example.prompt_ids, skip_special_tokens=True)
    if case["expected_text_after"] is not None:
        assert text == case["expected_text_after"]
    assert model.decode(kept, skip_special_tokens=True) in text
