"""LongBench v1 (Bai et al. 2023): 21 data sets of long documents, with the official prompts, limits and metrics.

Source: THUDM/LongBench at commit 2e00731f, LongBench/{pred,eval,metrics}.py; what is kept as data there is loaded as
data here (longbench_data.py), the scorer is in longbench_score.py.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fasa_bench import metrics
from fasa_bench.errors import UserError
from fasa_bench.statistics import Sample
from fasa_bench.task import Example, Metric, Prediction, Task
from fasa_bench.tasks import longbench_data as data
from fasa_bench.tasks.longbench_score import (
    AVERAGES,
    DATA_SETS,
    EVEN,
    FEW_SHOT,
    NO_CHAT_TEMPLATE,
    ROUGE,
    TABLE2,
    official_score,
)
from fasa_bench.tasks.longbench_score import score_folder as score_path  # noqa: F401  for `fasa_bench.score longbench`

if TYPE_CHECKING:
    from fasa_bench.models import Model

BINS = ("0-4k", "4-8k", "8k+")  # LongBench-E's, by a row's `length` (words, or characters of Chinese)


@dataclass
class LongBench(Task):
    """Parameters
    datasets: names, "all" 21 (of LongBench-E: 13), or "table2": the 15 columns of the FASA paper's Table 2.
    data_dir: folder of <dataset>.jsonl, or a data.zip; None loads the official data.zip from the hub.
    prompts_file: dataset2prompt.json; None uses the cached copy or downloads the official file.
    max_new_tokens: one limit for all data sets; None uses the official one of each.
    truncation: "middle" is official (see `cut_middle`); "off" makes a longer prompt an error.
    chat_template: "auto" is official: the model's template, but none for few-shot and code sets.
    by_length: also report each data set by LongBench-E's length bins.
    edition: "standard", or "e": LongBench-E, other rows (<dataset>_e.jsonl) whose lengths are spread
        evenly; it is always reported by length.

    The input limit (model.max_input, tokens) is compared with the plain prompt, special tokens included and chat
    template not, as in the official code; the template's few tokens come on top.
    `warnings` collects what differs from the official benchmark in the files that were read.
    """

    name: ClassVar[str] = "longbench"
    notes: ClassVar[dict[str, str]] = {
        "chat_template": "Auto is official: none for few-shot and code sets; the paper's code does the same.",
        "datasets": "The paper speaks of 16 tasks and prints 15 (the English sets without samsum): table2.",
        "max_new_tokens": "Not in the paper; its code uses the official lengths, as we do.",
        "min_new_tokens": "As official. The paper's code forces one token in every set.",
        "rouge": "Official: a text that overflows Python's recursion scores 0. Ours: its real value; the official one "
        "is stored as score_recursion_limited.",
        "code_similarity": "As with the official requirements; with python-Levenshtein installed, fuzzywuzzy differs.",
    }
    # Not parameters: settled here, and logged with the notes.
    min_new_tokens: ClassVar[str] = "samsum 1, else 0"
    rouge: ClassVar[str] = "rouge 1.0.1 without recursion limit"
    code_similarity: ClassVar[str] = "fuzzywuzzy 0.18.0 on difflib"
    places: ClassVar[tuple[str, ...]] = ("data_dir", "prompts_file")

    texts: ClassVar[tuple[str, ...]] = ("answers", "all_classes")

    datasets: list[str] | str = "all"
    data_dir: str | None = None
    prompts_file: str | None = None
    max_new_tokens: int | None = None
    truncation: Literal["middle", "off"] = "middle"
    chat_template: Literal["auto", "on", "off"] = "auto"
    by_length: bool = False
    edition: Literal["standard", "e"] = "standard"

    def __post_init__(self) -> None:
        known = EVEN if self.edition == "e" else tuple(DATA_SETS)
        presets = {"all": known, "table2": TABLE2}
        given = [self.datasets] if isinstance(self.datasets, str) else self.datasets
        self.selected = presets[given[0]] if len(given) == 1 and given[0] in presets else tuple(given)
        for name in self.selected:
            if name not in known:
                allowed = f"all, table2, or a list of {', '.join(known)}"
                if self.edition == "e":
                    allowed = f"LongBench-E has {', '.join(known)}"
                raise UserError.of("task.datasets", name, allowed)
        if not self.selected or len(set(self.selected)) < len(self.selected):
            raise UserError.of("task.datasets", self.datasets, "at least one data set, each of them once")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise UserError.of(
                "task.max_new_tokens", self.max_new_tokens, "at least 1, or null for the official lengths"
            )
        self.warnings: list[str] = []

    def examples(self, model: Model, limit: int | None) -> Iterator[Example]:
        if self.chat_template == "on" and not model.has_chat_template:
            raise UserError.of("task.chat_template", "on", f"model {model.name} has no chat template; use auto or off")
        templates = data.templates(self._prompts())
        for dataset in self.selected:
            if dataset not in templates:
                raise UserError.of("task.prompts_file", self.prompts_file, f"has no template for {dataset}")
            path, rows = self._rows(dataset)
            for row, example_id in list(zip(rows, _ids(rows), strict=True))[:limit]:
                where = f"{dataset}/{example_id}"
                template = templates[dataset]
                try:
                    prompt = template.format(**row)
                    question = template.rpartition("{context}")[2].format(**row) if "{context}" in template else None
                except (KeyError, IndexError, ValueError) as error:
                    raise UserError(f"{path}, {where}: its prompt cannot be built ({error!r})") from error
                yield self._example(where, dataset, prompt, question, row, rows[-1].get("all_classes"), model)

    def fingerprint(self) -> str:
        """sha256 over the prompts file and the files of the selected data sets, the same for a folder and a zip."""
        digest = hashlib.sha256(self._prompts())
        for dataset in self.selected:
            digest.update(dataset.encode() + hashlib.sha256(self._read(dataset)[1]).digest())
        return digest.hexdigest()

    def score(self, example: Example, prediction: Prediction) -> dict[str, Any]:
        """score: official metric in [0, 1]. For ROUGE sets also Google's ROUGE-L, and the score under the official
        scorer's recursion limit."""
        fields = example.fields
        dataset, answers, classes = fields["dataset"], fields["answers"], fields["all_classes"]
        metric = DATA_SETS[dataset].metric
        text = metrics.first_line(prediction.text) if dataset in FEW_SHOT else prediction.text
        scores = {
            "score": official_score(dataset, prediction.text, answers, classes),
            "metric": metric.__name__,
            "empty": metrics.is_empty(text),
        }
        if metric in ROUGE:
            google = (metrics.rouge_l_google(text, answer, chinese=metric is metrics.rouge_l_zh) for answer in answers)
            scores["rouge_l_google"] = max(google, default=0.0)
            scores["score_recursion_limited"] = official_score(
                dataset, prediction.text, answers, classes, recursion_limit=True
            )
        return scores

    def samples(self, rows: list[dict[str, Any]]) -> dict[str, Sample]:
        """{dataset: mean x 100}, for ROUGE sets {dataset/rouge_l_google}, with `by_length` {dataset/<bin>}; then
        avg: mean of the means of all selected data sets, and AVERAGES of which all data sets are selected. No average
        has a value unless every set of it has a row.
        """
        by_set: dict[str, dict[str, dict[str, Any]]] = {dataset: {} for dataset in self.selected}
        for row in rows:
            by_set[row["fields"]["dataset"]][row["id"]] = row
        scores = {dataset: _points(own, "score") for dataset, own in by_set.items()}
        result: dict[str, Sample] = {}
        bins: dict[str, list[dict[str, float]]] = {part: [] for part in BINS}
        for dataset, own in by_set.items():
            result[dataset] = Sample([scores[dataset]])
            if DATA_SETS[dataset].metric in ROUGE:
                result[f"{dataset}/rouge_l_google"] = Sample([_points(own, "rouge_l_google")])
            for part in BINS if self.by_length or self.edition == "e" else ():
                binned = {key: row for key, row in own.items() if _bin(row["fields"]["length"]) == part}
                bins[part].append(_points(binned, "score"))
                result[f"{dataset}/{part}"] = Sample([bins[part][-1]])
        result["avg"] = Sample([scores[dataset] for dataset in self.selected])
        for part, groups in bins.items():
            if groups:
                result[f"avg/{part}"] = Sample(groups)
        for name, weights in AVERAGES.items():
            if weights.keys() <= scores.keys():
                result[name] = Sample([scores[dataset] for dataset in weights], weights=list(weights.values()))
        return result

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Metric]:
        """Those of `samples`, and two counts: n_empty, predictions without any text; n_recursion, rows too long for the
        official scorer.
        """
        result = super().metrics(rows)
        result["n_empty"] = _number(rows, [row["scores"]["empty"] for row in rows])
        limited = [row["scores"].get("score_recursion_limited") not in (None, row["scores"]["score"]) for row in rows]
        result["n_recursion"] = _number(rows, limited)
        return result

    def _prompts(self) -> bytes:
        prompts = data.prompts_bytes(self.prompts_file)
        if not data.is_official(prompts):
            self._warn(f"task.prompts_file={self.prompts_file!r} is not the official file (its sha256 differs)")
        return prompts

    def _rows(self, dataset: str) -> tuple[Path, list[dict[str, Any]]]:
        path, content = self._read(dataset)
        rows = data.read_rows(path, content)
        if self.edition == "standard" and len(rows) != DATA_SETS[dataset].rows:
            self._warn(f"{dataset}: {len(rows)} rows in {path}, the official set has {DATA_SETS[dataset].rows}")
        return path, rows

    def _read(self, dataset: str) -> tuple[Path, bytes]:
        return data.read_file(self.data_dir, f"{dataset}_e" if self.edition == "e" else dataset)

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def _example(
        self,
        where: str,
        dataset: str,
        prompt: str,
        question: str | None,
        row: dict[str, Any],
        all_classes: list[str] | None,
        model: Model,
    ) -> Example:
        """question: the end of the prompt that follows its context."""
        tokenizer = model.tokenizer
        encoded = tokenizer(prompt)
        ids = _tokens(encoded)
        before, text = len(ids), prompt
        if before > model.max_input:
            if self.truncation == "off":
                raise UserError(
                    f"{where}: the prompt has {before} tokens, {model.name} takes {model.max_input}; "
                    "use task.truncation=middle (the official way) or a model with a longer input"
                )
            if model.max_input == 1:
                self._warn("model.max_input=1: the official truncation then cuts nothing")
            text = "".join(
                tokenizer.decode(part, skip_special_tokens=True) for part in cut_middle(ids, model.max_input)
            )
            encoded = tokenizer(text)
        start = len(text) - len(question) if question and text.endswith(question) else None
        wanted = self.chat_template == "on" or (self.chat_template == "auto" and dataset not in NO_CHAT_TEMPLATE)
        if wanted and model.has_chat_template:
            # The template's text has the special tokens already.
            chat = model.chat(text)
            encoded = tokenizer(chat, add_special_tokens=False)
            turn = chat.rfind(text.strip())  # templates may strip the blanks around a turn
            start = None if start is None or turn < 0 else turn + len(text[:start].lstrip())
        ids = _tokens(encoded)
        newline = dataset == "samsum"  # the one set that ends at a newline, but not with nothing
        return Example(
            id=where,
            prompt_ids=ids,
            max_new_tokens=self.max_new_tokens or DATA_SETS[dataset].max_new_tokens,
            min_new_tokens=1 if newline else 0,
            stop_token_ids=tuple(_tokens(tokenizer("\n", add_special_tokens=False))[-1:]) if newline else (),
            context_tokens=None if start is None else _token_at(encoded, start, len(ids)),
            fields={
                "group": dataset,  # what `limit` counts in
                "dataset": dataset,
                "answers": row["answers"],
                "all_classes": all_classes,
                "length": row.get("length"),
                "language": row.get("language"),
                "prompt_tokens_before": before,
                "truncated": before > model.max_input > 1,
                "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
            },
        )


