"""The project's documentation as pages of the report; what was not installed with it is left out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from fasa_bench.paper_checks import Check, update

DOCS = Path(__file__).resolve().parents[3] / "docs"
FINDINGS = "reproduction"
REGION = 'tabindex="0" role="region"'
REPLACED = {  # an empty heading is none
    '<th scope="col"></th>': "<td></td>",
    "</table>": "</table></div>",
}


def findings() -> str:
    """docs/reproduction.md, or nothing where only the package is installed."""
    path = DOCS / f"{FINDINGS}.md"
    return path.read_text("utf-8") if path.is_file() else ""


def names() -> list[str]:
    """Of the other documents."""
    return sorted(path.stem for path in DOCS.glob("*.md") if path.stem != FINDINGS)


def others() -> Iterator[tuple[str, str, Markup]]:
    """Name, title and content of each other document."""
    for name in names():
        text = (DOCS / f"{name}.md").read_text("utf-8")
        yield name, text.split("\n")[0].removeprefix("# "), html(text, {}, "docs")


def html(text: str, checks: Mapping[str, Check], folder: str = "") -> Markup:
    """Markdown as HTML, what it says of the paper computed anew. Its own HTML, if any, is shown as text."""
    text = re.sub(r"<!--.*?-->\n?", "\n", update(text, checks) if checks else text, flags=re.DOTALL)
    tokens = (parser := MarkdownIt("commonmark", {"html": False}).enable("table")).parse(text)
    taken: set[str] = set()
    for index, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", _anchor(tokens[index + 1].content, taken))
        for child in token.children or ():
            _relink(child, folder)
    rendered: str = parser.renderer.render(tokens, parser.options, {})
    number = itertools.count(1)
    # a wide table scrolls by itself, and by keyboard
    rendered = re.sub(
        "<table>", lambda _: f'<div class="scroll" {REGION} aria-label="Table {next(number)}"><table>', rendered
    )
    rendered = re.sub(r"<th(?= |>)", '<th scope="col"', rendered)
    for old, new in REPLACED.items():
        rendered = rendered.replace(old, new)
    return Markup(rendered)


def _relink(token: Token, folder: str) -> None:
    """Links between documents lead to their pages; those to other files of the project lead nowhere and go."""
    if token.type != "link_open":
        return
    target = str(token.attrGet("href") or "")
    name, _, anchor = target.partition("#")
    if re.match(r"https?://", target) or not name:
        return
    own = re.fullmatch(r"(?:docs/)?(\w+)\.md", name)
    if own and (DOCS / f"{own[1]}.md").is_file():
        here, there = ("../", "") if folder else ("", "docs/")
        page = f"{here}findings.html" if own[1] == FINDINGS else f"{there}{own[1]}.html"
        token.attrSet("href", page + (f"#{anchor}" if anchor else ""))
    else:
        token.attrs.pop("href")


def _anchor(title: str, taken: set[str]) -> str:
    """As GitHub names it, which links in the documents rely on."""
    name = base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    number = 0
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name
