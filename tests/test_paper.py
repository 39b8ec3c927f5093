"""The paper's values: all there, each under its own keys; the schema's errors; the paper's contradictions, computed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fasa_bench.errors import UserError
from fasa_bench.paper import Place, Value, load, load_file
from fasa_bench.paper_checks import CHECKS, Check, is_share, main, run_checks, update
from fasa_bench.paper_claims import compression_factor, recomputed
from fasa_bench.tasks.longbench_score import DATA_SETS
from tests.conftest import ROOT, SHARED

FACTS = SHARED / "facts" / "paper_reference.yaml"
METHODS = {"FKV": "fkv", "Oracle": "oracle", "Quest": "quest", "Stream": "streamingllm", "SnapKV": "snapkv"}
METHODS |= {"FASA": "fasa", "H2O": "h2o", "RKV": "rkv", "Random": "random", "FASA+PyKV": "fasa_pyramidkv"}
MODELS = {
    **{"Llama3.2-3B": "llama32_3b", "Llama-3.2-3B": "llama32_3b", "Llama-3.2-3B-Instruct": "llama32_3b"},
    **{"Llama3.1-8B": "llama31_8b", "Meta-Llama-3.1-8B": "llama31_8b", "Mistral-7B": "mistral_7b"},
    **{"Mistral-7B-v0.3": "mistral_7b", "Mistral-7B-Instruct-v0.3": "mistral_7b", "Qwen2.5-7B": "qwen25_7b"},
    **{"Qwen2.5-7B-Instruct": "qwen25_7b", "Qwen2.5-14B": "qwen25_14b", "Qwen2.5-14B-Instruct": "qwen25_14b"},
    **{"Qwen2.5-14B-1M": "qwen25_14b_1m", "Qwen2.5-32B-Instruct": "qwen25_32b"},
    **{
        "R1-Distill-Llama-8B": "r1_llama_8b",
        "R1-Distill-Qwen-14B": "r1_qwen_14b",
        "R1-Distill-Qwen-32B": "r1_qwen_32b",
    },
}
SETS = {"2Wiki": "2wikimqa", "Musi": "musique", "Hqa": "hotpotqa", "Qasp.": "qasper", "MF_en": "multifieldqa_en"}
SETS |= {"Nqa": "narrativeqa", "Multi": "multifieldqa_en", "Passage_Re": "passage_retrieval_en", "Self": "self"}
SETS |= {"Repobench": "repobench-p", "2Wikimqa": "2wikimqa"}
COUNTED = ("mean_of_printed_15", "derived_means", "prefill_ratio_pct_derived", "raw_runs", "contradictions")


@pytest.fixture(scope="module")
def paper() -> dict[str, Place]:
    return load()


@pytest.fixture(scope="module")
def facts() -> dict[str, dict[str, Any]]:
    if not FACTS.is_file():
        pytest.skip(f"no reference of the paper's values at {FACTS}")
    content = yaml.safe_load(FACTS.read_text("utf-8"))
    return {each["id"].replace("_", ""): each for each in [*content["tables"], *content["figures"]]}


# --- against the reference ----------------------------------------------------------------------------------------


def a_set(printed: str) -> str:
    return SETS.get(printed, printed.lower())


def cells(facts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Every cell of every table of the reference: (table, keys, number)."""
    table = facts["table1"]["values"]
    for name in (name for name in table if name in METHODS or name.startswith("F=")):
        keys: dict[str, Any] = {"method": METHODS[name]} if name in METHODS else {"n_tip": int(name[2:])}
        yield from (("table1", {**keys, "budget": k}, cell) for k, cell in zip(table["K"], table[name], strict=True))
    names = [facts["table2"]["column_to_longbench"][name] for name in facts["table2"]["columns_printed"][:-1]]
    for model, rows in facts["table2"]["models_data"].items():
        for row in (row for row in rows if row in METHODS):
            keys = {"model": MODELS[model], "method": METHODS[row], "task": "longbench"}
            keys["budget"] = None if row == "FKV" else 256
            for name, cell in zip(names, rows[row]["tasks"], strict=True):
                yield "table2", {**keys, "dataset": name, "confidence": rows[row]["confidence"]}, cell
            yield "table2", {**keys, "metric": "avg_table2"}, rows[row]["AVG"]
        for row, cell in rows["delta_vs_FKV_as_printed"].items():
            keys = {"model": MODELS[model], "method": METHODS[row], "metric": "avg_difference_to_fkv"}
            yield "table2", keys, float(cell)
    for model in (name for name in facts["table3"]["values"] if name.startswith("DeepSeek")):
        for row, own in facts["table3"]["values"][model].items():
            for task, budgets in facts["table3"]["budgets"].items():
                keys = {"model": MODELS[model.removeprefix("DeepSeek-")], "method": METHODS[row], "task": task.lower()}
                scores = zip([None], [own[task]], strict=True) if row == "FKV" else zip(budgets, own[task], strict=True)
                yield from (("table3", {**keys, "budget": b, "metric": "pass@1"}, cell) for b, cell in scores)
                for part, cell in zip(("prefill", "decode", "total"), own[f"len_{task}_PREF_DEC_TOTAL"], strict=True):
                    yield "table3", {**keys, "metric": f"tokens/{part}"}, cell
    for name in ("Qasper", "Lcc"):
        for row, own in facts["table4"]["values"][name].items():
            method = METHODS.get(row, "fasa_pyramidkv")
            metric = "gain" if row == "gain_printed" else name.lower()
            for budget, cell in zip(facts["table4"]["columns"], own, strict=True):
                keys = {"dataset": name.lower(), "method": method, "metric": metric, "budget": budget}
                yield "table4", keys, cell
    table = facts["table5"]["values"]
    for row, average in table["AVG"].items():
        keys = {"calibration_k": int(row[2:])}
        yield "table5", {**keys, "metric": "avg"}, average
        for budget, cell in zip(table["budgets"], table[row], strict=True):
            yield "table5", {**keys, "metric": "qasper", "budget": budget}, cell
    for number in ("table6", "table7", "table8"):
        table = facts[number]
        for row, own in table["values"].items():
            if row in ("source", "confidence"):
                continue
            keys = {"method": METHODS[row]} if row in METHODS else {"calibration": a_set(row)}
            keys = {"Base": {"method": "fkv"}, "CV": {"metric": "cv"}}.get(row, keys)
            for name, cell in zip(table["columns"], own, strict=True):
                yield number, {**({"metric": a_set(name)} | keys), "dataset": a_set(name)}, cell
    for model in (name for name in facts["table9"]["values"] if name in MODELS):
        for metric, cell in zip(("dominant", "non_dominant"), facts["table9"]["values"][model], strict=True):
            yield "table9", {"model": MODELS[model], "metric": metric}, cell
    order = [a_set(name) for name in facts["table10"]["order"]]
    for model in (name for name in facts["table10"]["values"] if name in MODELS):
        for mine, row in zip(order, facts["table10"]["values"][model], strict=True):
            keys = {"model": MODELS[model], "calibration": mine}
            yield from (("table10", {**keys, "other": o}, cell) for o, cell in zip(order, row[:5], strict=True))
            yield "table10", {**keys, "metric": "overlap_avg"}, row[5]
    for model in (name for name in facts["table11"]["values"] if name in MODELS):
        for chunks, row in zip(("dominant", "non_dominant"), facts["table11"]["values"][model].values(), strict=True):
            for band, cell in zip(("0-20", "20-40", "40-60", "60-80", "80-100"), row, strict=True):
                yield "table11", {"model": MODELS[model], "chunks": chunks, "band": band}, cell


