"""Tables, figures and the site of stored runs; reads run folders only, never a model.

python -m fasa_bench.report show|tables|figures|report|wandb [--results-dir results] [--only FIGURE ...] [RUN ...]
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

import pandas as pd
from rich.console import Console
from rich.table import Table

from fasa_bench import exhibit_tables, paper
from fasa_bench.errors import UserError
from fasa_bench.exhibits import Exhibit, Stored, build
from fasa_bench.experiments import load_experiments
from fasa_bench.latency_tables import markdown, timings
from fasa_bench.paper_checks import Check
from fasa_bench.site.claims import as_table, claims
from fasa_bench.site.evidence import Evidence
from fasa_bench.store import Run, load_run, report_runs, write_whole
from fasa_bench.tables import (
    Group,
    difference_table,
    grouped,
    is_timing,
    lower_is_better,
    numbers,
    span,
    table,
)
from fasa_bench.typeset import booktabs, markdown_table

__all__ = ["main", "print_table", "table", "write_figures", "write_tables"]

PRINTED_METRICS = 3  # more do not fit into 120 columns
CLAIMS = ("<!-- runs: claims -->", "<!-- end of runs -->")  # around what `update_document` fills in
WORDS = ("method", "status")  # columns set left
DETAILS = ["prefill s", "cached tokens", "sparse steps"]  # columns that neither a terminal nor a page has room for
NOTE = "In brackets: 95 % bootstrap interval over examples. Tokens read: mean per head and decode step."
PAIRED = "Difference to full KV on the same examples"
PAIRED_NOTE = (
    "In brackets: 95 % paired bootstrap interval. p: two-sided paired permutation test, not corrected for how many "
    "comparisons there are."
)


def print_table(runs: Sequence[Run], file: IO[str] | None = None) -> None:
    """Print one table per model and task, on stderr unless told otherwise."""
    console = Console(file=file) if file else Console(stderr=True)
    if not console.is_terminal:
        console.width = 120
    for group in grouped(runs):
        shown = group.main_metrics(PRINTED_METRICS)
        frame = _frame(group, shown).drop(columns=DETAILS)
        left_out = len(group.metrics) - len(shown)
        more = f" {left_out} more metrics: `python -m fasa_bench.report tables`." if left_out else ""
        console.print(_grid(frame, f"{NOTE}{more}", _title(group)), end="\n\n", markup=False)
        paired = _paired(group, shown)
        if len(paired) and group.differences:  # else every cell would say that there is nothing to compare with
            console.print(_grid(paired, PAIRED_NOTE, PAIRED), end="\n\n", markup=False)


def _grid(frame: pd.DataFrame, note: str, title: str) -> Table:
    grid = Table(title=title, title_justify="left", caption=note, caption_justify="left", box=None)
    for column in frame.columns:
        grid.add_column(
            _two_lines(column),
            justify="left" if column in WORDS else "right",
            no_wrap=column != "method",
            overflow="fold",
        )
    for name, *cells in frame.itertuples(index=False):
        grid.add_row(name, *map(_two_lines, cells))
    return grid


def write_tables(results_dir: str | Path, runs: Sequence[Run] | None = None) -> list[Path]:
    """Write the tables of conf/experiment, and one of all runs: .md and .tex as text, .csv at full precision.

    Returns the paths. A table of an experiment has a .json too, which names the runs behind every cell.
    """
    runs = _some(results_dir, runs)
    groups = grouped(runs)
    measured = timings(runs)
    files = {
        **({"latency.md": markdown(measured)} if measured else {}),
        "runs.md": "\n".join([*map(_markdown, groups), NOTE, ""]),
        "runs.tex": "\n".join(["% needs \\usepackage{booktabs,graphicx}", *map(_latex, groups)]),
        "runs.csv": numbers(runs).to_csv(index=False, lineterminator="\n"),
    }
    places = exhibit_tables.places(runs, results_dir)
    exhibits = _exhibits(runs)
    for exhibit in exhibits.values():
        if exhibit.kind == "table":
            files |= exhibit_tables.files(exhibit, places)
    files["claims.md"] = _claims(exhibits, runs).markdown() + "\n"
    return [_write(Path(results_dir) / "tables" / name, text.encode()) for name, text in files.items()]


def update_document(path: Path, results_dir: str | Path) -> None:
    """Fill the block `<!-- runs: claims -->` of a document in anew: the paper's claims beside what these runs give.

    Raises UserError for a file that cannot be read or has no such block.
    """
    first, last = CLAIMS
    try:
        before, opened, rest = path.read_text("utf-8").partition(first)
    except (OSError, ValueError) as error:
        raise UserError.of("--update", str(path), f"cannot be read ({error})") from error
    _, closed, after = rest.partition(last)
    if not (opened and closed):
        raise UserError.of("--update", str(path), f"must have a block from {first} to {last}")
    runs = report_runs(results_dir)
    _write(path, f"{before}{first}\n{_claims(_exhibits(runs), runs).markdown()}\n{last}{after}".encode())


def _exhibits(runs: Sequence[Run]) -> dict[str, Exhibit]:
    stored, values = Stored(runs), paper.load()
    return {name: build(each, values.get(name), stored) for name, each in load_experiments().items()}


def _claims(exhibits: Mapping[str, Exhibit], runs: Sequence[Run]) -> Check:
    return as_table(claims(paper.load(), Evidence(exhibits, runs)))


def write_figures(
    results_dir: str | Path, runs: Sequence[Run] | None = None, name: str | None = None, only: Sequence[str] = ()
) -> list[Path]:
    """Write the figures of conf/experiment, or of those the ones that `only` names; returns the paths.

    name: write figures/<name>.pdf and .png instead, scores and decode time of all runs over the tokens that they read.
    """
    from fasa_bench import drawings, figures  # not at the top: tables need no matplotlib

    runs = _some(results_dir, runs)
    if name is None:
        drawn: Iterable[tuple[str, bytes]] = drawings.draw(runs, results_dir, only)
    else:
        groups = grouped(run for run in runs if not is_timing(run))
        drawn = ((f"{name}.{kind}", data) for kind, data in figures.draw(groups).items())
    return [_write(Path(results_dir) / "figures" / file, data) for file, data in drawn]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m fasa_bench.report", description="Tables and figures of stored runs."
    )
    parser.add_argument("what", choices=["tables", "figures", "report", "wandb", "show"])
    parser.add_argument("folders", nargs="*", metavar="RUN_FOLDER", help="only these runs (default: all)")
    parser.add_argument("--results-dir", default="results", help="where runs are, and tables/ and figures/ go")
    parser.add_argument("--only", nargs="+", default=[], metavar="FIGURE", help="figures: these, such as figure4")
    parser.add_argument("--update", type=Path, metavar="FILE", help="tables: the claims in this document too")
    parser.add_argument("--figure-name", metavar="NAME", help="figures: one of all runs, of this name, and no other")
    options = parser.parse_intermixed_args(arguments)
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    try:
        runs = [_load(folder) for folder in options.folders] or None
        if options.what == "show":
            print_table(_some(options.results_dir, runs), file=sys.stdout)
        elif options.what == "tables":
            print(*write_tables(options.results_dir, runs), sep="\n")
            if options.update:
                update_document(options.update, options.results_dir)
        elif options.what == "report":
            from fasa_bench.site.build import write_site  # not at the top: tables need no templates

            print(write_site(options.results_dir, runs))
        elif options.what == "wandb":
            from fasa_bench.publish import publish

            print(publish(options.results_dir, runs))
        else:
            print(*write_figures(options.results_dir, runs, options.figure_name, options.only), sep="\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _load(folder: str) -> Run:
    try:
        return load_run(folder)
    except (OSError, ValueError) as error:
        raise UserError.of(
            "RUN_FOLDER", folder, f"must be a run folder, as named by a `run:` line ({error})"
        ) from error


def _some(results_dir: str | Path, runs: Sequence[Run] | None) -> Sequence[Run]:
    runs = report_runs(results_dir) if runs is None else runs
    if not runs:
        raise UserError(
            f"there are no runs under {Path(results_dir) / 'runs'}: start one with `python run.py`, "
            "or name another folder with --results-dir"
        )
    return runs


def _title(group: Group) -> str:
    return f"{group.model} · {group.task}: {group.context}"


def _frame(group: Group, shown: Sequence[str]) -> pd.DataFrame:
    """The group's part of `table`, ready for people: metrics say where better is and how many examples they have."""
    frame = table([run for _, run in group.runs])
    frame = frame.drop(columns=["model", "task", *(name for name in group.metrics if name not in shown)])
    return frame.rename(columns={name: _heading(group, name) for name in shown})


