"""Where FASA's paper (arXiv 2602.03152v3) contradicts itself, computed from results/paper.

python -m fasa_bench.paper [--update docs/reproduction.md]

Every check is a function of the paper's values that returns a table and one sentence. A document shows them between
`<!-- check: NAME -->` and `<!-- end -->`, which `--update` fills in anew.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fasa_bench.errors import UserError
from fasa_bench.paper import PAPER, RUN_KEYS, Value, load
from fasa_bench.paper_claims import (
    EPSILON,
    Paper,
    compression_factor,
    decimals,
    number,
    pairs_of_sets,
    read_off_speedup,
    recomputed,
)

Row = tuple[str, ...]
ROUNDING = 0.1  # of a mean of cells with one decimal: half of it from the cells, half from the mean itself
LABELS = {"fkv": "FKV", "oracle": "Oracle", "quest": "Quest", "streamingllm": "Stream", "snapkv": "SnapKV"}
LABELS |= {"h2o": "H2O", "rkv": "R-KV", "fasa": "FASA"}


@dataclass(frozen=True)
class Check:
    """title: the question; finding: the answer in a sentence; columns and rows: its numbers."""

    title: str
    finding: str
    columns: Row
    rows: Sequence[Row]

    def markdown(self) -> str:
        lines = [self.columns, tuple("---:" if _right(self.rows, i) else "---" for i in range(len(self.columns)))]
        table = "\n".join(f"| {' | '.join(row)} |" for row in (*lines, *self.rows))
        return f"{self.finding}\n\n{table}" if self.rows else self.finding


# --- the checks


def claims(paper: Paper) -> Check:
    """Numbers of the text beside what tables, figures and formulas give."""
    rows, wrong, unsure = [], 0, 0
    for each in recomputed(paper):
        verdict = "yes" if each.holds else "**no**" if each.sure else "no (unsure)"
        texts = (f"{value:.4g} {each.claim.unit}" for value in (each.claim.value, each.value))
        rows.append((each.claim.text, *texts, each.source, verdict))
        wrong, unsure = wrong + (verdict == "**no**"), unsure + (verdict == "no (unsure)")
    finding = (
        f"{wrong} of {len(rows)} numbers in the text do not agree with the paper's own tables and formulas, "
        f"{unsure} more not with points that others read off a figure."
    )
    return Check("Numbers in the text", finding, ("claim", "text", "recomputed", "from", "agrees"), rows)


def averages(paper: Paper) -> Check:
    """Table 2's AVG against the mean of its 15 columns; what a 16th column would have to be to explain it."""
    rows, total = [], 0
    for value in paper["table2"].find(metric="avg_table2"):
        total += 1
        printed, cells = number(value), _columns(paper, value)
        off = printed - statistics.mean(cells)
        if abs(off) > ROUNDING + EPSILON:
            hidden = (len(cells) + 1) * printed - sum(cells)
            means = f"{statistics.mean(cells):.2f}"
            rows.append((_model(value), _method(value), f"{printed:.1f}", means, f"{off:+.2f}", f"{hidden:.1f}"))
    finding = (
        f"{len(rows)} of {total} AVG cells differ from the mean of their columns by more than rounding can explain "
        f"({ROUNDING:g})."
    )
    columns = ("model", "row", "AVG printed", "mean of 15", "difference", "16th column that would explain it")
    return Check("Table 2: AVG", finding, columns, rows)


def relative(paper: Paper) -> Check:
    """FASA and SnapKV against full KV, by the printed AVG and by the printed columns."""
    rows, signs = [], []
    for full in paper["table2"].find(metric="avg_table2", method="fkv"):
        base, base_mean = number(full), statistics.mean(_columns(paper, full))
        for method in ("fasa", "snapkv"):
            value = paper["table2"].find(metric="avg_table2", method=method, model=full.model)[0]
            average, mean = number(value), statistics.mean(_columns(paper, value))
            rows.append(
                (
                    *(_model(value), _method(value), f"{average - base:+.1f}", f"{mean - base_mean:+.2f}"),
                    *(f"{100 * average / base:.1f}", f"{100 * mean / base_mean:.1f}"),
                )
            )
            if round(average - base, 1) > 0 >= round(mean - base_mean, 2):
                signs.append(f"{_method(value)} on {_model(value)}")
    finding = f"Ahead of full KV by AVG and not by the columns: {', '.join(signs) or 'nobody'}."
    columns = ("model", "row", "points by AVG", "points by columns", "% of FKV by AVG", "% by columns")
    return Check("Table 2: relative to full KV", finding, columns, rows)