def test_every_cell_of_every_table_is_there_under_its_keys(paper: dict[str, Place], facts: dict[str, Any]) -> None:
    found: dict[int, str] = {}
    for table, keys, cell in cells(facts):
        confidence = keys.pop("confidence", None)
        values = [value for value in paper[table].values if all(value.get(key) == keys[key] for key in keys)]
        assert [value.value for value in values] == [cell], (table, keys)
        assert confidence in (None, values[0].confidence), (table, keys)
        found[id(values[0])] = table
    ours = [value for name, place in paper.items() if name.startswith("table") for value in place.values]
    assert len(found) == len(ours) == 1133  # and nothing else


def numbers(tree: Any) -> Iterator[float]:
    """All numbers in a tree, without sign; of texts only where they stand for a value, as in "10.0-10.5" or "~0.02"."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key not in COUNTED:
                yield from numbers(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from numbers(value)
    elif isinstance(tree, str):
        if re.fullmatch(r"[~\d.,{}/+\- k]+", tree):
            yield from (float(number) for number in re.findall(r"\d+(?:\.\d+)?", tree))
    elif isinstance(tree, int | float):
        yield abs(float(tree))


def test_every_number_of_every_table_and_figure_is_there(paper: dict[str, Place], facts: dict[str, Any]) -> None:
    """Values, numbers on axes, budgets and claims, wherever they stand."""
    for name, reference in facts.items():
        content = yaml.safe_load((ROOT / f"results/paper/{name}.yaml").read_text("utf-8"))
        ours = set(numbers(content)) | {float(key) for key in numbers([list(map(str, keys(content)))])}
        missing = set(numbers({key: value for key, value in reference.items() if key != "number_of_tasks"})) - ours
        if name == "figure7":  # its axis says 1k to 64k
            assert {1024 * 2**power for power in range(7)} <= ours
            missing -= {float(2**power) for power in range(7)}
        assert not missing, (name, sorted(missing))


def keys(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        yield from tree
    for child in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from keys(child)


def test_there_is_a_file_for_every_table_and_figure(paper: dict[str, Place]) -> None:
    wanted = {f"table{n}" for n in range(1, 12)} | {f"figure{n}" for n in range(1, 18)} | {"headline"}
    assert set(paper) == wanted
    ignored = subprocess.run(["git", "check-ignore", "results/paper/table2.yaml"], cwd=ROOT, capture_output=True)
    assert ignored.returncode == 1, "git ignores results/paper"


# --- typed values -------------------------------------------------------------------------------------------------


def test_a_value_has_the_keys_of_a_run_and_says_where_it_stands(paper: dict[str, Place]) -> None:
    (value,) = paper["table2"].find(model="llama31_8b", method="quest", task="longbench", budget=256, metric="qasper")
    assert (value.value, value.unit, value.confidence, value.dataset) == (33.1, "%", "approx", "qasper")
    assert value.source == "Table 2: Llama3.1-8B, Quest, Qasp"
    assert any("changed rows" in caveat for caveat in value.caveats)
    (full,) = paper["table2"].find(model="llama31_8b", method="fkv", metric="qasper")
    assert (full.value, full.budget, full.confidence) == (45.3, None, "exact")
    (reasoning,) = paper["table3"].find(model="r1_qwen_32b", method="fasa", task="aime24", budget=2500)
    assert (reasoning.value, reasoning.metric) == (73.2, "pass@1")


def test_ranges_and_points_that_are_not_given(paper: dict[str, Place]) -> None:
    (value,) = paper["figure4"].find(model="llama32_3b", dataset="pg19", method="streamingllm", budget=0.2)
    assert (value.value, value.low, value.high) == (None, 25.0, None)
    assert [value.get("context") for value in paper["figure7"].find(metric="step_s", method="fkv")] == [1024, 65536]
    assert paper["figure7"].series(metric="step_s", method="fkv") == [0.02, 0.14]
    with pytest.raises(LookupError, match=r"figure4 has 0 numbers .*not 1"):
        paper["figure4"].number(dataset="pg19", method="streamingllm")


def test_data_sets_are_those_of_the_tasks(paper: dict[str, Place]) -> None:
    for value in (value for place in paper.values() for value in place.values):
        known = {"longbench": set(DATA_SETS), "ppl": {"wikitext", "pg19", "c4"}}.get(str(value.task), set())
        assert value.dataset is None or value.dataset in known, value


# --- the schema ---------------------------------------------------------------------------------------------------

GOOD = """
title: T
unit: "%"
rows: method
columns: {dataset: [qasper, lcc]}
where: {task: longbench, budget: 256}
blocks:
  - values: {fasa: [1, 2.5], fkv: [{low: 3, high: 4}, null]}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title: T", "", r"title is missing"),
        ("title: T", "title: 3", r"title=3 is not allowed: must be a valid string"),
        ("title: T", "title: T\nnote: x", r"note='x' is not allowed: unknown key"),
        ('unit: "%"', "unit: percent", r"unit='percent' is not allowed: must be '%', 'points'"),
        ('unit: "%"', "", r"blocks\.0\.unit is missing"),
        ('unit: "%"', 'unit: "%"\nconfidence: sure', r"confidence='sure' is not allowed: must be 'exact', 'approx'"),
        ("rows: method", "", r"blocks\.0\.rows is missing"),
        ("{dataset: [qasper, lcc]}", "{dataset: [a], budget: [1]}", r"columns=.* is not allowed: .*at most 1"),
        ("{dataset: [qasper, lcc]}", "{k: [1, 2]}", r"blocks\.0\.metric is missing"),
        ("[1, 2.5]", "[1]", r"blocks\.0\.values\.fasa=\[1\] is not allowed: must have 2 numbers"),
        ("2.5", "two", r"blocks\.0\.values\.fasa\.1='two' is not allowed: must be a number, null, or a range"),
        ("2.5", "true", r"blocks\.0\.values\.fasa\.1=True is not allowed: must be a number"),
        ("2.5", ".nan", r"blocks\.0\.values\.fasa\.1=nan is not allowed: must be a number"),
        (
            "{low: 3, high: 4}",
            "{low: 3, up: 4}",
            r"blocks\.0\.values\.fkv\.0=.* is not allowed: must be a number, null",
        ),
        ("fasa:", "fassa:", r"blocks\.0: method='fassa' is not allowed: must be one of .*fasa, .*fkv"),
        ("task: longbench", "task: longbunch", r"blocks\.0: task='longbunch' is not allowed: .*longbench"),
        ("task: longbench", "model: gpt", r"blocks\.0: model='gpt' is not allowed: .*llama31_8b"),
        ("budget: 256", "budget: many", r"blocks\.0: budget='many' is not allowed: must be a number of tokens"),
        ("budget: 256", "budget: [1]", r"where\.budget=\[1\] is not allowed: must be a number or a text"),
        ("lcc", "qasper", r"blocks\.0='Table 1: fasa, qasper' is not allowed: stands in the file twice"),
        ("title: T", "title: [T", r"table1\.yaml is no YAML"),
        (GOOD, "- 1", r"table1\.yaml=\[1\] is not allowed: must be a mapping"),
    ],
)
def test_each_error_of_the_schema_names_file_key_and_value(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "table1.yaml"
    path.write_text(GOOD)
    assert [value.value for value in load_file(path).values] == [1, 2.5, None]
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UserError, match=message) as error:
        load_file(path)
    assert "table1.yaml" in str(error.value)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read: no \*\.yaml in"):
        load(tmp_path)
    with pytest.raises(UserError, match=r"cannot be read: No such file .*table9\.yaml"):
        load_file(tmp_path / "table9.yaml")


