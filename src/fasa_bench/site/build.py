"""Writes the report: reads stored runs, results/paper, conf/experiment, docs/ and drawn figures; never a model.

Every file follows from these alone, so that building twice gives the same bytes; a date stands in it only if
SOURCE_DATE_EPOCH is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fasa_bench.errors import UserError
from fasa_bench.exhibits import Exhibit, Stored, build
from fasa_bench.experiments import CONF, Experiment, load_experiments
from fasa_bench.paper import ARXIV, PAPER, Place, load
from fasa_bench.paper_checks import run_checks
from fasa_bench.site import browser, cells, claims, documents, runviews
from fasa_bench.site.evidence import Evidence
from fasa_bench.store import Run, report_runs, write_whole

PAGES = (
    ("index.html", "Overview"),
    ("runs.html", "Runs"),
    ("examples.html", "Examples"),
    ("findings.html", "Findings"),
    ("switches.html", "Switches"),
    ("environment.html", "Environment"),
)
OWN_FOLDERS = ("exhibits", "docs", "data", "files", "static")  # whatever else lies in them is of an earlier report
ENDINGS = ("png", "svg", "pdf", "md", "csv", "tex", "json")


def write_site(results_dir: str | Path, stored: Sequence[Run] | None = None) -> Path:
    """Write <results_dir>/report/index.html and what it links to; returns its path.

    stored: the runs to report; None takes all under `results_dir`. Without any, the paper's numbers stand alone.
    Raises UserError if the folder cannot be written, or paper or experiments cannot be read.
    """
    root = Path(results_dir) / "report"
    files = Site(Path(results_dir), root, report_runs(results_dir) if stored is None else stored).files()
    try:
        for name, content in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_file() or path.read_bytes() != content:
                write_whole(path, content)
        for folder in OWN_FOLDERS:
            for path in (root / folder).glob("*"):
                if path.is_file() and f"{folder}/{path.name}" not in files:
                    path.unlink()
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror or error}") from error
    return root / "index.html"


@dataclass(frozen=True)
class ExhibitPage:
    """A table or figure with what its page shows. files: by ending, paths from the site's root."""

    exhibit: Exhibit
    experiment: Experiment | None
    place: Place | None
    grids: tuple[cells.GridView, ...]
    counts: Mapping[str, cells.Count]
    files: Mapping[str, str]
    claims: tuple[claims.ClaimView, ...] = ()

    @property
    def path(self) -> str:
        return f"exhibits/{self.exhibit.id}.html"

    @property
    def cells(self) -> list[cells.CellView]:
        return [cell for grid in self.grids for cell in grid.cells]

    @property
    def panels(self) -> list[str]:
        return list(dict.fromkeys(grid.title for grid in self.grids))

    @property
    def panel_choices(self) -> list[tuple[str, str]]:
        return _pairs(self.panels)

    @property
    def image(self) -> str | None:
        """The drawing that a page can show."""
        return self.files.get("svg") or self.files.get("png") if self.exhibit.kind == "figure" else None

    @property
    def runs(self) -> list[str]:
        return sorted({name for cell in self.cells for name in cell.runs})


