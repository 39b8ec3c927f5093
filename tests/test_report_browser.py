"""The report in headless Chromium, from file://: barriers, console, sorting, filters, examples. `make test-report`.

A page is visited as a copy beside the original that holds one script more. It does something on the page, and what it
returns is read from the DOM that Chromium dumps at the end; nothing else drives the browser.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fasa_bench.experiments import load_experiments
from fasa_bench.site.build import write_site
from tests.fake_results import EVIL, code, fake_results

PAGES = ["index.html", "exhibits/table2.html", "exhibits/figure2.html", "runs.html", "examples.html", "findings.html"]
PAGES += ["switches.html", "environment.html", "docs/methods.html"]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
WATCH = """
window.problems = [];
addEventListener("error", event => problems.push(String(event.message || event.target.src || event.target.href)), true);
addEventListener("unhandledrejection", event => problems.push(String(event.reason)));
for (const level of ["error", "warn"]) console[level] = (...words) => problems.push(words.join(" "));
"""
RUN = """
const all = selector => [...document.querySelectorAll(selector)], one = selector => document.querySelector(selector);
const set = (form, name, value) => {
  form.elements[name].value = value;
  form.elements[name].dispatchEvent(new Event("input", { bubbles: true }));
};
const pause = (ms = 60) => new Promise(done => setTimeout(done, ms));
addEventListener("load", async () => {
  await pause(200);
  let value;
  try { value = await (async () => { %s })(); } catch (error) { problems.push(String(error)); }
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = btoa(unescape(encodeURIComponent(JSON.stringify({ value, problems }))));
  document.body.replaceChildren(result);
});
"""

Visit = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("there is no Chromium (Debian: apt-get install chromium)")
    return found


@pytest.fixture(scope="module")
def axe() -> Path:
    path = Path(os.environ.get("FASA_BENCH_AXE", "none")) / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        pytest.skip("axe-core is not there: `make test-report` installs it, or FASA_BENCH_AXE names its folder")
    return path


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_site(fake_results(tmp_path_factory.mktemp("results"))).parent


@pytest.fixture
def visit(chromium: str, report: Path, tmp_path: Path) -> Visit:
    def go(page: str, script: str, *, theme: str = "light", width: int = 1280, scripts: tuple[Path, ...] = ()) -> Any:
        """What the script returns; fails if the page complained in any way."""
        name, _, anchor = page.partition("#")
        copy = (report / name).with_name(f"visited-{Path(name).name}")
        text = (report / name).read_text("utf-8")
        more = "".join(f'<script src="{path.as_uri()}"></script>' for path in scripts)
        start = f"<script>{WATCH} try {{ localStorage.clear(); }} catch {{}} </script>{more}"
        text = text.replace("<head>", f"<head>{start}", 1).replace("</head>", f"<script>{RUN % script}</script></head>")
        copy.write_text(text.replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">'), "utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
        options += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900"]
        address = copy.as_uri() + (f"#{anchor}" if anchor else "")
        done = subprocess.run([chromium, *options, address], capture_output=True, text=True, timeout=120)
        copy.unlink()
        found = re.search(r'<pre id="result">([^<]*)</pre>', done.stdout)
        assert found, done.stderr[-2000:]
        result = json.loads(base64.b64decode(html.unescape(found[1])))
        assert result["problems"] == []
        return result.get("value")

    return go


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("page", PAGES)
def test_no_barrier_and_no_complaint(page: str, theme: str, visit: Visit, axe: Path) -> None:
    """All of axe-core's rules of WCAG 2.2 AA, and its best practices."""
    script = f"""
    all("details").forEach(part => {{ part.open = true; }});
    const found = await axe.run(document, {{ runOnly: {json.dumps(RULES)}, preload: false }});
    const place = node => node.html.slice(0, 200) + node.failureSummary;
    return found.violations.map(each => [each.id, each.help, each.nodes.slice(0, 3).map(place)]);
    """
    assert visit(page, script, theme=theme, scripts=(axe,)) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_narrow_screen_scrolls_tables_and_not_the_page(page: str, visit: Visit) -> None:
    wide, window = visit(page, "return [document.documentElement.scrollWidth, innerWidth];", width=500)
    assert window <= 500
    assert wide <= window


def test_a_column_sorts_up_and_down_and_what_is_missing_stays_last(visit: Visit) -> None:
    script = """
    const table = one("table[data-filtered=cells]"), head = table.tHead.rows[0].cells[4];
    const values = () => [...table.tBodies[0].rows].map(row => row.cells[4].textContent);
    const seen = [];
    for (let turn = 0; turn < 2; turn += 1) {
      head.querySelector("button").click();
      seen.push([head.getAttribute("aria-sort"), values()]);
    }
    return seen;
    """
    (up, rising), (down, falling) = visit("exhibits/table2.html", script)
    assert (up, down) == ("ascending", "descending")
    for values, sign in ((rising, 1), (falling, -1)):
        count = sum(value != "not run" for value in values)
        assert set(values[count:]) == {"not run"}
        numbers = [float(value) for value in values[:count]]
        assert numbers == sorted(numbers, key=lambda number: sign * number)
        assert count == 13 * 16


