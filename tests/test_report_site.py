"""The report of fake runs: right numbers in right cells, links that lead somewhere, HTML that parses and is escaped."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import html5lib
import pytest

from fasa_bench.errors import UserError
from fasa_bench.exhibits import LABELS
from fasa_bench.experiments import load_experiments
from fasa_bench.paper import PAPER, load_file
from fasa_bench.report import main
from fasa_bench.site import browser, cells
from fasa_bench.site.build import write_site
from fasa_bench.site.claims import judge
from fasa_bench.site.evidence import Found
from fasa_bench.store import find_runs
from tests.fake_results import EVIL, METHODS, code, fake_results

PNG = b"\x89PNG not really"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = fake_results(tmp_path_factory.mktemp("results"))
    (root / "figures").mkdir()
    (root / "figures" / "figure6.png").write_bytes(PNG)
    assert main(["report", "--results-dir", str(root)]) == 0
    return root


@pytest.fixture(scope="module")
def report(results: Path) -> Path:
    return results / "report"


@pytest.fixture(scope="module")
def trees(report: Path) -> dict[str, Any]:
    """Every page as a browser reads it; any mistake in its HTML is an error."""
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return {path.relative_to(report).as_posix(): parser.parse(path.read_bytes()) for path in report.rglob("*.html")}


def text(element: Any) -> str:
    return "".join(element.itertext())


def each(tree: Any, *tags: str) -> Iterator[Any]:
    return (element for element in tree.iter() if element.tag in tags)


def rows(table: Any) -> list[list[str]]:
    return [["".join(cell.itertext()).strip() for cell in row] for row in table.iter("tr")]


def tables(tree: Any, caption: str) -> list[list[list[str]]]:
    return [rows(table) for table in tree.iter("table") for title in table.iter("caption") if caption in text(title)]


def long_table(tree: Any) -> dict[tuple[str, str, str], dict[str, str]]:
    """Cell by cell: {(panel, row, column): {heading: text}}."""
    (head, *lines) = next(rows(table) for table in tree.iter("table") if table.get("data-filtered") == "cells")
    return {(line[0], line[1], re.sub(r" \S+$", "", line[2])): dict(zip(head, line, strict=True)) for line in lines}


# --- right values in right cells


def test_every_cell_of_table_2_decodes_to_its_own_row_and_column(trees: dict[str, Any]) -> None:
    place = load_file(PAPER / "table2.yaml")
    found = long_table(trees["exhibits/table2.html"])
    seen = 0
    for model, title in (("smollm2_135m", "SmolLM2-135M"), ("llama31_8b", place.printed["llama31_8b"])):
        for method in METHODS:
            row = place.printed.get("fasa" if method == "fasa_c" else method) or LABELS[method]
            for dataset in load_experiments()["table2"].layout["values"]:
                cell = found[title, row, place.printed.get(dataset, dataset)]
                missing = method == "snapkv" and model == "llama31_8b"
                assert cell["Ours"] == ("not run" if missing else f"{code(model, method, dataset):.2f}")
                seen += 1
                values = place.series(model=model, method="fasa" if method == "fasa_c" else method, dataset=dataset)
                assert cell["Paper"].split("\n")[0].startswith(f"{values[0]:.1f}" if values else "–")
                if values and not missing:
                    difference = code(model, method, dataset) - values[0]
                    assert float(cell["Difference"].replace("−", "-")) == pytest.approx(difference, abs=0.006)
                    agrees = abs(difference) <= 2
                    assert cell["Verdict"].startswith("agrees" if agrees else "differs")
                else:
                    assert cell["Difference"] == "–"
                    assert cell["Verdict"].startswith("not run" if missing else "ours only")
    assert seen == 2 * 7 * 15


def test_a_cell_has_its_interval_its_examples_and_its_difference_to_full_kv(trees: dict[str, Any]) -> None:
    cell = long_table(trees["exhibits/table2.html"])["SmolLM2-135M", "Oracle", "NQA"]
    assert cell["95 % CI"] == "13.0 to 17.0"
    assert cell["n"] == "2"
    assert cell["To full KV"].startswith("+5.00 [5.00, 5.00]")
    assert "reads all keys" in cell["Verdict"]


def test_the_matrix_shows_ours_above_the_papers(trees: dict[str, Any]) -> None:
    place = load_file(PAPER / "table2.yaml")
    found = tables(trees["exhibits/table2.html"], "method by dataset")
    assert len(found) == 6  # five models of the paper and the embedded one
    for table in found[:2]:  # those with runs come first
        full = next(line for line in table if line[0] == "FKV")
        assert "not run" not in "".join(full)
    (llama,) = [table for table in found if any("50.00" in cell for cell in table[1])]
    printed = place.number(model="llama31_8b", method="fkv", dataset="narrativeqa")
    assert llama[1][1] == f"50.00{printed:.1f}"
    snapkv = next(line for line in llama if line[0] == "SnapKV")
    assert all(cell.startswith("not run") for cell in snapkv[1:])


def test_the_overview_has_every_claim_and_the_state_of_every_exhibit(trees: dict[str, Any]) -> None:
    (claims,) = tables(trees["index.html"], "Numbers in the paper")
    number = sum(len(load_file(path).claims) for path in PAPER.glob("*.yaml"))
    assert len(claims) == 1 + number
    (loss,) = [line for line in claims if line[0].startswith("what FASA loses")]
    assert loss[2:5] == ["at most 0.7 points", "1.10 pointsTable 2, largest of the models", "no"]
    assert "-25.0 points [-25.0, -25.0]" in loss[5]  # full KV's code less FASA's
    assert loss[6].startswith("The paper's own numbers do not give it. Llama3.1-8B: holds.")
    (quest,) = [line for line in claims if line[0].startswith("what Quest loses")]
    assert "Llama3.1-8B: measured, but the claim's number is another model's." in quest[6]
    (speed,) = [line for line in claims if line[0].startswith("speedup of FASA-C at 64K")]
    assert (speed[4], speed[5]) == ("unsure", "not run")
    (states,) = tables(trees["index.html"], "State of each")
    by_name = {line[0]: line for line in states}
    assert by_name["Table 2"][2:] == ["partly run: 96 of 560 cells", "run", "80", str(agreeing())]
    assert by_name["Table 3"][2:] == ["not run", "not run", "–", "–"]
    assert by_name["Table 7"][3] == "nothing to run"
    assert {f"Table {n}" for n in range(1, 12)} | {f"Figure {n}" for n in range(1, 18)} <= by_name.keys()


def agreeing() -> int:
    """Cells of the fake runs of Llama whose value is within 2 of the paper's, averages included."""
    place, count = load_file(PAPER / "table2.yaml"), 0
    names = load_experiments()["table2"].layout["values"]
    for method in METHODS:
        if method == "snapkv":
            continue
        ours = {name: code("llama31_8b", method, name) for name in names}
        ours["avg_table2"] = sum(ours.values()) / len(ours)
        for name, value in ours.items():
            called = "fasa" if method == "fasa_c" else method
            values = place.series(model="llama31_8b", method=called, metric=name)
            count += bool(values) and abs(values[0] - value) <= 2 + 1e-9
    return count


