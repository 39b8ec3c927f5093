"""The LongBench task on invented rows and templates; the official text itself is tested in tests/conformance."""

from __future__ import annotations

import hashlib
import io
import json
import os
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import pytest

from fasa_bench import models
from fasa_bench.errors import UserError
from fasa_bench.task import Example
from fasa_bench.tasks import longbench_data as data
from fasa_bench.tasks.longbench import LongBench, cut_middle
from fasa_bench.tasks.longbench_score import DATA_SETS, EVEN, TABLE2
from tests.test_longbench_scores import scored

SHARED = Path(os.environ.get("FASA_BENCH_SHARED") or Path(__file__).resolve().parents[2] / "shared")
TEMPLATE = "Read: {context}\nQ: {input}\nA:"


class Model:
    """Model and tokenizer in one: a token is a character, "^" is the BOS token that the tokenizer puts first."""

    name, end_token_ids = "letters", (2,)

    def __init__(self, max_input: int = 10**6, has_chat_template: bool = True) -> None:
        self.max_input, self.has_chat_template, self.tokenizer = max_input, has_chat_template, self

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(char) for char in ("^" * add_special_tokens + text)]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        text = "".join(map(chr, ids))
        return text.replace("^", "") if skip_special_tokens else text

    def chat(self, text: str) -> str:
        return f"^[{text}]"


@pytest.fixture(scope="module")
def tiny() -> models.Model:
    return models.Model(models.ModelSpec("tiny", max_input=2048, source="random"))


def row(**fields: Any) -> dict[str, Any]:
    base = {"context": "c", "input": "q", "answers": ["x"], "all_classes": None, "length": 10, "language": "en"}
    return {**base, "_id": "id", **fields}


def write(folder: Path, **rows: list[dict[str, Any]]) -> LongBench:
    """A data folder with these data sets and one template for all; the task over them."""
    for name, content in rows.items():
        lines = [json.dumps(one, ensure_ascii=False) for one in content]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    prompts = folder / "prompts.json"
    prompts.write_text(json.dumps(dict.fromkeys(DATA_SETS, TEMPLATE)), encoding="utf-8")
    return LongBench(datasets=list(rows), data_dir=str(folder), prompts_file=str(prompts))


def run(task: LongBench, model: Model | None = None, limit: int | None = None) -> list[Example]:
    return list(task.examples(model or Model(), limit))  # type: ignore[arg-type]


def test_examples_of_all_data_sets(tmp_path: Path) -> None:
    task = write(tmp_path, **{name: [row(context=f"in {name}", all_classes=["x"])] for name in DATA_SETS})
    examples = run(task)
    assert [example.fields["dataset"] for example in examples] == list(DATA_SETS)
    lengths = {example.fields["dataset"]: example.max_new_tokens for example in examples}
    assert [name for name, n in lengths.items() if n == 512] == ["gov_report", "qmsum", "multi_news", "vcsum"]
    assert [name for name, n in lengths.items() if n == 128] == ["narrativeqa", "qasper", "dureader", "samsum"]
    few = ["multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"]
    assert [name for name, n in lengths.items() if n == 64] == few
    assert sum(n == 32 for n in lengths.values()) == 7
    plain = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    for example in examples:
        name = example.fields["dataset"]
        prompt = f"Read: in {name}\nQ: q\nA:"
        # One BOS either way: from the tokenizer, or from the template's text.
        assert Model().decode(example.prompt_ids) == ("^" + prompt if name in plain else f"^[{prompt}]")
        assert example.id == f"{name}/id"
        assert example.min_new_tokens == (name == "samsum")
        assert example.stop_token_ids == ((ord("\n"),) if name == "samsum" else ())
        expected = {"group": name, "truncated": False, "prompt_tokens_before": len(prompt) + 1, "length": 10}
        expected |= {"language": "en", "answers": ["x"]}
        assert expected.items() <= example.fields.items()
        assert example.fields["prompt_sha256"] == hashlib.sha256(prompt.encode()).hexdigest()
        assert json.loads(json.dumps(example.fields)) == example.fields


def test_a_short_set_does_not_shorten_a_later_one(tmp_path: Path) -> None:
    task = write(tmp_path, hotpotqa=[row()], gov_report=[row()])
    assert [example.max_new_tokens for example in run(task)] == [32, 512]
    task.max_new_tokens = 7
    assert [example.max_new_tokens for example in run(task)] == [7, 7]