# --- the contradictions -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(paper: dict[str, Place]) -> dict[str, Check]:
    return run_checks(paper)


def test_averages_of_table_2(found: dict[str, Check]) -> None:
    check = found["averages"]
    assert check.finding.startswith("14 of 30 AVG cells")
    rows = {row[:2]: row[2:] for row in check.rows}
    assert rows["mistral_7b", "FKV"] == ("47.4", "47.74", "-0.34", "42.3")
    assert rows["qwen25_7b", "SnapKV"] == ("42.6", "44.62", "-2.02", "12.3")
    by_model = {model: sum(row[0] == model for row in check.rows) for model in {row[0] for row in check.rows}}
    assert by_model == {"mistral_7b": 1, "qwen25_7b": 2, "llama31_8b": 6, "qwen25_14b_1m": 5}


def test_table_2_relative_to_full_kv(found: dict[str, Check]) -> None:
    rows = {row[:2]: row[2:] for row in found["relative"].rows}
    assert rows["llama32_3b", "FASA"] == ("-0.7", "-0.69", "98.3", "98.4")
    assert rows["mistral_7b", "FASA"] == ("+0.4", "-0.01", "100.8", "100.0")
    assert found["relative"].finding.endswith("FASA on mistral_7b.")


def test_cells_that_follow_from_others(found: dict[str, Check]) -> None:
    assert {row[0]: row[1:3] for row in found["arithmetic"].rows} == {
        "Table 2, difference of AVG to FKV": ("25", "0"),
        "Table 4, gain": ("8", "0"),
        "Table 5, AVG": ("4", "0"),
        "Table 6, CV": ("6", "2"),
        "Table 10, Avg. with the diagonal": ("20", "0"),
    }