@pytest.mark.parametrize(
    ("interval", "how", "claimed", "words"),
    [
        ((0.1, 0.6), "<=", 0.7, "holds"),
        ((0.1, 0.8), "<=", 0.7, "the interval is too wide to tell"),
        ((0.8, 0.9), "<=", 0.7, "does not hold"),
        ((99.0, 101.0), ">=", 100, "the interval is too wide to tell"),
        ((100.0, 101.0), ">=", 100, "holds"),
        ((95.0, 99.0), ">", 100, "does not hold"),
        ((12.0, 14.0), "=", 13.4, "agrees, the claim lies in the interval"),
        ((12.0, 13.0), "=", 13.4, "differs"),
        ((None, None), "=", 13.4, "a number without an interval"),
    ],
)
def test_a_claim_is_judged_by_the_whole_interval(interval: Any, how: str, claimed: float, words: str) -> None:
    assert judge(Found("m", "paper", 1.0, *interval), how, claimed) == words


def test_signs_and_digits() -> None:
    assert [cells.signed(value) for value in (1.25, -0.5, 0.0)] == ["+1.25", "−0.50", "0.00"]


# --- examples, runs, machines, switches


def whole(text: str) -> str:
    """Half a character is shown as the sign for what is unreadable."""
    return text.replace("\ud800", "\ufffd")