def test_filters_narrow_cells_and_panels_alike(visit: Visit) -> None:
    script = """
    const form = one("form[data-filters]"), shown = selector => all(selector).filter(each => !each.hidden).length;
    const seen = [];
    for (const [name, value] of [["profile", "mini"], ["search", "oracle nqa"], ["verdict", "missing"]]) {
      set(form, name, value);
      seen.push([shown("tr[data-row]"), shown("section[data-row]"), form.querySelector("output").textContent]);
    }
    return seen;
    """
    cells, searched, missing = visit("exhibits/table2.html", script)
    assert cells == [7 * 16, 1, "112 of 672 rows"]
    assert searched[0] == 1
    assert missing[0] == 0


def test_the_theme_can_be_switched_and_is_kept(visit: Visit) -> None:
    script = """
    const colour = () => getComputedStyle(document.body).backgroundColor, seen = [colour()];
    const button = one("button.theme");
    button.click(); seen.push(colour(), localStorage.getItem("theme"), button.getAttribute("aria-label"));
    return seen;
    """
    assert visit("index.html", script) == ["rgb(255, 255, 255)", "rgb(18, 22, 28)", "dark", "Switch to light theme"]


def test_everything_that_can_be_clicked_can_be_reached(visit: Visit) -> None:
    script = """
    all("details").forEach(part => { part.open = true; });
    const kinds = "a[href], button:enabled, select:enabled, input, summary, [tabindex='0']";
    const parts = all(kinds).filter(each => each.getClientRects().length);
    const fails = each => { each.focus(); return document.activeElement !== each; };
    return [parts.length, parts.filter(fails).map(each => each.outerHTML.slice(0, 200))];
    """
    for page in ("exhibits/table2.html", "runs.html", "examples.html"):
        count, unreachable = visit(page, script)
        assert count > 15
        assert unreachable == []


def test_examples_show_texts_as_texts(visit: Visit, report: Path) -> None:
    """Of the run that the address names; the markup in its texts does nothing."""
    points = {(point["model"], point["method"]): point["id"] for point in _points(report)}
    script = """
    await pause(300);
    return [all(".example").length, one(".pager span").textContent, one(".example h2").textContent,
      [...one(".example").querySelectorAll("pre")].map(each => each.textContent), all("#rows script").length,
      one(".example strong").textContent];
    """
    shown = visit(f"examples.html#{points['smollm2_135m', 'fasa_plus']}", script)
    evil = EVIL.replace("\ud800", "\ufffd")  # browser.py
    assert shown[:3] == [25, "page 1 of 2", "narrativeqa/0"]
    assert shown[3] == [
        f"Read {evil}", "Answer:", f"{evil} fasa_plus narrativeqa 0", f"{evil} answer", "other",
    ]  # fmt: skip
    assert shown[4] == 0
    assert float(shown[5]) == pytest.approx((code("smollm2_135m", "fasa_plus", "narrativeqa") - 2) / 100)


def test_examples_can_be_paged_narrowed_and_ordered(visit: Visit, report: Path) -> None:
    script = """
    await pause(300);
    const narrow = one("#narrow"), pick = one("#pick");
    const names = () => all(".example h2").map(each => each.textContent);
    const seen = [];
    one("[data-step='1']").click(); seen.push(names().length);
    set(narrow, "order", "high"); seen.push(names()[0]);
    set(narrow, "group", "qasper"); seen.push(names());
    set(narrow, "search", "qasper 1"); seen.push(names());
    set(pick, "method", "oracle"); await pause(300); seen.push(one("#about").textContent);
    return seen;
    """
    second, highest, qasper, searched, oracle = visit("examples.html", script)
    assert second == 5
    assert highest == "repobench-p/1"
    assert qasper == ["qasper/1", "qasper/0"]
    assert searched == ["qasper/1"]
    assert "this run was stored without texts" in oracle


def test_the_plot_shows_the_runs_that_the_table_shows(visit: Visit) -> None:
    script = """
    const form = one("form[data-filters]"), axes = one(".plot form");
    const seen = [[axes.elements.y.value, all(".drawing a").length]];
    set(form, "model", "llama31_8b"); seen.push(all(".drawing a").length);
    set(axes, "x", "ms"); seen.push(all(".drawing a").map(each => each.getAttribute("aria-label")));
    return seen;
    """
    everything, llama, timed = visit("runs.html", script)
    assert everything == ["avg_table2", 13]
    assert llama == 6
    assert len(timed) == 4  # the two that read all keys to choose have no time
    sets = load_experiments()["table2"].layout["values"]
    mean = sum(code("llama31_8b", "fasa_plus", name) for name in sets) / len(sets)
    numbers = f"{mean:.1f} ({mean - 2:.1f} to {mean + 2:.1f})"
    assert f"llama31_8b, longbench, fasa_plus, budget 256: avg_table2 {numbers} at 41.3" in timed


def _points(report: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((report / "data" / "runs.js").read_text()[len("report.points = ") : -2])
    return found