def test_shares_of_right_answers(found: dict[str, Check]) -> None:
    assert is_share(0.7, 150)  # 1 of 150
    assert not is_share(0.7, 480)  # 3 are 0.6, 4 are 0.8
    assert is_share(43.9, 480, cut=True)  # 211 of 480 are 43.958
    assert not is_share(43.9, 480)
    assert is_share(72.4, 500)
    assert not is_share(53.87, 500)
    assert is_share(3.3, 30)
    finding, _, cut = found["granularity"].finding.partition("Only if")
    assert re.findall(r"([\d.]+) \(", finding) == ["53.87", "20.5", "68.3", "72.8", "70.1", "38.4", "73.2"]
    assert re.findall(r"([\d.]+) \(", cut) == ["43.9", "29.1", "66.6"]
    rows = {row[:3]: row[3:] for row in found["granularity"].rows}
    assert rows["r1_llama_8b", "aime24", "k/480"] == ("31", "11")
    assert rows["r1_qwen_14b", "math500", "k/500"] == ("25", "0")


def test_lengths_equal_rows_and_values_in_two_places(found: dict[str, Check]) -> None:
    assert found["lengths"].finding == "12 of 42 lengths do not add up."
    assert ("r1_qwen_14b", "aime24", "FASA", "156", "165") in found["lengths"].rows
    assert found["repeated"].rows == [
        ("aime24", "SnapKV, r1_qwen_14b", "SnapKV, r1_qwen_32b", "10, 23.3, 40, 46, 52.7")
    ]
    assert [row[1::2] for row in found["across"].rows] == [("30", "29.9"), ("45.7", "45.3")]