def test_limit_counts_in_each_data_set(tmp_path: Path) -> None:
    rows = [row(_id=name, all_classes=[name]) for name in ("a", "b", "c")]
    task = write(tmp_path, trec=rows, lcc=rows)
    examples = run(task, limit=2)
    assert [example.id for example in examples] == ["trec/a", "trec/b", "lcc/a", "lcc/b"]
    assert examples[0].fields["all_classes"] == ["c"]  # of the file's last row, whatever the limit


def test_chat_template_switch(tmp_path: Path) -> None:
    task = write(tmp_path, qasper=[row()], lcc=[row()])
    starts = {"auto": ["^[R", "^Re"], "on": ["^[R", "^[R"], "off": ["^Re", "^Re"]}
    for task.chat_template, expected in starts.items():  # type: ignore[assignment]
        assert [Model().decode(example.prompt_ids[:3]) for example in run(task)] == expected
    task.chat_template = "auto"
    assert Model().decode(run(task, Model(has_chat_template=False))[0].prompt_ids[:3]) == "^Re"
    task.chat_template = "on"
    with pytest.raises(UserError, match="no chat template"):
        run(task, Model(has_chat_template=False))


@pytest.mark.parametrize("context", ["abcdefghij" * 3, "北京上海广州" * 5])
def test_middle_truncation(tmp_path: Path, context: str) -> None:
    task = write(tmp_path, lcc=[row(context=context)])
    prompt = "^Read: " + context + "\nQ: q\nA:"
    assert len(prompt) == 45
    for limit in (45, 46):
        (example,) = run(task, Model(limit))
        assert Model().decode(example.prompt_ids) == prompt
        assert not example.fields["truncated"]
    for limit in (44, 43, 20, 3, 2):
        (example,) = run(task, Model(limit))
        half = limit // 2
        # BOS is one of the kept tokens, is lost in the text and comes back, so the length is 2 * half again.
        assert Model().decode(example.prompt_ids) == prompt[:half] + prompt[-half:]
        assert example.fields["truncated"]
        assert (example.fields["prompt_tokens_before"], len(example.prompt_ids)) == (45, 2 * half)
    (example,) = run(task, Model(1))  # whose half is nothing: the official slice [-0:] keeps everything
    assert Model().decode(example.prompt_ids) == prompt
    assert not example.fields["truncated"]
    assert "model.max_input=1: the official truncation then cuts nothing" in task.warnings


def test_truncation_happens_before_the_chat_template(tmp_path: Path) -> None:
    task = write(tmp_path, qasper=[row(context="a" * 50)])
    (example,) = run(task, Model(10))
    assert Model().decode(example.prompt_ids) == "^[Read" + " q\nA:" + "]"
    assert len(example.prompt_ids) == 10 + 2


def test_truncation_off_names_the_example(tmp_path: Path) -> None:
    task = write(tmp_path, lcc=[row(_id="fits"), row(_id="long", context="a" * 50)])
    task.truncation = "off"
    examples = task.examples(Model(40), None)  # type: ignore[arg-type]
    assert next(examples).id == "lcc/fits"
    with pytest.raises(UserError, match=r"lcc/long: the prompt has 65 tokens, letters takes 40"):
        next(examples)


def test_cut_middle() -> None:
    assert cut_middle([1, 2, 3, 4, 5, 6], 5) == ([1, 2], [5, 6])
    assert cut_middle([1, 2, 3, 4, 5, 6], 4) == ([1, 2], [5, 6])
    assert cut_middle([1, 2, 3], 1) == ([], [1, 2, 3])  # int(1 / 2) = 0, and [-0:] is everything