def _paired(group: Group, shown: Sequence[str]) -> pd.DataFrame:
    """The group's part of `difference_table`, ready for people."""
    found = group.differences.values()

    def heading(metric: str) -> str:
        counts = [int(pairs[metric]["n"] or 0) for pairs in found if metric in pairs]
        return f"{metric} {'↓' if lower_is_better(metric) else '↑'}" + (f" (n={span(counts)})" if any(counts) else "")

    return difference_table(group, shown).rename(columns={name: heading(name) for name in shown})


def _heading(group: Group, metric: str) -> str:
    entries = [(run.summary.get("metrics") or {}).get(metric) or {} for _, run in group.runs]
    counts = [entry["n"] for entry in entries if entry.get("n")]
    n = f" (n={span(counts)})" if counts else ""
    return f"{metric} {'↓' if lower_is_better(metric) else '↑'}{n}"


def _two_lines(text: str) -> str:
    return re.sub(r" (?=p[=<]|\((?:n=|\d+ done)|\+ |ms/|MiB|read)", "\n", text)


def _markdown(group: Group) -> str:
    parts = [f"## {group.model} · {group.task}", f"{group.context}.", _lines(_frame(group, group.metrics))]
    paired = _paired(group, group.metrics)
    if len(paired):
        parts += [f"{PAIRED}. {PAIRED_NOTE}", _lines(paired)]
    return "\n\n".join(parts) + "\n"


def _lines(frame: pd.DataFrame) -> str:
    return markdown_table(frame.columns.tolist(), _cells(frame), _align(frame))


def _latex(group: Group) -> str:
    frame = _frame(group, group.metrics).drop(columns=DETAILS)
    paired = _paired(group, group.metrics)
    if len(group.metrics) > PRINTED_METRICS:  # intervals have no room; they are in runs.csv
        frame, paired = (part.map(lambda cell: re.sub(r" \[.*?\]", "", cell)) for part in (frame, paired))
    tables = [_booktabs(frame, f"{_title(group)}. {NOTE}")]
    if len(paired) and group.differences:
        tables.append(_booktabs(paired, f"{group.model} · {group.task}. {PAIRED}. {PAIRED_NOTE}"))
    return "\n".join(tables)


def _booktabs(frame: pd.DataFrame, caption: str) -> str:
    return booktabs(frame.columns.tolist(), [[row] for row in _cells(frame)], _align(frame), caption)


def _cells(frame: pd.DataFrame) -> list[list[str]]:
    return [[str(cell) for cell in row] for row in frame.to_numpy().tolist()]


def _align(frame: pd.DataFrame) -> str:
    return "".join("l" if column in WORDS else "r" for column in frame.columns)


def _write(path: Path, content: bytes) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


if __name__ == "__main__":
    sys.exit(main())