@dataclass(frozen=True)
class Site:
    """All files of a report, by their path from its root."""

    results_dir: Path
    root: Path
    runs: Sequence[Run]
    conf: Path = CONF / "experiment"
    paper_dir: Path = PAPER
    copies: dict[str, bytes] = field(default_factory=dict)  # drawn figures and tables that pages link to

    @cached_property
    def paper(self) -> Mapping[str, Place]:
        return load(self.paper_dir)

    @cached_property
    def exhibits(self) -> Mapping[str, Exhibit]:
        """The experiments', and what of the paper has none yet, with the paper's numbers only."""
        stored, experiments = Stored(self.runs), load_experiments(self.conf)
        found = {name: build(each, self.paper.get(name), stored) for name, each in experiments.items()}
        for name, place in self.paper.items():
            if name not in found and name != "headline":
                found[name] = Exhibit(name, place.title, (), place.caveats, place.printed)
        return dict(sorted(found.items(), key=lambda item: _order(item[1])))

    @cached_property
    def pages(self) -> list[ExhibitPage]:
        experiments, judged = load_experiments(self.conf), self.claims
        return [
            ExhibitPage(
                exhibit,
                experiments.get(name),
                self.paper.get(name),
                tuple(cells.grids(exhibit)),
                {profile: cells.count(exhibit, profile) for profile in cells.PROFILES},
                self._drawn(name),
                tuple(each for each in judged if each.place.id == name),
            )
            for name, exhibit in self.exhibits.items()
        ]

    @cached_property
    def claims(self) -> list[claims.ClaimView]:
        return claims.claims(self.paper, Evidence(self.exhibits, self.runs))

    @cached_property
    def views(self) -> list[runviews.RunView]:
        return runviews.views(self.runs, self.root)

    def files(self) -> dict[str, bytes]:
        site = resources.files("fasa_bench.site") / "static"
        made: dict[str, bytes] = {f"static/{item.name}": item.read_bytes() for item in site.iterdir() if item.is_file()}
        texts = {
            "index.html": self._overview(),
            "runs.html": self._page("runs.html", views=self.views),
            "examples.html": self._page("examples.html", views=[view for view in self.views if view.has_rows]),
            "findings.html": self._findings(),
            "switches.html": self._page("switches.html", switches=runviews.switches(self.runs)),
            "environment.html": self._page("environment.html", machines=runviews.machines(self.runs)),
            "data/runs.js": browser.index("points", [view.point for view in self.views]),
            **{f"data/rows-{run.folder.name}.js": browser.script(run) for run in self.runs},
            **{page.path: self._exhibit(page, index) for index, page in enumerate(self.pages)},
            **self._documents(),
        }
        made |= {name: text.encode("utf-8", "backslashreplace") for name, text in texts.items()}
        return dict(sorted({**made, **self.copies}.items()))

    def _overview(self) -> str:
        verdicts = [claim.own_verdict for claim in self.claims]
        own = {verdict: verdicts.count(verdict) for verdict in claims.BY_PAPER}
        answered = sum(bool(claim.ours) for claim in self.claims)
        shown: dict[str, Any] = {"claims": self.claims, "own": own, "answered": answered, "pages": self.pages}
        return self._page("index.html", documents=documents.names(), **shown)

    def _exhibit(self, page: ExhibitPage, index: int) -> str:
        others = [self.pages[other] if 0 <= other < len(self.pages) else None for other in (index - 1, index + 1)]
        return self._page("exhibit.html", page.path, page=page, before=others[0], after=others[1])

    def _findings(self) -> str:
        text = documents.findings()
        found = run_checks(self.paper)
        return self._page("findings.html", content=text and documents.html(text, found), checks=found)

    def _documents(self) -> dict[str, str]:
        return {
            f"docs/{name}.html": self._page("document.html", f"docs/{name}.html", title=title, content=content)
            for name, title, content in documents.others()
        }

    def _page(self, template: str, path: str = "", **values: Any) -> str:
        path = path or template
        up = "../" * path.count("/")
        return self._templates.get_template(template).render(here=path, up=up, **values)

    @cached_property
    def _templates(self) -> Environment:
        templates = Environment(
            loader=PackageLoader("fasa_bench.site"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        templates.filters["pairs"] = _pairs
        templates.globals |= {
            "navigation": PAGES,
            "arxiv": ARXIV,
            "built": built(),
            "PROFILES": cells.PROFILES,
            "VERDICTS": cells.VERDICTS,
            "STATES": cells.STATES,
            "known": {view.id: view for view in self.views},
        }
        return templates

    def _drawn(self, name: str) -> dict[str, str]:
        """The files of a table or figure, which are copied so that the report is whole in one folder."""
        found = {}
        for folder in ("tables", "figures"):
            for ending in ENDINGS:
                path = self.results_dir / folder / f"{name}.{ending}"
                if path.is_file() and ending not in found:
                    found[ending] = f"files/{path.name}"
                    self.copies[found[ending]] = path.read_bytes()
        return found


def _pairs(values: Iterable[str]) -> list[tuple[str, str]]:
    """As value and text of a choice."""
    return [(value, value) for value in values]


def built() -> str:
    """The date that SOURCE_DATE_EPOCH gives, or nothing."""
    given = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not given:
        return ""
    try:
        return datetime.fromtimestamp(int(given), UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError) as error:
        raise UserError.of("SOURCE_DATE_EPOCH", given, "must be a number of seconds since 1970") from error


def _order(exhibit: Exhibit) -> tuple[int, int, str]:
    number = exhibit.id.removeprefix(exhibit.kind)
    return (2, 0, exhibit.id) if not number.isdigit() else (("table", "figure").index(exhibit.kind), int(number), "")