def arithmetic(paper: Paper) -> Check:
    """Cells that follow from others of the paper: how many do not."""
    cells: dict[str, list[tuple[float, float]]] = {}
    for value in paper["table2"].find(metric="avg_difference_to_fkv"):
        own = paper["table2"].number(metric="avg_table2", model=value.model, method=value.method)
        full = paper["table2"].number(metric="avg_table2", model=value.model, method="fkv")
        cells.setdefault("Table 2, difference of AVG to FKV", []).append((number(value), own - full))
    for value in paper["table4"].find(metric="gain"):
        wanted = {"metric": value.dataset, "budget": value.budget}
        both = [paper["table4"].number(method=name, **wanted) for name in ("fasa", "fasa_pyramidkv")]
        cells.setdefault("Table 4, gain", []).append((number(value), both[1] - both[0]))
    for value in paper["table5"].find(metric="avg"):
        row = paper["table5"].series(metric="qasper", calibration_k=value.get("calibration_k"))
        cells.setdefault("Table 5, AVG", []).append((number(value), statistics.mean(row)))
    for value in paper["table6"].find(metric="cv"):
        scores = paper["table6"].series(metric=value.dataset, method="fasa")
        spread = statistics.stdev(scores) / statistics.mean(scores)
        cells.setdefault("Table 6, CV", []).append((number(value), spread))
    for value in paper["table10"].find(metric="overlap_avg"):
        row = paper["table10"].series(metric="overlap", model=value.model, calibration=value.get("calibration"))
        cells.setdefault("Table 10, Avg. with the diagonal", []).append((number(value), statistics.mean(row)))
    rows = []
    for name, found in cells.items():
        unit = 10.0 ** -max(len(f"{printed:g}".partition(".")[2]) for printed, _ in found)
        differences = [abs(printed - computed) for printed, computed in found]
        wrong = sum(each > unit / 2 + EPSILON for each in differences)
        rows.append((name, str(len(found)), str(wrong), f"{max(differences):.4f}"))
    finding = "Cells that follow from other cells; *off*: by more than half a unit of their last digit."
    return Check("Cells that follow from others", finding, ("cells", "how many", "off", "largest difference"), rows)


def granularity(paper: Paper) -> Check:
    """Which shares of right answers a pass@1 can be: of 500 problems, of 30, of 30 times 5 or 16 answers."""
    rows: list[Row] = []
    odd: list[str] = []
    cut: list[str] = []
    for model in dict.fromkeys(value.model for value in paper["table3"].values):
        for task, answers in {"math500": (500,), "aime24": (30, 150, 480)}.items():
            found = paper["table3"].find(metric="pass@1", model=model, task=task)
            unfit = {n: [value for value in found if not is_share(number(value), n)] for n in answers}
            rows += [(_model(found[0]), task, f"k/{n}", str(len(found)), str(len(unfit[n]))) for n in answers]
            none = [value for value in found if all(value in unfit[n] for n in answers)]
            for value in none:
                name = f"{number(value):g} ({_model(value)}, {task}, {_method(value)}{_at(value)})"
                (cut if any(is_share(number(value), n, cut=True) for n in answers) else odd).append(name)
    finding = f"None of the shares: {'; '.join(odd)}. Only if digits were cut off instead of rounded: {'; '.join(cut)}."
    return Check("Table 3: shares of right answers", finding, ("model", "task", "share", "cells", "unfit"), rows)


def lengths(paper: Paper) -> Check:
    """Table 3: TOTAL less DEC should be PREF."""
    table, rows, total = paper["table3"], [], 0
    for whole in table.find(metric="tokens/total"):
        same = {"model": whole.model, "method": whole.method, "task": whole.task}
        prefill, decode = (table.number(metric=f"tokens/{part}", **same) for part in ("prefill", "decode"))
        total += 1
        if number(whole) - decode != prefill:
            rows.append((_model(whole), str(whole.task), _method(whole), f"{number(whole) - decode:g}", f"{prefill:g}"))
    finding = f"{len(rows)} of {total} lengths do not add up."
    return Check("Table 3: lengths", finding, ("model", "task", "row", "TOTAL - DEC", "PREF"), rows)


