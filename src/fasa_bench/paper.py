"""What FASA's paper (arXiv 2602.03152v3) reports: results/paper/*.yaml, one file a table or figure, as typed values.

A file has a title and `blocks`, grids of numbers: `values` maps each row's name to its cells, one for each of
`columns`; `rows` and the key of `columns` say what the names are (method, dataset, budget, ...), `where` what holds for
the whole block. Names are those of this project's runs; `printed` gives the paper's. A block inherits what it does not
say from the top of its file. A cell is a number, null (not given), or {low, high} where only a range was read off a
drawing.

confidence: exact = printed digits; approx = read off a drawing, or the row that printed digits belong to was inferred;
conflicting = sources disagree. `panels` describes drawings without numbers, `claims` the numbers in the paper's text.

python -m fasa_bench.paper prints where the paper contradicts itself (see paper_checks).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError

from fasa_bench.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PAPER = ROOT / "results" / "paper"
ARXIV = "arXiv 2602.03152v3"
RUN_KEYS = ("model", "method", "task", "dataset", "budget")  # what a value and a run have in common

Confidence = Literal["exact", "approx", "conflicting"]
Unit = Literal["%", "points", "tokens", "s", "GB", "times", "perplexity", "ratio"]


@dataclass(frozen=True)
class Range:
    """What a drawing gives instead of a number; an open end is None."""

    low: float | None = None
    high: float | None = None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _name(value: Any) -> Any:
    if _is_number(value) or (isinstance(value, str) and value):
        return value
    raise ValueError("must be a number or a text")


def _cell(value: Any) -> Any:
    if value is None or (_is_number(value) and value == value):
        return value
    if (
        isinstance(value, Mapping)
        and value
        and value.keys() <= {"low", "high"}
        and all(map(_is_number, value.values()))
    ):
        return Range(**value)
    raise ValueError("must be a number, null, or a range such as {low: 10, high: 10.5}")


def _list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Name = Annotated[str | int | float, PlainValidator(_name)]
Cell = Annotated[int | float | Range | None, PlainValidator(_cell)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Settings(_Strict):
    metric: str | None = None  # as in a run's summary; none: named after the data set, as LongBench's are
    unit: Unit | None = None
    how: str = "printed"  # how the numbers were got
    confidence: Confidence = "exact"
    row_confidence: dict[Name, Confidence] = {}  # of rows that differ
    where: dict[str, Name] = {}
    rows: str | None = None
    columns: dict[str, list[Name]] = Field(default={}, max_length=1)  # none: one number a row
    caveats: list[str] = []


class _Block(_Settings):
    values: dict[Name, Annotated[list[Cell], BeforeValidator(_list)]] = Field(min_length=1)


class Claim(_Strict):
    """A number in the paper's text; `where` says what it holds for."""

    text: str
    value: float
    unit: Unit
    confidence: Confidence = "exact"
    where: dict[str, Name] = {}


class _File(_Settings):
    title: str
    printed: dict[Name, str] = {}
    missing: list[str] = []
    panels: list[dict[str, Any]] = []
    claims: dict[str, Claim] = {}
    blocks: list[_Block] = []


@dataclass(frozen=True)
class Value:
    """One number of the paper. A run is compared with it by RUN_KEYS and the metric, None being "not stated".

    value: None where only the range low to high is known. budget: tokens, or a ratio; None for full KV.
    keys: what else tells it from its neighbours (calibration_k, context, ...). source: where it stands, in the paper's
    own names; how: how it was got from there.
    """

    metric: str
    unit: str
    value: float | None
    low: float | None
    high: float | None
    source: str
    how: str
    confidence: Confidence
    model: str | None
    method: str | None
    task: str | None
    dataset: str | None
    budget: int | float | None
    keys: Mapping[str, str | int | float]
    caveats: tuple[str, ...]

    def get(self, key: str) -> Any:
        """A run key, the metric or the unit, or one of `keys`; None if it has no such key."""
        return getattr(self, key) if key in (*RUN_KEYS, "metric", "unit") else self.keys.get(key)


@dataclass(frozen=True)
class Place:
    """A table or figure (`id`: table2), or the headline claims of abstract and introduction."""

    id: str
    title: str
    values: tuple[Value, ...]
    claims: Mapping[str, Claim]
    panels: tuple[Mapping[str, Any], ...]
    caveats: tuple[str, ...]
    missing: tuple[str, ...]  # what a reproduction would need and the paper does not state
    printed: Mapping[str | int | float, str]  # the paper's own words for names of this project

    @property
    def name(self) -> str:
        """ "Table 2", as the paper calls it."""
        return re.sub(r"(\D+)(\d+)", r"\1 \2", self.id).capitalize()

    def find(self, **wanted: Any) -> list[Value]:
        """The values that have all of these, e.g. model="llama31_8b", metric="pass@1", in the paper's order."""
        return [each for each in self.values if all(each.get(key) == value for key, value in wanted.items())]

    def series(self, **wanted: Any) -> list[float]:
        """Their numbers; ranges and cells that are not given are left out."""
        return [each.value for each in self.find(**wanted) if each.value is not None]

    def number(self, **wanted: Any) -> float:
        """The number of the only value that has all of these; LookupError if there is not one, or it has none."""
        found = self.series(**wanted)
        if len(found) != 1:
            raise LookupError(f"{self.id} has {len(found)} numbers with {wanted}, not 1")
        return found[0]


