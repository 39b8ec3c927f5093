"""Figure 14: how FASA enters a transformers model, as a listing cut from this project's own source.

The paper shows its patched attention; nothing is patched here. The parts are found by name, so that the listing always
says what is run, and a test runs it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from fasa_bench.drawings.style import PAGE, Drawing
from fasa_bench.figures import COLOURS, GREY, STYLE
from fasa_bench.paper import ROOT

# (file, what of it): functions and methods by their names, statements by how they begin
PARTS = (
    ("src/fasa_bench/attention.py", ("AttentionInterface.register", "AttentionMaskInterface.register")),
    ("src/fasa_bench/attention.py", ("forward", "_step", "_chooses")),
    ("src/fasa_bench/method.py", ("TopTokens.select",)),
    ("methods/fasa.py", ("FasaC.scores",)),
)
SAYS = {
    "AttentionInterface.register": "once: attention of our own, by name, in any transformers model",
    "forward": "each layer, each call: the prompt goes densely, then token by token",
    "_step": "a decode step: select, attend, update",
    "_chooses": "selection acts only where more is cached than the budget",
    "TopTokens.select": "the tokens with the best scores",
    "FasaC.scores": "FASA's score: the dominant chunks of query and keys",
}
LINE = 0.105  # inches
MONO = "DejaVu Sans Mono"
CAPTION = "The road of a decode step through this project's source, cut by name; docstrings left out. A test runs it"


@dataclass(frozen=True)
class Part:
    """lines: numbered as in the file, from 1, without the docstring; first, last: of the whole part."""

    name: str
    path: str
    first: int
    last: int
    lines: tuple[tuple[int, str], ...]


def parts(root: Path = ROOT) -> list[Part]:
    """The listing. Raises LookupError for a name that the source no longer has."""
    found = []
    for path, names in PARTS:
        source = (root / path).read_text("utf-8")
        tree, lines = ast.parse(source), source.splitlines()
        for name in names:
            node = _find(tree, name)
            if node is None:
                raise LookupError(f"{path} has no {name}")
            said = _docstring(node)
            kept = [number for number in range(node.lineno, (node.end_lineno or 0) + 1) if number not in said]
            indent = node.col_offset
            text = tuple((number, lines[number - 1][indent:]) for number in kept)
            found.append(Part(name, path, node.lineno, node.end_lineno or node.lineno, text))
    return found


def draw(root: Path = ROOT) -> Drawing:
    """The listing as a figure. root: of the source; raises LookupError as `parts`."""
    found = parts(root)
    rows = _rows(found)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(PAGE, LINE * (len(rows) + 1)))
        for index, (number, text, kind) in enumerate(rows):
            y = 1 - (index + 1) / (len(rows) + 1)
            look: dict[str, Any] = {
                "head": {"color": COLOURS[0], "fontweight": "bold"},
                "note": {"color": COLOURS[1]},
            }.get(kind, {})
            figure.text(0.035, y, number, fontsize=4.6, family=MONO, color=GREY, va="center", ha="right")
            figure.text(0.05, y, text, fontsize=5.6, family=MONO, va="center", **look)
    points: list[dict[str, Any]] = [
        {"part": part.name, "file": part.path, "first_line": part.first, "last_line": part.last} for part in found
    ]
    return Drawing(figure, CAPTION, points)


def _rows(found: Sequence[Part]) -> list[tuple[str, str, str]]:
    """(line number, text, kind) of everything that is printed."""
    rows: list[tuple[str, str, str]] = []
    path = ""
    for part in found:
        if rows and part.name in SAYS:
            rows.append(("", "", "space"))
        if part.path != path and part.name in SAYS:
            rows.append(("", part.path, "head"))
            path = part.path
        if part.name in SAYS:
            owner = f"{part.name}: " if "." in part.name and part.lines[0][1].startswith("def") else ""
            rows.append(("", f"# {owner}{SAYS[part.name]}", "note"))
        rows += [(str(number), text, "code") for number, text in part.lines]
    return rows


def _find(tree: ast.Module, name: str) -> ast.stmt | None:
    """A function, a method as Class.name, or a statement that begins like this."""
    outer, _, inner = name.partition(".")
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ClassDef) and node.name == outer:
            return next((each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == inner), None)
        if isinstance(node, ast.Expr) and ast.unparse(node).startswith(f"{name}("):
            return node
    return None


def _docstring(node: ast.stmt) -> range:
    """Its lines."""
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
        return range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    return range(0)