def repeated(paper: Paper) -> Check:
    """Table 3: rows that stand there twice."""
    series: dict[tuple[str, str, str], list[float]] = {}
    for value in paper["table3"].find(metric="pass@1"):
        if value.budget:
            series.setdefault((_model(value), str(value.task), _method(value)), []).append(number(value))
    twice = [(a, b) for a, b in combinations(series, 2) if series[a] == series[b]]
    rows = [(a[1], f"{a[2]}, {a[0]}", f"{b[2]}, {b[0]}", ", ".join(f"{x:g}" for x in series[a])) for a, b in twice]
    finding = f"{len(rows)} pair{'s' * (len(rows) != 1)} of rows with the same numbers."
    return Check("Table 3: equal rows", finding, ("task", "row", "and row", "numbers"), rows)


def across(paper: Paper) -> Check:
    """The same quantity in two tables. Calibration with K = 256 counts as the default, as in most captions."""
    places: dict[tuple[object, ...], list[Value]] = {}
    for place in paper.values():
        for value in place.values:
            if value.confidence == "exact" and value.model and value.task and value.how == "printed":
                others = {**value.keys}
                if others.pop("calibration_k", 256) == 256 and not others:
                    places.setdefault((value.metric, *map(value.get, RUN_KEYS)), []).append(value)
    shared = [values for values in places.values() if len(values) > 1]
    rows = []
    for values in shared:
        if len({value.value for value in values}) > 1:
            rows.append((values[0].source, f"{values[0].value:g}", values[1].source, f"{values[1].value:g}"))
    finding = f"{len(rows)} of {len(shared)} quantities that stand in two places differ between them."
    return Check("The same quantity in two places", finding, ("place", "value", "other place", "value"), rows)


def base(paper: Paper) -> Check:
    """Whether Table 6's row Base is full KV or a calibration: its distance to the rows of Table 2."""
    given = paper["table6"].find(method="fkv")
    rows = []
    for method in dict.fromkeys(value.method for value in paper["table2"].values):
        there = [paper["table2"].number(metric=value.metric, model=value.model, method=method) for value in given]
        far = [abs(number(value) - other) for value, other in zip(given, there, strict=True)]
        rows.append((LABELS[str(method)], f"{max(far):.1f}", f"{statistics.mean(far):.2f}"))
    rows.sort(key=lambda row: float(row[2]))
    finding = f"Nearest to Base is the row {rows[0][0]}: at most {rows[0][1]} away."
    return Check("Table 6: what Base is", finding, ("row of Table 2, Llama3.1-8B", "largest", "mean distance"), rows)


def overlap(paper: Paper) -> Check:
    """Table 10: pairs of calibration sets that do not exceed the 70 % that the text claims for all."""
    limit, pairs = paper["table10"].claims["above"].value, pairs_of_sets(paper)
    low = [value for value in pairs if number(value) <= limit]
    rows = [(_model(value), f"{value.get('calibration')}, {value.get('other')}", f"{value.value:.1f}") for value in low]
    mean = statistics.mean(number(value) for value in pairs)
    printed = statistics.mean(paper["table10"].series(metric="overlap"))
    finding = (
        f"{len(low)} of {len(pairs)} pairs are at or below {limit:g} %. The mean is {mean:.1f} % over pairs, and "
        f"{printed:.1f} % as the Avg. column counts, with each set's own 100."
    )
    return Check("Table 10: overlap", finding, ("model", "pair", "overlap %"), rows)


def random_row(paper: Paper) -> Check:
    """Table 1: K random tokens of t agree in K/t with any other K, which tells t."""
    found = paper["table1"].find(method="random")
    implied = [100 * float(value.budget or 0) / number(value) for value in found]
    rows = [(str(value.budget), f"{number(value):.1f}", f"{t:,.0f}") for value, t in zip(found, implied, strict=True)]
    finding = f"One t should explain the whole row; its cells imply {min(implied):,.0f} to {max(implied):,.0f}."
    return Check("Table 1: Random", finding, ("K", "agreement %", "t it implies"), rows)


