"""The embedded task: prompts of the asked length, a key that is really there, lines that really follow."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fasa_bench import texts
from fasa_bench.errors import UserError
from fasa_bench.models import Model, ModelSpec
from fasa_bench.task import Example, Prediction
from fasa_bench.tasks import stdlib_code
from fasa_bench.tasks.stdlib import Stdlib

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(ModelSpec("tiny", max_input=2048, source="random"))


@pytest.fixture(scope="module")
def examples(model: Model) -> list[Example]:
    return list(Stdlib(context=512).examples(model, None))


def of(examples: list[Example], part: str) -> list[Example]:
    return [example for example in examples if example.fields["group"] == part]


def score(task: Stdlib, example: Example, text: str = "", nll: list[float] | None = None) -> dict[str, Any]:
    return task.score(example, Prediction([], text, "stop", nll))


def test_documentation_is_real_and_calibration_never_sees_it() -> None:
    evaluated, calibration = texts.documentation(), texts.calibration_text()
    assert len(evaluated) > 200_000
    assert len(calibration) > 80_000
    assert len(evaluated) / (len(evaluated) + len(calibration)) == pytest.approx(0.7, abs=0.02)
    ours, theirs = ([" ".join(text.split()) for text in part.split("\n\n")] for part in (evaluated, calibration))
    assert not set(ours) & set(theirs)
    assert len(set(ours)) == len(ours)
    assert "Assert statements are a convenient way to insert debugging assertions" in evaluated


def test_parts_and_lengths(examples: list[Example]) -> None:
    assert Counter(example.fields["group"] for example in examples) == {"perplexity": 3, "code": 6, "passkey": 6}
    assert {len(example.prompt_ids) for example in examples} == {512}
    assert len({example.id for example in examples}) == 15
    assert {len(example.target_ids or []) for example in of(examples, "perplexity")} == {128}


def test_perplexity_windows_are_documentation_and_do_not_overlap(model: Model, examples: list[Example]) -> None:
    text, places = texts.documentation(), []
    for example in of(examples, "perplexity"):
        window = model.tokenizer.decode(example.prompt_ids + (example.target_ids or []))
        assert text.count(window) == 1
        places.append((text.index(window), text.index(window) + len(window)))
    assert all(end <= start for (_, end), (start, _) in pairwise(places))


def test_code_prompt_ends_where_the_answer_begins(model: Model, examples: list[Example]) -> None:
    for example in of(examples, "code"):
        spec = importlib.util.find_spec(example.fields["module"])
        assert spec is not None
        lines = Path(str(spec.origin)).read_text(encoding="utf-8").splitlines(keepends=True)
        line, answer = lines[example.fields["line"] - 1], example.fields["answer"]
        assert line.strip() == answer
        assert len(answer) >= 20
        assert not set("#`") & set(answer)
        prompt = model.tokenizer.decode(example.prompt_ids)
        indentation = line[: len(line) - len(line.lstrip())]
        # the last blank of the indentation belongs to the first word's token, so the answer starts with it
        before = "".join(lines[: example.fields["line"] - 1])[-200:] + indentation
        assert (prompt + " ").endswith(before)
        full = model.tokenizer("".join(lines), add_special_tokens=False)["input_ids"]
        after = full[_end_of(full, example.prompt_ids) :]
        assert model.tokenizer.decode(after).startswith(" " + answer)


def _end_of(ids: list[int], part: list[int]) -> int:
    """Where `part` ends in `ids`, in which it occurs once."""
    starts = [i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part]
    assert len(starts) == 1
    return starts[0] + len(part)


def test_generation_of_a_line_stops_at_its_end(model: Model, examples: list[Example]) -> None:
    example = of(examples, "code")[0]
    stops = set(example.stop_token_ids)
    ids = model.tokenizer(" return x\n        return y\n\n    z", add_special_tokens=False)["input_ids"]
    first = next(i for i, token in enumerate(ids) if token in stops)
    assert model.tokenizer.decode(ids[:first]) == " return x"
    assert example.min_new_tokens == 1  # the line break is not chosen before anything was written
    assert not stops & set(model.tokenizer(" x = y.strip()", add_special_tokens=False)["input_ids"])


def test_key_lies_at_its_depth_and_nowhere_else(model: Model, examples: list[Example]) -> None:
    depths = []
    for example in of(examples, "passkey"):
        prompt, key = model.tokenizer.decode(example.prompt_ids), example.fields["answer"]
        assert (len(key), prompt.count(key)) == (5, 1)
        assert prompt.endswith("Answer: the secret pass key is")
        assert prompt.index(key) / len(prompt) == pytest.approx(example.fields["depth"], abs=0.1)
        depths.append(example.fields["depth"])
    assert depths == [0.083, 0.25, 0.417, 0.583, 0.75, 0.917]
    assert len({example.fields["answer"] for example in of(examples, "passkey")}) == 6


def test_seed_draws_other_keys_and_lines_but_the_same_text(model: Model, examples: list[Example]) -> None:
    again = list(Stdlib(context=512).examples(model, None))
    other = list(Stdlib(context=512, seed=1).examples(model, None))
    assert again == examples
    for part, same in (("perplexity", True), ("code", False), ("passkey", False)):
        for a, b in zip(of(examples, part), of(other, part), strict=True):
            assert (a.prompt_ids == b.prompt_ids) == same


def test_limit_counts_in_each_part(model: Model, examples: list[Example]) -> None:
    two = list(Stdlib(context=512).examples(model, 2))
    assert two == [e for part in ("perplexity", "code", "passkey") for e in of(examples, part)[:2]]


def test_begin_token_is_put_where_the_model_expects_one(model: Model, examples: list[Example]) -> None:
    class Begins:
        """The same tokenizer, of a model whose texts start with token 1."""

        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer = tokenizer

        def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
            encoded = self.tokenizer(text, add_special_tokens=False, **kwargs)
            if add_special_tokens:
                encoded["input_ids"] = [1, *encoded["input_ids"]]
            return encoded

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tokenizer, name)

        def __len__(self) -> int:
            return len(self.tokenizer)

    begun = Model(ModelSpec("tiny", max_input=2048, source="random"))
    begun.__dict__.update(config=model.config, tokenizer=Begins(model.tokenizer))
    made = list(Stdlib(context=512).examples(begun, None))
    assert {(example.prompt_ids[0], example.prompt_ids.count(1), len(example.prompt_ids)) for example in made} == {
        (1, 1, 512)
    }


def test_scores_of_each_part_by_hand(examples: list[Example]) -> None:
    task = Stdlib(context=512)
    code, passkey, window = (of(examples, part)[0] for part in ("code", "passkey", "perplexity"))
    answer, key = code.fields["answer"], passkey.fields["answer"]
    assert score(task, code, f" {answer}\n        more") == {"code_similarity": 1.0}
    assert score(task, code, "") == {"code_similarity": 0.0}
    assert 0.3 < score(task, code, answer[: len(answer) // 2])["code_similarity"] < 0.8
    assert score(task, passkey, f" {key}.\n") == {"passkey": 1}
    assert score(task, passkey, f" {key[:4]}") == {"passkey": 0}
    assert score(task, window, nll=[2.0, 4.0])["perplexity"] == pytest.approx(math.exp(3))


def test_metrics_are_per_part(examples: list[Example]) -> None:
    task = Stdlib(context=512)
    rows = [
        {"id": example.id, "fields": example.fields, "scores": scores}
        for example, scores in [
            *((e, {"nll": 4.0, "tokens": 2}) for e in of(examples, "perplexity")),
            *((e, {"code_similarity": s}) for e, s in zip(of(examples, "code"), (0, 1, 0.5, 0.5, 1, 0), strict=True)),
            *((e, {"passkey": s}) for e, s in zip(of(examples, "passkey"), (1, 1, 1, 0, 1, 1), strict=True)),
        ]
    ]
    result = task.metrics(rows)
    assert {name: (metric["value"], metric["n"]) for name, metric in result.items()} == {
        "perplexity": (pytest.approx(math.exp(2)), 3),
        "code_similarity": (pytest.approx(50.0), 6),
        "passkey": (pytest.approx(500 / 6), 6),
    }
    assert list(Stdlib(parts=["code"]).metrics(rows[3:9])) == ["code_similarity"]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"parts": []}, r"task\.parts=\[\]"),
        ({"parts": ["code", "code"]}, r"task\.parts="),
        ({"context": 10}, r"task\.context=10"),
        ({"n_passkey": 0}, r"task\.n_passkey=0"),
        ({"context": 2049}, r"task\.context=2049.*at most 2048"),
    ],
)
def test_bad_input_names_the_key(model: Model, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(Stdlib(**parameters).examples(model, None))


def test_context_longer_than_any_module(model: Model) -> None:
    with pytest.raises(UserError, match=r"task\.context=500000"):
        stdlib_code.completion(0, model.tokenizer, 500_000, seed=0)


def test_fingerprint_is_of_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Stdlib().fingerprint()
    assert before == Stdlib(seed=5).fingerprint()  # the parameters count elsewhere
    monkeypatch.setattr(stdlib_code, "source", lambda module: "def f(): pass")
    assert Stdlib().fingerprint() != before


def test_yaml_holds_every_parameter() -> None:
    lines = (ROOT / "conf" / "task" / "stdlib.yaml").read_text().splitlines()
    keys = {line.split(":")[0] for line in lines if not line.startswith("#")}
    assert keys == {"_target_", *(field.name for field in fields(Stdlib))}
    assert len(lines) <= 15