def test_base_overlap_random_compression_and_speedup(found: dict[str, Check]) -> None:
    assert found["base"].rows[0] == ("FKV", "0.1", "0.02")
    assert found["overlap"].finding.startswith("8 of 40 pairs")
    assert min(row[2] for row in found["overlap"].rows) == "65.5"
    assert [row[2] for row in found["random_row"].rows] == ["3,200", "7,111", "8,000", "4,021", "4,016", "4,008"]
    assert compression_factor(0.25, 0.1) == pytest.approx(2 / 0.425)
    assert compression_factor(0.25, 0) == 8
    assert found["compression"].rows[-1] == ("0.1", "4.71")
    assert found["speedup"].rows[0] == ("65536", "2.56", "printed", "1.40")


def test_numbers_of_the_text(paper: dict[str, Place]) -> None:
    verdicts = {each.claim.text: (each.value, each.holds) for each in recomputed(paper)}
    assert len(verdicts) == 16
    wrong = sorted(round(value, 2) for value, holds in verdicts.values() if not holds)
    assert wrong == [-3.0, 1.1, 1.4, 4.71, 65.5]
    values = [round(value, 2) for value, holds in verdicts.values() if holds]
    assert values == [10.33, 43.0, 13.4, 21.6, 86.4, 9.95, 18.9, 89.87, 2.56, 0.79, 89.5]


def test_checks_follow_the_values(paper: dict[str, Place]) -> None:
    """Another AVG cell, another finding: nothing is typed in."""
    values = tuple(
        Value(**{**vars(value), "value": 47.7})
        if value.get("metric") == "avg_table2" and (value.model, value.method) == ("mistral_7b", "fkv")
        else value
        for value in paper["table2"].values
    )
    changed = run_checks({**paper, "table2": Place(**{**vars(paper["table2"]), "values": values})})
    assert changed["averages"].finding.startswith("13 of 30")
    assert changed["relative"].finding == "Ahead of full KV by AVG and not by the columns: FASA on mistral_7b."
    assert changed["arithmetic"].rows[0][2] == "5"  # all printed differences of that model


def test_the_command_prints_every_check() -> None:
    command = [sys.executable, "-m", "fasa_bench.paper"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("Table 2: AVG")]
    assert len(done.stdout.splitlines()) > 100
    assert main(["--paper", "nowhere"]) == 2


def test_the_document_shows_the_computed_numbers(found: dict[str, Check]) -> None:
    document = (ROOT / "docs" / "reproduction.md").read_text("utf-8")
    shown = re.findall(r"<!-- check: (\S+) -->", document)
    assert shown == [check.__name__ for check in CHECKS]
    assert update(document, found) == document, "run python -m fasa_bench.paper --update docs/reproduction.md"
    with pytest.raises(UserError, match=r"check='nothing' is not allowed: must be one of claims, averages"):
        update("<!-- check: nothing --><!-- end -->", found)
