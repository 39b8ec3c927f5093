"""Exhibits as files: Markdown and LaTeX for people, CSV at full precision, JSON that says which runs a cell came from.

A cell of a printed table stands on up to four lines: ours with its 95 % interval, the paper's, how much ours is above,
and ours less full KV's on the same examples with that difference's own interval. What no run gave says "not run".
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fasa_bench.exhibits import Cell, Exhibit, Grid
from fasa_bench.paper import Value
from fasa_bench.statistics import Difference
from fasa_bench.store import Run
from fasa_bench.tables import difference, lower_is_better, number, span
from fasa_bench.typeset import booktabs, markdown_table

WIDE = 8  # tables of more columns than that are turned: their columns become rows
PROFILE = {"paper": "The paper's models", "mini": "The embedded model"}
AGAINST = "− full KV: ours less full KV's on the same examples, with the difference's own 95 % interval."
P_VALUE = "p: two-sided paired permutation test."
OUTSIDE = "*: the paper's number is outside our interval."
LEGEND = {"≈": "≈: read off a drawing, or its row was inferred.", "?": "?: sources of the paper's number disagree."}
LEGEND |= {"†": "†: some examples are missing.", "*": OUTSIDE}
# columns of the CSV, after what tells the cell from the others
NUMBERS = [
    *("unit", "paper", "paper_low", "paper_high", "paper_confidence", "ours", "ci_low", "ci_high", "n"),
    *("ours_minus_paper", "verdict", "minus_full_kv", "minus_full_kv_low", "minus_full_kv_high", "p_value", "pairs"),
    *("state", "runs"),
]

Group = list[list[str]]


def files(exhibit: Exhibit, places: Mapping[str, str]) -> dict[str, str]:
    """{file name: content}. places: {run id: its folder, as the JSON is to name it}."""
    return {
        f"{exhibit.id}.md": markdown(exhibit),
        f"{exhibit.id}.tex": latex(exhibit),
        f"{exhibit.id}.csv": as_csv(exhibit),
        f"{exhibit.id}.json": as_json(exhibit, places),
    }


def places(runs: Sequence[Run], results_dir: str | Path) -> dict[str, str]:
    """{run id: path of its folder, from the results folder}."""
    return {run.folder.name: Path(os.path.relpath(run.folder, results_dir)).as_posix() for run in runs}


def markdown(exhibit: Exhibit) -> str:
    """To read: grids with something measured first, each with its legend, notes at the end."""
    parts = [f"# {_title(exhibit)}"]
    for grid in _measured_first(exhibit):
        header, groups = _lines(exhibit, grid)
        rows = [row for group in groups for row in group]
        parts += [f"## {_heading(grid)}", f"{_unit(grid)}{_agreement(grid)}"]
        parts += [markdown_table(header, rows, _align(header)), *_legend(grid, rows)]
    if exhibit.notes:
        parts += ["## Notes", "\n".join(f"- {note}" for note in exhibit.notes)]
    return "\n\n".join([*parts, f"The runs behind every cell: [{exhibit.id}.json]({exhibit.id}.json)."]) + "\n"


def latex(exhibit: Exhibit) -> str:
    """To put into a paper: one float a grid, with fewer digits than the Markdown."""
    parts = ["% needs \\usepackage{booktabs,graphicx}"]
    of_paper = f" ({exhibit.name} of the paper)" if exhibit.name != exhibit.title else ""
    for index, grid in enumerate(_measured_first(exhibit)):
        header, groups = _lines(exhibit, grid, brief=True)
        legend = _legend(grid, [row for group in groups for row in group])
        caption = f"{exhibit.title}{of_paper}. {_heading(grid)}. {_unit(grid)}{_agreement(grid)}"
        notes = [*legend, *([] if index else map(_sentence, exhibit.notes))]
        parts.append(booktabs(header, groups, _align(header), caption, notes))
    return "\n".join(parts)


def as_csv(exhibit: Exhibit) -> str:
    """One line a cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["grid", "profile", "row", "column", *NUMBERS])
    for grid in exhibit.grids:
        for row, column, cell in _cells(grid):
            found, paper = cell.difference or {}, cell.paper
            writer.writerow(
                [
                    grid.title, grid.profile, row, column, grid.unit_of(row, column),
                    *((paper.value, paper.low, paper.high, paper.confidence) if paper else [None] * 4),
                    cell.value, cell.low, cell.high, cell.n, _above(cell), cell.verdict or None,
                    *(found.get(key) for key in ("difference", "ci_low", "ci_high", "p_value", "n")),
                    cell.state, " ".join(cell.runs),
                ]
            )  # fmt: skip
    return out.getvalue()