def test_rows_of_a_run_are_a_script_that_holds_them_all(results: Path, report: Path) -> None:
    for run in find_runs(results):
        script = (report / "data" / f"rows-{run.folder.name}.js").read_bytes().decode("ascii")
        assert "<" not in script
        match = re.fullmatch(r'report\.rows\("(\w+)", (.*)\);\n', script)
        assert match
        shown = json.loads(match[2])
        assert match[1] == run.folder.name
        assert [row["id"] for row in shown] == [whole(row["id"]) for row in [*run.rows, *run.failed]]
        if run.name("method") == "oracle":  # stored without texts
            assert all(row["texts"] is False and "prediction" not in row for row in shown)
        elif not run.failed:
            assert shown[0]["prediction"] == [whole(run.rows[0]["prediction"])]
            assert shown[0]["reference"] == [whole(answer) for answer in run.rows[0]["fields"]["answers"]]
            assert shown[0]["scores"]["score"] == run.rows[0]["scores"]["score"]
            assert (shown[0]["head"], shown[0]["group"]) == (whole(f"Read {EVIL}"), "narrativeqa")
        else:
            assert shown[0]["error"] == whole(f"OutOfMemory {EVIL}")


def test_long_texts_are_cut_for_the_reader_and_drawn_answers_are_all_there() -> None:
    shown = browser.row({"id": "a", "prediction": ["x" * 9000, "2"], "fields": {"answer": 7}})
    assert shown["prediction"] == ["x" * browser.LONGEST + "…", "2"]
    assert shown["reference"] == ["7"]


def test_thousands_of_rows_stay_one_script_of_a_moderate_size(results: Path) -> None:
    run = find_runs(results)[0]
    many = [{**run.rows[0], "id": str(index)} for index in range(5000)] if run.rows else []
    script = browser.script(type(run)(run.folder, run.config, run.summary, many, run.env))
    assert script.count('"id":') == len(many)
    assert len(script) < 5e6


def test_runs_machines_and_switches(results: Path, trees: dict[str, Any], report: Path) -> None:
    (found,) = tables(trees["runs.html"], "Decode: median")
    assert len(found) == 1 + len(find_runs(results)) == 15
    line = next(line for line in found if line[1:4] == ["llama31_8b", "longbench", "fasa_plus"])
    assert line[4] == "256"
    assert line[5].startswith("narrativeqa 80.00 [78.0, 82.0]")
    assert line[6:] == ["41.2", "7.00", "256", "complete", "30"]
    oracle = next(line for line in found if line[1:4] == ["llama31_8b", "longbench", "oracle"])
    assert oracle[6] == "simulated"
    points = json.loads((report / "data" / "runs.js").read_text()[len("report.points = ") : -2])
    (point,) = [point for point in points if (point["model"], point["method"]) == ("llama31_8b", "fasa_plus")]
    assert point["scores"]["narrativeqa"] == [80.0, 78.0, 82.0, 2]
    assert (point["tokens"], point["ms"], point["mib"], point["budget"]) == (256, 41.25, 7.0, 256)
    (switches,) = tables(trees["switches.html"], "what is disputed")
    assert switches[1][0] == "method.pairing"
    assert EVIL.replace("\ud800", "\\ud800") in switches[1][1]
    assert '"rope" in 13 runs' in switches[1][2]
    assert "14 runs" in text(trees["environment.html"])
    assert find_runs(results)[0].env["packages"]["torch"] in text(trees["environment.html"])


# --- the site as a whole


def test_every_link_leads_to_something(report: Path, trees: dict[str, Any]) -> None:
    anchors = {name: {element.get("id") for element in tree.iter()} - {None} for name, tree in trees.items()}
    count = 0
    for name, tree in trees.items():
        for element in tree.iter():
            target = element.get("href") or element.get("src")
            if not target or not isinstance(element.tag, str) or target.startswith(("https://", "http://", "data:")):
                continue
            path, anchor = urldefrag(target)
            there = (report / name).parent / unquote(path) if path else report / name
            assert there.exists(), f"{name}: {target}"
            other = there.resolve()
            if anchor and other.is_relative_to(report.resolve()) and not other.name.startswith("examples"):
                assert unquote(anchor) in anchors[other.relative_to(report.resolve()).as_posix()], f"{name}: {target}"
            count += 1
    assert count > 500
    ids = {run.folder.name for run in find_runs(report.parent)}
    assert ids == {anchor.removeprefix("run-") for anchor in anchors["runs.html"] if anchor.startswith("run-")}