def test_the_length_after_the_cut_is_that_of_the_new_tokens(tmp_path: Path, tiny: models.Model) -> None:
    """Cutting through a character makes other tokens of it: what counts, and what is stored, is what the model gets."""
    task = write(tmp_path, lcc=[row(context="龘龘驫麤" * 800)])
    lengths = set()
    for limit in range(1990, 2000):
        tiny.max_input = limit
        (example,) = task.examples(tiny, None)
        text = tiny.tokenizer.decode(example.prompt_ids)
        assert tiny.tokenizer(text)["input_ids"] == example.prompt_ids
        assert example.fields["prompt_tokens_before"] > 2048
        lengths.add(len(example.prompt_ids) - 2 * (limit // 2))
    tiny.max_input = 2048
    assert lengths != {0}


def test_ids_are_unique_and_stable(tmp_path: Path) -> None:
    rows = [row(_id="a"), row(_id="b"), row(_id="a"), row(_id=None), row(_id=7), row(_id="#0")]
    task = write(tmp_path, lcc=rows)
    assert [example.id for example in run(task)] == ["lcc/#0", "lcc/b", "lcc/#2", "lcc/#3", "lcc/7", "lcc/#5"]


def test_context_is_taken_as_it_is(tmp_path: Path) -> None:
    context = "{input} \\n \u2028 \x85 {}"  # braces are not expanded, and only \n ends a line of the file
    (example,) = run(write(tmp_path, lcc=[row(context=context)]))
    assert context in Model().decode(example.prompt_ids)


def test_classes_are_those_of_the_last_row(tmp_path: Path) -> None:
    task = write(tmp_path, trec=[row(all_classes=["A", "B"]), row(_id="2", all_classes=["B"])])
    assert [example.fields["all_classes"] for example in run(task)] == [["B"], ["B"]]


def test_row_counts_are_warnings(tmp_path: Path) -> None:
    full = [row(_id=str(i)) for i in range(150)]
    task = write(tmp_path, multifieldqa_en=full, qasper=full)
    run(task)
    run(task)
    prompts, counts = task.warnings
    assert "prompts.json' is not the official file" in prompts
    assert counts.startswith("qasper: 150 rows in ")
    assert counts.endswith("the official set has 200")
    assert {name: s.rows for name, s in DATA_SETS.items() if s.rows != 200} == {
        "multifieldqa_en": 150,
        "lcc": 500,
        "repobench-p": 500,
    }


def test_zip_file_equals_folder(tmp_path: Path) -> None:
    task = write(tmp_path, lcc=[row(context="北京")], qasper=[row()])
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in task.selected:
            file.write(tmp_path / f"{name}.jsonl", f"data/{name}.jsonl")
    zipped = LongBench(task.datasets, str(archive), task.prompts_file)
    assert run(zipped) == run(task)
    assert zipped.fingerprint() == task.fingerprint()
    with pytest.raises(UserError, match=r"no trec\.jsonl: expected it as data/trec\.jsonl"):
        run(LongBench(["trec"], str(archive), task.prompts_file))
    with pytest.raises(UserError, match="neither a folder nor a zip file"):
        run(LongBench(["trec"], str(tmp_path / "lcc.jsonl"), task.prompts_file))


def test_fingerprint_changes_with_data_and_prompts(tmp_path: Path) -> None:
    task = write(tmp_path, lcc=[row()], qasper=[row()])
    first = task.fingerprint()
    assert LongBench(["lcc"], task.data_dir, task.prompts_file).fingerprint() != first
    assert write(tmp_path, lcc=[row(context="other")], qasper=[row()]).fingerprint() != first
    again = write(tmp_path, lcc=[row()], qasper=[row()])
    assert again.fingerprint() == first
    Path(str(task.prompts_file)).write_text(json.dumps(dict.fromkeys(DATA_SETS, TEMPLATE + " ")))
    assert again.fingerprint() != first


def test_bad_parameters() -> None:
    for datasets in ("nope", ["qasper", "nope"]):
        with pytest.raises(
            UserError, match=r"task.datasets='nope' is not allowed: all, table2, .*narrativeqa.*repobench-p"
        ):
            LongBench(datasets=datasets)
    for datasets in ([], ["qasper", "qasper"]):
        with pytest.raises(UserError, match="each of them once"):
            LongBench(datasets=datasets)
    with pytest.raises(UserError, match=r"task\.max_new_tokens=0"):
        LongBench(max_new_tokens=0)


def test_groups_of_data_sets_by_name() -> None:
    assert LongBench().selected == tuple(DATA_SETS)
    assert len(DATA_SETS) == 21
    assert LongBench("qasper").selected == ("qasper",)
    assert LongBench("table2").selected == LongBench(["table2"]).selected == TABLE2
    assert len(TABLE2) == 15
    assert "samsum" not in TABLE2


def test_bad_data(tmp_path: Path) -> None:
    task = write(tmp_path, lcc=[row()])
    with pytest.raises(UserError, match=r"no such folder or zip file; expected .*gone/lcc\.jsonl"):
        run(LongBench("lcc", str(tmp_path / "gone"), task.prompts_file))
    with pytest.raises(UserError, match=r"no file for trec; expected .*/trec\.jsonl"):
        run(LongBench("trec", task.data_dir, task.prompts_file))
    with pytest.raises(UserError, match=r"task.prompts_file=.* no such file"):
        run(LongBench("lcc", task.data_dir, str(tmp_path / "gone.json")))
    bad = tmp_path / "prompts.json"
    for content, message in (("{", "not JSON"), ("[]", "one JSON object"), ("{}", "no template for lcc")):
        bad.write_text(content)
        with pytest.raises(UserError, match=message):
            run(LongBench("lcc", task.data_dir, str(bad)))
    task = write(tmp_path, lcc=[row()])
    file = tmp_path / "lcc.jsonl"
    good = file.read_text()
    for line, message in (
        ("{", "line 3: not JSON"),
        ("[]", "line 3: must be a JSON object, not list"),
        ('{"answers": "x"}', '"answers" must be a list'),
        ('{"answers": ["x"], "all_classes": [1]}', '"all_classes" must be'),
        ('{"answers": ["x"], "context": "c"}', "lcc/#1: its prompt cannot be built .*input"),
    ):
        file.write_text(good + "\n" + line)
        with pytest.raises(UserError, match=message):
            run(task)
    file.write_text("\n")
    with pytest.raises(UserError, match="has no rows"):
        run(task)


OFFICIAL = json.dumps({"lcc": "official: {context}"}).encode()


@pytest.fixture
def official(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An invented official prompts file, not yet in the (empty) cache: the path where it would be cached."""
    monkeypatch.setenv("FASA_BENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "PROMPTS_SHA256", hashlib.sha256(OFFICIAL).hexdigest())
    return tmp_path / "cache" / "longbench" / "dataset2prompt.json"


def serve(monkeypatch: pytest.MonkeyPatch, content: bytes | None) -> list[str]:
    """What the network answers (None: nothing); the list fills with the addresses that were asked."""
    asked: list[str] = []

    def urlopen(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        if content is None:
            raise urllib.error.URLError("network is unreachable")
        return io.BytesIO(content)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


def test_prompts_are_downloaded_once(tmp_path: Path, official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = LongBench("lcc", write(tmp_path, lcc=[row()]).data_dir)
    asked = serve(monkeypatch, OFFICIAL)
    for _ in range(2):
        assert Model().decode(run(task)[0].prompt_ids) == "^official: c"
    assert asked == [data.PROMPTS_URL]
    assert official.read_bytes() == OFFICIAL
    assert [path.name for path in official.parent.iterdir()] == [official.name]  # no half-written copy
    serve(monkeypatch, None)
    assert Model().decode(run(task)[0].prompt_ids) == "^official: c"
    assert len(task.warnings) == 1  # the row count only: these prompts are official


def test_wrong_prompts_are_not_kept(official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, b"{}")
    with pytest.raises(UserError, match=f"expected sha256 {hashlib.sha256(OFFICIAL).hexdigest()}"):
        data.prompts_bytes(None)
    assert not official.exists()
    official.write_bytes(b"damaged")
    serve(monkeypatch, OFFICIAL)
    assert data.prompts_bytes(None) == OFFICIAL == official.read_bytes()


def test_prompts_offline_say_what_to_do(official: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, None)
    with pytest.raises(UserError) as error:
        data.prompts_bytes(None)
    for part in (data.PROMPTS_URL, data.PROMPTS_SHA256, str(official), "task.prompts_file", "unreachable"):
        assert part in str(error.value)


def test_official_prompts_address() -> None:
    assert "/THUDM/LongBench/2e00731f8d0bff23dc4325161044d0ed8af94c1e/" in data.PROMPTS_URL
    assert data.PROMPTS_SHA256 == "56d22ad4f382169c2b8a11ff4c982a4a1bea096c8152b0f0b85b64686b157c30"


def test_the_hubs_zip_is_read_where_no_folder_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write(tmp_path, lcc=[row(context="from the hub")])
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.write(tmp_path / "lcc.jsonl", "data/lcc.jsonl")
    task.data_dir = None

    def download(repo: str, name: str, repo_type: str) -> str:
        assert (repo, name, repo_type) == ("THUDM/LongBench", "data.zip", "dataset")
        return str(archive)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert "from the hub" in Model().decode(run(task)[0].prompt_ids)

    def offline(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    with pytest.raises(UserError, match=r"no route.*set task\.data_dir to a folder of <dataset>\.jsonl"):
        run(task)


def test_longbench_e_has_files_of_its_own(tmp_path: Path) -> None:
    names = "qasper multifieldqa_en hotpotqa 2wikimqa gov_report multi_news trec triviaqa samsum passage_count"
    assert list(EVEN) == [*names.split(), "passage_retrieval_en", "lcc", "repobench-p"]
    write(tmp_path, qasper=[row(context="even", length=4000)])
    (tmp_path / "qasper.jsonl").rename(tmp_path / "qasper_e.jsonl")
    write(tmp_path, qasper=[row(context="standard")])
    task = LongBench("qasper", str(tmp_path), str(tmp_path / "prompts.json"), edition="e")
    (example,) = run(task)
    assert "even" in Model().decode(example.prompt_ids)
    assert task.fingerprint() != LongBench("qasper", task.data_dir, task.prompts_file).fingerprint()
    result = task.metrics([scored(task, "qasper", "x", ["x"], length=4000)])
    assert [result[f"qasper/{part}"]["value"] for part in ("0-4k", "4-8k", "8k+")] == [None, 100, None]
    assert result["avg/4-8k"]["value"] == 100
    assert LongBench(edition="e").selected == EVEN
    for datasets in ("table2", ["narrativeqa"]):  # whose first set is missing there
        with pytest.raises(UserError, match=r"task\.datasets='narrativeqa' .*LongBench-E has qasper"):
            LongBench(datasets, edition="e")


@pytest.mark.parametrize("chat", ["off", "on"])
@pytest.mark.parametrize("context", ["Some words.", "words " * 3000, "北京上海广州 " * 3000])
def test_the_question_begins_after_the_context(tmp_path: Path, tiny: models.Model, chat: str, context: str) -> None:
    """Also in a prompt that was cut in the middle, and within a chat template; tokens that lie across belong to it."""
    task = write(tmp_path, qasper=[row(context=context, input="Who knows?")])
    task.chat_template = chat  # type: ignore[assignment]
    (example,) = task.examples(tiny, None)
    assert example.context_tokens is not None
    before, after = (
        tiny.tokenizer.decode(part)
        for part in (example.prompt_ids[: example.context_tokens], example.prompt_ids[example.context_tokens :])
    )
    assert before.rstrip().endswith(context.rstrip()[-6:])
    question = "\nQ: Who knows?\nA:" + ("<|im_end|>\n<|im_start|>assistant\n" if chat == "on" else "")
    assert after.lstrip(" ") == question
    assert example.fields["truncated"] == (len(context) > 100)


def test_no_mark_where_there_is_no_question(tmp_path: Path, tiny: models.Model) -> None:
    task = write(tmp_path, qasper=[row(context="words " * 3000, input="long " * 3000)])
    assert next(task.examples(tiny, None)).context_tokens is None  # cut away
    prompts = tmp_path / "prompts.json"
    for template in ("Q: {input} {context}", "{input}"):
        prompts.write_text(json.dumps({"qasper": template}))
        assert next(task.examples(tiny, None)).context_tokens is None


@pytest.mark.skipif(not (SHARED / "data" / "longbench").is_dir(), reason="no shared/data/longbench beside the checkout")
def test_real_rows_and_prompts() -> None:
    folder = SHARED / "data"
    prompts = folder / "longbench_config" / "dataset2prompt.json"
    task = LongBench(data_dir=str(folder / "longbench"), prompts_file=str(prompts))
    examples = run(task)
    assert {example.fields["group"] for example in examples} == set(DATA_SETS)
    assert len({example.id for example in examples}) == len(examples) == 286
    assert len(task.warnings) == 21  # all are slices, and the prompts are the official ones
    templates = json.loads(prompts.read_text(encoding="utf-8"))
    for example in examples:
        text = Model().decode(example.prompt_ids)
        template = templates[example.fields["dataset"]]
        before, after = template.split("{")[0], template.split("}")[-1]
        assert text.startswith(("^" + before, "^[" + before))
        assert text.removesuffix("]").endswith(after)