def cut_middle(ids: list[int], limit: int) -> tuple[list[int], list[int]]:
    """The two ends that the official truncation keeps of more than `limit` ids: int(limit / 2) each, so an odd limit
    loses one token more, and a limit of 1 cuts nothing (its second end is the slice [-0:], which is everything). They
    are decoded apart and joined as text, and tokenising that text again may change the number: the length that a row
    reports is counted after it.
    """
    half = limit // 2
    return ids[:half], ids[-half:]


def _ids(rows: list[dict[str, Any]]) -> list[str]:
    """The rows' own _id; "#<index in the file>" where it is missing or not the only one of its kind."""
    given = ["" if row.get("_id") is None else str(row["_id"]) for row in rows]
    seen = Counter(given)
    usable = [bool(name) and seen[name] == 1 and not name.startswith("#") for name in given]
    return [name if good else f"#{index}" for index, (name, good) in enumerate(zip(given, usable, strict=True))]


def _tokens(encoding: Any) -> list[int]:
    return list(encoding["input_ids"])


def _token_at(encoding: Any, start: int, end: int) -> int | None:
    """The token of the character at `start`; None from a tokenizer that does not keep track of them (a slow one)."""
    if not getattr(encoding, "is_fast", False):
        return None
    after = (encoding.char_to_token(place) for place in range(start, start + 100))  # some characters make no token
    return next((token for token in after if token is not None), end)


def _points(rows: dict[str, dict[str, Any]], score: str) -> dict[str, float]:
    """Each row's score x 100."""
    return {key: 100 * row["scores"][score] for key, row in rows.items()}


def _bin(length: int | None) -> str | None:
    return None if length is None else BINS[0] if length < 4000 else BINS[1] if length < 8000 else BINS[2]


def _number(rows: list[dict[str, Any]], flags: list[bool]) -> Metric:
    return {"value": sum(flags), "ci_low": None, "ci_high": None, "n": len(rows)}