def as_json(exhibit: Exhibit, places: Mapping[str, str]) -> str:
    """Everything of an exhibit; a cell's `runs` are folders, from the results folder."""
    grids = []
    for grid in exhibit.grids:
        told = {key: getattr(grid, key) for key in ("title", "profile", "row_key", "column_key", "rows", "columns")}
        cells = [
            {
                "row": row,
                "column": column,
                "unit": grid.unit_of(row, column),
                **{key: getattr(cell, key) for key in ("value", "low", "high", "n", "state", "verdict", "simulated")},
                "difference_to_full_kv": cell.difference,
                "paper": None
                if cell.paper is None
                else {key: value for key, value in asdict(cell.paper).items() if value not in (None, {}, ())},
                "ours_minus_paper": _above(cell),
                "runs": [places.get(name, name) for name in cell.runs],
            }
            for row, column, cell in _cells(grid)
        ]
        grids.append({**told, "keys": dict(grid.keys), "average": grid.average, "cells": cells})
    whole = {"id": exhibit.id, "title": exhibit.title, "notes": exhibit.notes, "grids": grids}
    return json.dumps(whole, ensure_ascii=False, indent=1) + "\n"


def _measured_first(exhibit: Exhibit) -> list[Grid]:
    return sorted(exhibit.grids, key=lambda grid: grid.is_empty)


def _cells(grid: Grid) -> Iterator[tuple[Any, Any, Cell]]:
    return ((row, column, grid.cell(row, column)) for row in grid.rows for column in grid.columns)


def _title(exhibit: Exhibit) -> str:
    return exhibit.title if exhibit.name == exhibit.title else f"{exhibit.name}: {exhibit.title}"


def _sentence(note: str) -> str:
    return f"{note[0].upper()}{note[1:]}."


def _heading(grid: Grid) -> str:
    return f"{grid.title or PROFILE[grid.profile]}{': not run' if grid.is_empty else ''}"


def _unit(grid: Grid) -> str:
    """What the numbers of a grid are, in one sentence."""
    if grid.metrics:
        return "Scores in %."
    unit = "Perplexity" if grid.unit == "perplexity" else f"In {grid.unit}"
    return f"{unit}, {'lower' if grid.better == 'low' else 'higher'} is better."


def _agreement(grid: Grid) -> str:
    verdicts = [cell.verdict for _, _, cell in _cells(grid) if cell.verdict in ("agrees", "differs")]
    if not verdicts:
        return ""
    return f" The paper's number lies in our 95 % interval in {verdicts.count('agrees')} of {len(verdicts)} cells."


def _lines(exhibit: Exhibit, grid: Grid, brief: bool = False) -> tuple[list[str], list[Group]]:
    """Header, and the lines of each row; a wide grid is turned. brief: with fewer digits, and without p."""
    turned = len(grid.columns) > WIDE
    outer, inner = (grid.columns, grid.rows) if turned else (grid.rows, grid.columns)

    def cell(line: Any, place: Any) -> tuple[Any, Any, Cell]:
        row, column = (place, line) if turned else (line, place)
        return row, column, grid.cell(row, column)

    header = [_corner(grid, turned), ""]
    for place in inner:
        alike = (cell(line, place)[2] for line in outer if line not in grid.units)
        header.append(_label(exhibit, grid, place) + _count(alike))
    groups = []
    for line in outer:
        found = [cell(line, place) for place in inner]
        cells = [one for _, _, one in found]
        units = [grid.unit_of(row, column) for row, column, _ in found]
        group = [["ours", *(_ours(one, unit, brief) for one, unit in zip(cells, units, strict=True))]]
        if any(one.paper for one in cells):
            group.append(["paper", *(_papers(one.paper) for one in cells)])
        if any(_above(one) is not None for one in cells):
            group.append(["ours − paper", *(_above_text(one, unit) for one, unit in zip(cells, units, strict=True))])
        if any(one.difference for one in cells):
            group.append(["− full KV", *(_difference(one.difference, brief) for one in cells)])
        label = _label(exhibit, grid, line)
        groups.append([[label if index == 0 else "", *texts] for index, texts in enumerate(group)])
    if all(len(group) == 1 for group in groups):  # all are ours
        return [header[0], *header[2:]], [[[row[0], *row[2:]] for row in group] for group in groups]
    return header, groups


