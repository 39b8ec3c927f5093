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

import numpy as np

from fasa_bench import metrics
from fasa_bench.errors import UserError
from fasa_bench.statistics import bootstrap
from fasa_bench.task import Example, Metric, Prediction, Task
from fasa_bench.tasks import longbench_data as data
from fasa_bench.tasks.longbench_score import DATA_SETS, FEW_SHOT, NO_CHAT_TEMPLATE, ROUGE, TABLE2, official_score
from fasa_bench.tasks.longbench_score import score_folder as score_path  # noqa: F401  for `fasa_bench.score longbench`

if TYPE_CHECKING:
    from fasa_bench.models import Model

BINS = ("0-4k", "4-8k", "8k+")  # LongBench-E's, by a row's `length` (words, or characters of Chinese)


@dataclass
class LongBench(Task):
    """Parameters
    datasets: names, "all" 21, or "table2": the 15 columns of the FASA paper's Table 2.
    data_dir: folder of <dataset>.jsonl, or a data.zip; None loads the official data.zip from the hub.
    prompts_file: dataset2prompt.json; None uses the cached copy or downloads the official file.
    max_new_tokens: one limit for all data sets; None uses the official one of each.
    truncation: "middle" is official (see `cut_middle`); "off" makes a longer prompt an error.
    chat_template: "auto" is official: the model's template, but none for few-shot and code sets.
    by_length: also report each data set by LongBench-E's length bins.

    The input limit (model.max_input, tokens) is compared with the plain prompt, special tokens included and chat
    template not, as in the official code; the template's few tokens come on top.
    `warnings` collects what differs from the official benchmark in the files that were read.
    """

    name: ClassVar[str] = "longbench"
    notes: ClassVar[dict[str, str]] = {
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

    datasets: list[str] | str = "all"
    data_dir: str | None = None
    prompts_file: str | None = None
    max_new_tokens: int | None = None
    truncation: Literal["middle", "off"] = "middle"
    chat_template: Literal["auto", "on", "off"] = "auto"
    by_length: bool = False

    def __post_init__(self) -> None:
        presets = {"all": tuple(DATA_SETS), "table2": TABLE2}
        given = [self.datasets] if isinstance(self.datasets, str) else self.datasets
        self.selected = presets[given[0]] if len(given) == 1 and given[0] in presets else tuple(given)
        for name in self.selected:
            if name not in DATA_SETS:
                raise UserError.of("task.datasets", name, f"all, table2, or a list of {', '.join(DATA_SETS)}")
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
                try:
                    prompt = templates[dataset].format(**row)
                except (KeyError, IndexError, ValueError) as error:
                    raise UserError(f"{path}, {where}: its prompt cannot be built ({error!r})") from error
                yield self._example(where, dataset, prompt, row, rows[-1].get("all_classes"), model)

    def fingerprint(self) -> str:
        """sha256 over the prompts file and the files of the selected data sets, the same for a folder and a zip."""
        digest = hashlib.sha256(self._prompts())
        for dataset in self.selected:
            digest.update(dataset.encode() + hashlib.sha256(data.read_file(self.data_dir, dataset)[1]).digest())
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

    def metrics(self, rows: list[dict[str, Any]]) -> dict[str, Metric]:
        """{dataset: mean x 100}, for ROUGE sets {dataset/rouge_l_google}, then over all of them:
        avg: mean of the data sets' means; no value unless every selected data set has a row.
        n_empty: predictions without any text. n_recursion: rows too long for the official scorer.
        """
        result: dict[str, Metric] = {}
        groups: list[list[float]] = []
        for dataset in self.selected:
            own = [row for row in rows if row["fields"]["dataset"] == dataset]
            groups.append([100 * row["scores"]["score"] for row in own])
            result[dataset] = bootstrap(groups[-1])
            if DATA_SETS[dataset].metric in ROUGE:
                google = [100 * row["scores"]["rouge_l_google"] for row in own]
                result[f"{dataset}/rouge_l_google"] = bootstrap(google)
            if self.by_length:
                for part in BINS:
                    binned = [100 * row["scores"]["score"] for row in own if _bin(row["fields"]["length"]) == part]
                    result[f"{dataset}/{part}"] = bootstrap(binned)
        result["avg"] = mean_of_means(groups)
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
        path, content = data.read_file(self.data_dir, dataset)
        rows = data.read_rows(path, content)
        if len(rows) != DATA_SETS[dataset].rows:
            self._warn(f"{dataset}: {len(rows)} rows in {path}, the official set has {DATA_SETS[dataset].rows}")
        return path, rows

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def _example(
        self, where: str, dataset: str, prompt: str, row: dict[str, Any], all_classes: list[str] | None, model: Model
    ) -> Example:
        tokenizer = model.tokenizer
        ids = _tokens(tokenizer(prompt))
        before, text = len(ids), prompt
        if before > model.max_input:
            if self.truncation == "off":
                raise UserError(
                    f"{where}: the prompt has {before} tokens, {model.name} takes {model.max_input}; "
                    "use task.truncation=middle (the official way) or a model with a longer input"
                )
            text = "".join(
                tokenizer.decode(part, skip_special_tokens=True) for part in cut_middle(ids, model.max_input)
            )
            ids = _tokens(tokenizer(text))
        wanted = self.chat_template == "on" or (self.chat_template == "auto" and dataset not in NO_CHAT_TEMPLATE)
        if wanted and model.has_chat_template:
            # The template's text has the special tokens already.
            ids = _tokens(tokenizer(model.chat(text), add_special_tokens=False))
        newline = dataset == "samsum"  # the one set that ends at a newline, but not with nothing
        return Example(
            id=where,
            prompt_ids=ids,
            max_new_tokens=self.max_new_tokens or DATA_SETS[dataset].max_new_tokens,
            min_new_tokens=1 if newline else 0,
            stop_token_ids=tuple(_tokens(tokenizer("\n", add_special_tokens=False))[-1:]) if newline else (),
            fields={
                "group": dataset,  # what `limit` counts in
                "dataset": dataset,
                "answers": row["answers"],
                "all_classes": all_classes,
                "length": row.get("length"),
                "language": row.get("language"),
                "prompt_tokens_before": before,
                "prompt_tokens": len(ids),
                "truncated": before > model.max_input,
                "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
            },
        )


def cut_middle(ids: list[int], limit: int) -> tuple[list[int], list[int]]:
    """The two ends that the official truncation keeps of more than `limit` ids: int(limit / 2) each, so an odd limit
    loses one token more. They are decoded apart and joined as text, and tokenising that text again may change the
    number: the length that a row reports is counted after it. UserError for a limit of 1, whose half is nothing.
    """
    if limit < 2:
        raise UserError.of("model.max_input", limit, "at least 2 for middle truncation")
    half = limit // 2
    return ids[:half], ids[-half:]


def mean_of_means(groups: list[list[float]], n_resamples: int = 2000, seed: int = 0) -> Metric:
    """Mean over groups of each group's mean, with a 95 % bootstrap interval that resamples within every group.

    n counts the items. No value if a group is empty, no interval if one has a single item (it has no spread to show).
    """
    sizes = [len(group) for group in groups]
    empty: Metric = {"value": None, "ci_low": None, "ci_high": None, "n": sum(sizes)}
    if not sizes or min(sizes) == 0:
        return empty
    value = float(np.mean([np.mean(group) for group in groups]))
    if min(sizes) == 1:
        return {**empty, "value": value}
    rng = np.random.default_rng(seed)
    draws = [
        np.asarray(group)[rng.integers(len(group), size=(n_resamples, len(group)))].mean(axis=1) for group in groups
    ]
    low, high = np.quantile(np.mean(draws, axis=0), [0.025, 0.975])
    return {**empty, "value": value, "ci_low": float(low), "ci_high": float(high)}


def _ids(rows: list[dict[str, Any]]) -> list[str]:
    """The rows' own _id; "#<index in the file>" where it is missing or not the only one of its kind."""
    given = ["" if row.get("_id") is None else str(row["_id"]) for row in rows]
    seen = Counter(given)
    usable = [bool(name) and seen[name] == 1 and not name.startswith("#") for name in given]
    return [name if good else f"#{index}" for index, (name, good) in enumerate(zip(given, usable, strict=True))]


def _tokens(encoding: Any) -> list[int]:
    return list(encoding["input_ids"])


def _bin(length: int | None) -> str | None:
    return None if length is None else BINS[0] if length < 4000 else BINS[1] if length < 8000 else BINS[2]


def _number(rows: list[dict[str, Any]], flags: list[bool]) -> Metric:
    return {"value": sum(flags), "ci_low": None, "ci_high": None, "n": len(rows)}
