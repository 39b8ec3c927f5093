"""LongBench v1's 21 data sets and its official scorer: which metric each set has, and how a set's number is made.

Source: THUDM/LongBench at commit 2e00731f, LongBench/{pred,eval}.py and LongBench/config/dataset2maxlen.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fasa_bench import metrics
from fasa_bench.errors import UserError
from fasa_bench.tasks.longbench_data import read_rows


@dataclass(frozen=True)
class DataSet:
    """What the official code fixes for one data set. max_new_tokens: dataset2maxlen.json; rows: of the full set."""

    metric: Callable[..., float]
    max_new_tokens: int
    rows: int = 200


DATA_SETS = {
    "narrativeqa": DataSet(metrics.qa_f1, 128),
    "qasper": DataSet(metrics.qa_f1, 128),
    "multifieldqa_en": DataSet(metrics.qa_f1, 64, rows=150),
    "multifieldqa_zh": DataSet(metrics.qa_f1_zh, 64),
    "hotpotqa": DataSet(metrics.qa_f1, 32),
    "2wikimqa": DataSet(metrics.qa_f1, 32),
    "musique": DataSet(metrics.qa_f1, 32),
    "dureader": DataSet(metrics.rouge_l_zh, 128),
    "gov_report": DataSet(metrics.rouge_l, 512),
    "qmsum": DataSet(metrics.rouge_l, 512),
    "multi_news": DataSet(metrics.rouge_l, 512),
    "vcsum": DataSet(metrics.rouge_l_zh, 512),
    "trec": DataSet(metrics.classification, 64),
    "triviaqa": DataSet(metrics.qa_f1, 32),
    "samsum": DataSet(metrics.rouge_l, 128),
    "lsht": DataSet(metrics.classification, 64),
    "passage_count": DataSet(metrics.count, 32),
    "passage_retrieval_en": DataSet(metrics.retrieval, 32),
    "passage_retrieval_zh": DataSet(metrics.retrieval_zh, 32),
    "lcc": DataSet(metrics.code_similarity, 64, rows=500),
    "repobench-p": DataSet(metrics.code_similarity, 64, rows=500),
}
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
ENGLISH = tuple(name for name in DATA_SETS if name not in CHINESE)  # the two code sets among them
# The 15 columns of the FASA paper's Table 2: the English sets without samsum (its text counts 16 tasks).
TABLE2 = tuple(name for name in ENGLISH if name != "samsum")
# The official six categories; code counts in both languages.
CATEGORIES = (
    ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    ("hotpotqa", "2wikimqa", "musique", "dureader"),
    ("gov_report", "qmsum", "multi_news", "vcsum"),
    ("trec", "triviaqa", "samsum", "lsht"),
    ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
    ("lcc", "repobench-p"),
)
# The 13 sets of LongBench-E, which has files of its own: <dataset>_e.jsonl.
EVEN = tuple(name for name in ENGLISH if name not in ("narrativeqa", "musique", "qmsum"))


def _alike(datasets: Sequence[str]) -> dict[str, float]:
    return dict.fromkeys(datasets, 1.0)


def _by_category(datasets: Sequence[str]) -> dict[str, float]:
    """The mean over categories of the mean over a category's data sets."""
    members = [[name for name in category if name in datasets] for category in CATEGORIES]
    return {name: 1 / len(category) for category in members for name in category}


# Averages that are reported whenever all their data sets were asked for: {data set: its relative weight}. The last two
# are those of the benchmark's leaderboard.
AVERAGES = {
    "avg_table2": _alike(TABLE2),
    "avg_english": _alike(ENGLISH),
    "avg_chinese": _alike(CHINESE),
    "avg_retrieval": _alike(("passage_count", "passage_retrieval_en")),
    "avg_all": _alike(tuple(DATA_SETS)),
    "official_english": _by_category(ENGLISH),
    "official_chinese": _by_category((*CHINESE, *CATEGORIES[-1])),
}
FEW_SHOT = ("trec", "triviaqa", "samsum", "lsht")  # only the first line of the prediction is scored
NO_CHAT_TEMPLATE = (*FEW_SHOT, "lcc", "repobench-p")
ROUGE = (metrics.rouge_l, metrics.rouge_l_zh)


def official_score(
    dataset: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None, **options: Any
) -> float:
    """The official score of one prediction, in [0, 1]: the best over the answers.

    all_classes: of the LAST row of the file, which is what the official scorer uses for every row.
    options: of the metric (recursion_limit of the two ROUGE metrics).
    """
    metric = DATA_SETS[dataset].metric
    if dataset in FEW_SHOT:
        prediction = metrics.first_line(prediction)
    if metric is metrics.classification:
        if not all_classes:
            raise UserError(f'{dataset} needs the list "all_classes" in its last row')
        options["classes"] = all_classes
    return max((metric(prediction, answer, **options) for answer in answers), default=0.0)


def score_folder(folder: Path) -> tuple[dict[str, float], list[str]]:
    """Official scores of a folder of <dataset>.jsonl, rows {"pred", "answers", "all_classes", "length"}.

    Returns {dataset: mean over all its rows x 100, rounded to 2 decimals} and notes for the user. A missing folder, one
    without any data set, and a bad row are a UserError.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; expected one with files <dataset>.jsonl")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    notes = [f"{path.name} is not a LongBench data set: ignored" for path in files if _dataset(path) is None]
    scores = {}
    for dataset, path in ((name, path) for path in files if (name := _dataset(path))):
        rows = read_rows(path)
        mean = _mean(dataset, rows, path)
        scores[dataset] = mean
        if DATA_SETS[dataset].metric in ROUGE and (limited := _mean(dataset, rows, path, recursion_limit=True)) != mean:
            notes.append(
                f"{dataset}: the official scorer fails on texts too long for Python's recursion and gives {limited}"
            )
    if not scores:
        raise UserError(f"{folder} holds no file <dataset>.jsonl of {', '.join(DATA_SETS)}")
    return scores, notes


def _dataset(path: Path) -> str | None:
    return path.stem if path.suffix == ".jsonl" and path.stem in DATA_SETS else None


def _mean(dataset: str, rows: list[dict[str, Any]], path: Path, **options: Any) -> float:
    total = 0.0
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("pred"), str):
            raise UserError(f'{path}, row {number}: "pred" must be a text')
        try:
            total += official_score(dataset, row["pred"], row["answers"], rows[-1].get("all_classes"), **options)
        except UserError as error:
            raise UserError(f"{path}, row {number}: {error}") from error
    return round(100 * total / len(rows), 2)