def _corner(grid: Grid, turned: bool) -> str:
    """What rows and columns are, where their names alone do not tell."""
    keys = [grid.column_key, grid.row_key] if turned else [grid.row_key, grid.column_key]
    told = [", ".join(part.rpartition(".")[2].replace("_", " ") for part in key.split("/")) for key in keys]
    return " / ".join(text for text in told if text not in ("metric", "dataset", "model", "method", ""))


def _align(header: Sequence[str]) -> str:
    left = 2 if header[1] == "" else 1
    return "l" * left + "r" * (len(header) - left)


def _label(exhibit: Exhibit, grid: Grid, name: Any) -> str:
    told = exhibit.label(name)
    if name in grid.metrics:
        unit = grid.unit_of(name, name)
        return f"{told} {'↓' if lower_is_better(name) else '↑'}" + (f", {unit}" if unit not in ("%", told) else "")
    return f"{told}, {grid.units[name]}" if name in grid.units else told


def _count(cells: Iterator[Cell]) -> str:
    counts = [cell.n for cell in cells if cell.n]
    return f" (n={span(counts)})" if counts else ""


def _ours(cell: Cell, unit: str, brief: bool) -> str:
    if cell.value is None:
        return cell.state if cell.state in ("not run", "not given") else "not run"
    text = _number(cell.value, unit) + ("†" if cell.state == "partial" else "")
    if cell.low is None or cell.high is None:
        return text
    low, high = (_short(value, unit) if brief else _number(value, unit) for value in (cell.low, cell.high))
    return f"{text} [{low}, {high}]"


def _difference(found: Difference | None, brief: bool) -> str:
    if not found:
        return ""
    value, low, high = (found[key] for key in ("difference", "ci_low", "ci_high"))
    if not brief or value is None or low is None:
        return difference(found)
    text = [number(None if part is None else float(part), 2) for part in (value, low, high)]
    return f"{'+' if value > 0 else ''}{text[0]} [{text[1]}, {text[2]}]"


def _short(value: float, unit: str) -> str:
    return number(float(value), 2 if unit in ("%", "points") else 3)


def _number(value: float, unit: str) -> str:
    """Per cent as the paper prints them, tokens whole, the rest with the digits that tell something."""
    if unit in ("%", "points"):
        return f"{value:.1f}" if abs(value) >= 1 or abs(value) < 0.005 else f"{value:.2f}"
    if unit == "tokens":
        return f"{value:,.0f}"
    return number(float(value), 3 if unit in ("ms", "ratio", "times") else 4)


def _papers(value: Value | None) -> str:
    """With the paper's own digits."""
    if value is None:
        return ""
    if value.value is not None:
        text = _digits(value.value)
    elif value.low is None or value.high is None:
        text = f"≤{_digits(value.high)}" if value.high is not None else f"≥{_digits(value.low or 0)}"
    else:
        text = f"{_digits(value.low)}–{_digits(value.high)}"
    return {"approx": f"≈{text}", "conflicting": f"{text}?"}.get(value.confidence, text)


def _digits(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else str(round(value, 6))


def _above(cell: Cell) -> float | None:
    if cell.value is None or cell.paper is None or cell.paper.value is None:
        return None
    return cell.value - cell.paper.value


def _above_text(cell: Cell, unit: str) -> str:
    above = _above(cell)
    if above is None:
        return ""
    return f"{'+' if above > 0 else ''}{_number(above, unit)}{'*' if cell.verdict == 'differs' else ''}"


def _legend(grid: Grid, rows: Sequence[Sequence[str]]) -> list[str]:
    """What needs to be explained of these lines."""
    cells = [cell for row in rows for cell in row[1:]]
    told = [f"In brackets: {grid.interval}."] if any("[" in cell for cell in cells) else []
    told += [AGAINST] if "− full KV" in cells else []
    told += [P_VALUE] if any(" p=" in cell or " p<" in cell for cell in cells) else []
    told += [text for sign, text in LEGEND.items() if any(sign in cell for cell in cells)]
    return [" ".join(told)] if told else []