def load(folder: Path = PAPER) -> dict[str, Place]:
    """{"table2": Place, ...}, all files of the folder. Raises UserError as `load_file`, or if there is none."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise UserError(f"the paper's values cannot be read: no *.yaml in {folder}")
    return {path.stem: load_file(path) for path in files}


def load_file(path: Path) -> Place:
    """One table or figure. Raises UserError naming file, key and value for whatever is against the schema."""
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"the paper's values cannot be read: {error.strerror} ({error.filename})") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError.of(str(path), content, "must be a mapping with a title and blocks")
    try:
        given = _File.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        wanted = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if first["type"] == "missing":
            raise UserError(f"{path}: {key} is missing") from error
        if first["type"] == "extra_forbidden":
            wanted = "unknown key"
        raise UserError.of(f"{path}: {key}", first["input"], wanted) from error
    values: dict[tuple[Any, ...], Value] = {}
    for index, block in enumerate(given.blocks):
        for value in _values(f"{path}: blocks.{index}", path.stem, given, block):
            identity = (value.metric, *(value.get(key) for key in RUN_KEYS), *sorted(value.keys.items()))
            if identity in values:
                raise UserError.of(f"{path}: blocks.{index}", value.source, "stands in the file twice")
            values[identity] = value
    return Place(
        id=path.stem,
        title=given.title,
        values=tuple(values.values()),
        claims=given.claims,
        panels=tuple(given.panels),
        caveats=tuple(given.caveats),
        missing=tuple(given.missing),
        printed=given.printed,
    )


def _values(key: str, place: str, file: _File, block: _Block) -> list[Value]:
    own = {name: getattr(block if name in block.model_fields_set else file, name) for name in _Settings.model_fields}
    where = file.where | block.where
    column, names = next(iter(own["columns"].items()), (None, [None]))
    if own["rows"] is None:
        raise UserError(f"{key}.rows is missing: say what the rows are, in the block or at the top of the file")
    if own["unit"] is None:
        raise UserError(f"{key}.unit is missing: say it in the block or at the top of the file")
    label = re.sub(r"(\D+)(\d+)", r"\1 \2", place).capitalize()  # table2: "Table 2"
    result = []
    for row, cells in block.values.items():
        if len(cells) != len(names):
            raise UserError.of(f"{key}.values.{row}", cells, f"must have {len(names)} numbers, one for each column")
        for name, cell in zip(names, cells, strict=True):
            if cell is None:
                continue
            told = where | {own["rows"]: row} | ({column: name} if column else {})
            _check_names(key, told)
            if told.get("method") == "fkv":
                told.pop("budget", None)  # the full cache has none, though the table has
            metric = told.pop("metric", None) or own["metric"] or told.get("dataset")
            if metric is None:
                raise UserError(f"{key}.metric is missing: only values of a data set are named after it")
            parts = [*block.where.items(), (own["rows"], row), *([(column, name)] if column else [])]
            printed = ", ".join(_printed(file, str(dimension), part) for dimension, part in parts)
            result.append(
                Value(
                    metric=str(metric),
                    unit=own["unit"],
                    value=None if isinstance(cell, Range) else cell,
                    low=cell.low if isinstance(cell, Range) else cell,
                    high=cell.high if isinstance(cell, Range) else cell,
                    source=f"{label}: {printed}",
                    how=own["how"],
                    confidence=own["row_confidence"].get(row, own["confidence"]),
                    **{run_key: told.pop(run_key, None) for run_key in RUN_KEYS},
                    keys=told,
                    caveats=(*file.caveats, *block.caveats),
                )
            )
    return result


def _printed(file: _File, dimension: str, name: str | int | float) -> str:
    """As the paper calls it; a bare number with its dimension."""
    return file.printed.get(name) or (f"{dimension} {name}" if _is_number(name) else str(name))


def _check_names(key: str, told: Mapping[str, Any]) -> None:
    """Models, methods and tasks are those of conf/, so that runs of them can be found; budgets are numbers."""
    for group in ("model", "method", "task"):
        if group in told and told[group] not in _configs(group):
            raise UserError.of(f"{key}: {group}", told[group], f"must be one of {', '.join(_configs(group))}")
    if "budget" in told and not (_is_number(told["budget"]) and told["budget"] > 0):
        raise UserError.of(f"{key}: budget", told["budget"], "must be a number of tokens, or a ratio")


@cache
def _configs(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("[!_]*.yaml"))


if __name__ == "__main__":
    from fasa_bench.paper_checks import main  # not at the top: it imports this module

    sys.exit(main())