def compression(paper: Paper) -> Check:
    """Equation 10 by the share of the tokens that the budget is; D.1 speaks of 8 times at a tenth."""
    where = paper["headline"].claims["compression"].where
    share = float(where["dominant_share"])
    rows = [(f"{b:g}", f"{compression_factor(share, b):.2f}") for b in (0.0, 0.01, 0.05, float(where["budget_share"]))]
    finding = f"The text's {paper['headline'].claims['compression'].value:g} times need a budget of next to no tokens."
    return Check("FASA-M: memory by Equation 10", finding, ("b / L", "times smaller than full KV"), rows)


def speedup(paper: Paper) -> Check:
    """Figure 7: the times that were read off it against the speedup that was printed or read off."""
    rows = []
    for value in paper["figure7"].find(metric="speedup"):
        context = value.get("context")
        try:
            times = f"{read_off_speedup(paper, context):.2f}"
        except LookupError:
            continue  # no time of full KV there
        rows.append((f"{context}", f"{number(value):g}", value.how, times))
    finding = "; ".join(f"at {row[0]} tokens {row[1]} ({row[2]}) and {row[3]} by the times read off" for row in rows)
    return Check("Figure 7: speedup of FASA-C", finding, ("context", "speedup", "how", "by the times"), rows)


CHECKS: tuple[Callable[[Paper], Check], ...] = (
    *(claims, averages, relative, arithmetic, granularity, lengths, repeated),
    *(across, base, overlap, random_row, compression, speedup),
)


def is_share(percent: float, n: int, *, cut: bool = False) -> bool:
    """Whether some whole k gives k/n that is printed so, rounded (or `cut` off) to at least one decimal."""
    step = 10.0 ** -max(1, decimals(percent))
    low, high = (percent, percent + step - EPSILON) if cut else (percent - step / 2, percent + step / 2)
    return math.floor((high + EPSILON) * n / 100) >= math.ceil((low - EPSILON) * n / 100)


def _columns(paper: Paper, average: Value) -> list[float]:
    """The printed columns of the row of an AVG."""
    row = paper["table2"].find(model=average.model, method=average.method)
    return [number(value) for value in row if value.dataset]


# --- text


def _model(value: Value) -> str:
    return str(value.model)


def _method(value: Value) -> str:
    return LABELS[str(value.method)]


def _at(value: Value) -> str:
    return f", budget {value.budget}" if value.budget else ""


def _right(rows: Sequence[Row], column: int) -> bool:
    """Whether a column holds numbers only, which are set right."""
    return bool(rows) and all(re.fullmatch(r"[+-]?[\d.,]+", row[column]) for row in rows)


def update(document: str, found: Mapping[str, Check]) -> str:
    """The document with every marked block filled in anew. Raises UserError for a check that does not exist."""

    def fill(match: re.Match[str]) -> str:
        if match[1] not in found:
            raise UserError.of("check", match[1], f"must be one of {', '.join(found)}")
        return f"<!-- check: {match[1]} -->\n{found[match[1]].markdown()}\n<!-- end -->"

    return re.sub(r"<!-- check: (\S+) -->.*?<!-- end -->", fill, document, flags=re.DOTALL)


def run_checks(paper: Paper) -> dict[str, Check]:
    return {check.__name__: check(paper) for check in CHECKS}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fasa_bench.paper", description="The paper against itself.")
    parser.add_argument("--paper", type=Path, default=PAPER, help="folder of the paper's values")
    parser.add_argument("--update", type=Path, metavar="FILE", help="fill the marked blocks of a document in anew")
    given = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 140
    try:
        found = run_checks(load(given.paper))
        if given.update:
            given.update.write_text(update(given.update.read_text("utf-8"), found), "utf-8")
            return 0
    except UserError as error:
        Console(stderr=True).print(str(error), markup=False)
        return 2
    for check in found.values():
        grid = Table(title=check.title, title_justify="left", caption=check.finding, caption_justify="left", box=None)
        for index, column in enumerate(check.columns):
            grid.add_column(column, justify="right" if _right(check.rows, index) else "left")
        for row in check.rows:
            grid.add_row(*(cell.replace("**", "") for cell in row))
        console.print(grid, end="\n\n", markup=False)
    return 0