def test_pages_need_no_network_and_no_inline_script(report: Path, trees: dict[str, Any]) -> None:
    for name, tree in trees.items():
        for element in each(tree, "script", "link", "img"):
            assert not (element.get("src") or element.get("href") or "").startswith(("http", "//")), name
        assert all(script.get("src") and not script.text for script in tree.iter("script")), name
        assert not [key for element in tree.iter() for key in element.keys() if key.startswith("on")], name  # noqa: SIM118
    for path in (report / "static").iterdir():
        assert not re.search(r"innerHTML|eval\(|fetch\(|https?://(?!www\.w3\.org/2000/svg)", path.read_text()), path


def test_a_page_is_named_headed_and_labelled(trees: dict[str, Any]) -> None:
    for name, tree in trees.items():
        assert tree.get("lang") == "en"
        assert len([*tree.iter("h1")]) == 1, name
        levels = [int(head.tag[1]) for head in each(tree, "h1", "h2", "h3", "h4")]
        assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), name
        ids = [element.get("id") for element in tree.iter() if element.get("id")]
        assert len(ids) == len(set(ids)), name
        assert all(image.get("alt") for image in tree.iter("img")), name


def test_a_drawn_figure_is_shown_and_one_that_is_not_says_how(report: Path, trees: dict[str, Any]) -> None:
    assert (report / "files" / "figure6.png").read_bytes() == PNG
    assert [image.get("src") for image in trees["exhibits/figure6.html"].iter("img")] == ["../files/figure6.png"]
    assert "Not drawn yet" in text(trees["exhibits/figure15.html"])


def test_a_page_says_how_to_run_it_and_what_it_needs(trees: dict[str, Any]) -> None:
    assert "python run.py +experiment=table2   #" in text(trees["exhibits/table2.html"])
    assert "python run.py +experiment=table2 experiment.profile=paper" in text(trees["exhibits/table2.html"])
    assert "needs another architecture" in text(trees["exhibits/table7.html"])


def test_notes_of_a_table_of_our_own_are_shown_too(trees: dict[str, Any]) -> None:
    """It has none of the paper's numbers."""
    [note] = load_experiments()["granularity"].notes
    assert note in text(trees["exhibits/granularity.html"])


def test_the_overview_leads_to_every_document(trees: dict[str, Any]) -> None:
    linked = {link.get("href") for link in each(trees["index.html"], "a")}
    assert {name for name in trees if name.startswith("docs/")} <= linked


def test_findings_are_computed_from_the_papers_values(trees: dict[str, Any]) -> None:
    assert "14 of 30 AVG cells differ" in text(trees["findings.html"])
    assert "<!--" not in text(trees["findings.html"])


def test_the_same_runs_give_the_same_bytes(results: Path, report: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in report.rglob("*") if path.is_file()}
    (report / "exhibits" / "gone.html").write_text("of an earlier report")
    write_site(results)
    assert {path: path.read_bytes() for path in report.rglob("*") if path.is_file()} == before


def test_a_date_stands_there_only_if_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    from fasa_bench.site import build

    assert build.built() == ""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1770000000")
    assert build.built() == "2026-02-02"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "soon")
    with pytest.raises(UserError, match="SOURCE_DATE_EPOCH='soon' is not allowed: must be a number of seconds"):
        build.built()


def test_without_runs_the_papers_numbers_stand_alone(tmp_path: Path) -> None:
    index = write_site(tmp_path)
    assert "0 stored runs" in index.read_text()
    assert "No runs are stored yet" in (index.parent / "runs.html").read_text()


def test_templates_and_scripts_are_package_data() -> None:
    """What a wheel holds besides modules."""
    root = Path(__file__).resolve().parents[1]
    given = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "fasa_bench.site"
    ]
    there = root / "src" / "fasa_bench" / "site"
    held = {path for pattern in given for path in there.glob(pattern)}
    assert held == {path for name in ("templates", "static") for path in (there / name).iterdir()}
    assert len(held) > 10
