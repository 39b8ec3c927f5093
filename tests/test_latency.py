"""Timing decode steps: what is filled, who takes turns, which numbers come out; tables and figures of them."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from torch import Tensor
from transformers import LlamaForCausalLM

from fasa_bench import runner, timing
from fasa_bench.cache import KVLayer
from fasa_bench.drawings.latency import figure3, figure7
from fasa_bench.errors import UserError
from fasa_bench.filling import filled
from fasa_bench.latency_tables import Timings, markdown, timings
from fasa_bench.method import Method, Observation
from fasa_bench.methods import fused_cpu
from fasa_bench.methods.h2o import H2O
from fasa_bench.methods.oracle import Oracle
from fasa_bench.methods.rkv import RKV
from fasa_bench.methods.snapkv import SnapKV
from fasa_bench.paper import load
from fasa_bench.plain import Plain
from fasa_bench.report import main
from fasa_bench.roofline import bandwidth, free_bytes
from fasa_bench.session import Session
from fasa_bench.store import Run, RunStore, load_run
from fasa_bench.task import Example, Prediction, Timing
from fasa_bench.tasks.latency import Latency
from tests.conftest import ROOT

MEASURED: dict[str, Any] = {
    "method": {
        "step_ms": [10.0, 12.0, 11.0, 10.0],
        "stages_ms": {"tip": 2.0, "attend": 1.0, "modules": 7.0, "glue": 0.5},
        "read_bytes": 100 * 2**20,
        "device_bytes": 50 * 2**20,
        "host_bytes": 3 * 2**20,
    },
    "full": {
        "step_ms": [20.0, 22.0, 33.0, 33.0],
        "stages_ms": {"attend": 15.0, "modules": 7.0, "glue": 1.0},
        "read_bytes": 400 * 2**20,
        "device_bytes": 400 * 2**20,
        "host_bytes": 0,
    },
    "sdpa": {
        "step_ms": [24.0, 22.0, 42.0, 42.0],
        "stages_ms": {"attend": 22.0},
        "read_bytes": 400 * 2**20,
        "device_bytes": 400 * 2**20,
        "host_bytes": 0,
    },
    "plain": {"step_ms": [40.0, 40.0, 80.0, 80.0], "device_bytes": 400 * 2**20, "host_bytes": 0},
    "weight_bytes": 100 * 2**20,
    "bandwidth": {"sum": 1, "product": 2, "copy": 3, "limit": 50 * 2**30},
}


# filling ----------------------------------------------------------------------------------------------------------


def test_filled_is_a_cache_of_random_tokens_in_one_piece(network: LlamaForCausalLM) -> None:
    with Session(network) as session:
        prefilled = filled(session, 3000, batch=2, seed=5, reserve=40)
        assert (prefilled.tokens, prefilled.logits.shape) == (3000, (2, 101))
        assert prefilled.next_position.tolist() == [[3000], [3000]]
        assert math.isnan(prefilled.seconds)
        layers = prefilled.cache.layers
        drawn = layers[0].keys[:, :, 1:]
        assert drawn.shape == (2, 2, 2999, 16)
        assert drawn.mean().abs() < 0.02
        assert drawn.std().item() == pytest.approx(1, abs=0.02)
        assert layers[0].positions[0, 0].tolist() == list(range(3000))
        assert not torch.equal(layers[0].keys, layers[1].keys)
        assert not torch.equal(layers[0].keys[:, :, 1:], layers[0].values[:, :, 1:])
        rows = -(-3040 // 64) * 64  # whole blocks, and nothing besides
        assert prefilled.cache.device_bytes == 2 * 2 * rows * (2 * 2 * 16 * 4 + 8)
        again = filled(session, 3000, batch=2, seed=5)
        assert torch.equal(again.cache.layers[1].values, layers[1].values)
        with pytest.raises(ValueError, match="tokens and rows"):
            filled(session, 0)


def test_a_step_on_it_is_what_transformers_gives_for_the_same_keys_and_values(network: LlamaForCausalLM) -> None:
    token = torch.tensor([[7], [8]])
    with Session(network) as session:
        prefilled = filled(session, 50, batch=2, reserve=8)
        plain = Plain(prefilled)
        logits = []
        hook = network.register_forward_hook(lambda module, given, output: logits.append(output.logits[:, -1]))
        for _ in range(2):
            assert plain.step(token) > 0
        hook.remove()
        assert network.config._attn_implementation == "fasa_bench"  # put back
        with prefilled.fork(Method("fkv"), None) as decoder:
            for expected in logits:
                torch.testing.assert_close(decoder.step(token), expected, atol=1e-5, rtol=1e-5)
        assert plain.found() == {"device_bytes": 2 * 2 * 2 * 52 * 16 * 2 * 4, "host_bytes": 0}


def test_methods_that_watch_the_prompt_get_random_observations(network: LlamaForCausalLM) -> None:
    with Session(network) as session:
        prefilled = filled(session, 60, observe=Observation(window=8, mass=True))
        layer = prefilled.cache.layers[1]
        assert layer.prompt_queries is not None
        assert layer.prompt_mass is not None
        assert (layer.prompt_queries.shape, layer.prompt_mass.shape) == ((1, 4, 8, 16), (1, 4, 60))
        for method in (H2O("h2o"), SnapKV("snapkv", window=8), RKV("rkv", window=8)):
            prefilled = filled(session, 60, observe=method.observes(), reserve=9)
            with prefilled.fork(method, 20) as decoder:
                found = timing.measure(decoder, Timing(60, steps=4, block=2, warmup=1))
            row = 2 * 2 * 2 * 16 * 4  # layers, heads, keys and values
            assert found["method"]["read_bytes"] < 40 * row < 60 * row < found["full"]["read_bytes"]


def test_random_filling_reads_what_a_real_prompt_makes_a_step_read(network: LlamaForCausalLM) -> None:
    ids = list(range(90))
    read = []
    with Session(network) as session:
        for fill in ("random", "prefill"):
            how = Timing(90, batch=2, steps=2, block=1, warmup=1, fill=fill)  # type: ignore[arg-type]
            prefilled = timing.begin(session, ids, how, Observation())
            assert math.isnan(prefilled.seconds) == (fill == "random")
            with prefilled.fork(Oracle("oracle"), 16) as decoder:
                found = timing.measure(decoder, how)
            read.append([(found[who]["read_bytes"], found[who]["device_bytes"]) for who in ("method", "full")])
    assert read[0] == read[1]


# taking turns -----------------------------------------------------------------------------------------------------


class Actor:
    """Takes part, and writes down when."""

    def __init__(self, name: str, seconds: float, diary: list[str]) -> None:
        self.name, self.seconds, self.diary = name, seconds, diary

    def step(self, token_ids: Tensor) -> float:
        self.diary.append(self.name)
        return self.seconds

    def staged(self, token_ids: Tensor) -> None:
        self.diary.append(self.name.upper())


def test_blocks_take_turns_and_the_order_changes() -> None:
    diary: list[str] = []
    actors = {name: Actor(name, seconds, diary) for name, seconds in (("a", 0.001), ("b", 0.0025))}
    how = Timing(1, steps=4, block=2, warmup=1)
    found = timing.take_turns(actors, 101, how)  # type: ignore[arg-type]
    assert "".join(diary) == "ab" + "aaA" + "bbB" + "bbB" + "aaA"
    assert found == {"a": [1.0] * 4, "b": [2.5] * 4}


@dataclass
class Sleeper(Oracle):
    """Chooses slowly."""

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().select(layer, query)


def test_stages_hold_what_they_are_called_after(network: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 ms in the selection of each of two layers, 15 ms in the head: each in its stage, and the sum is the step."""
    head = network.lm_head.forward

    def slow(hidden: Tensor) -> Tensor:
        time.sleep(0.015)
        return head(hidden)

    monkeypatch.setattr(network.lm_head, "forward", slow)
    with Session(network) as session:
        prefilled = filled(session, 40, reserve=40)
        with prefilled.fork(Sleeper("sleeper"), 8) as decoder:
            taking = timing.Stepping(decoder)
            steps = []
            for _ in range(5):
                steps.append(1e3 * taking.step(torch.tensor([[1]])))
                taking.staged(torch.tensor([[1]]))
            stages = taking.found()["stages_ms"]
    assert set(stages) == {"select", "top_k", "gather", "attend", "update", "modules", "glue"}
    assert 20 <= stages["select"] < 40  # with room for a busy machine
    assert 15 <= stages["modules"] < 35
    assert stages["glue"] < 15
    assert sum(stages.values()) == pytest.approx(statistics.median(steps), rel=0.4)
    assert not network.lm_head._forward_hooks  # ours are gone


def test_weights_that_a_step_reads(network: LlamaForCausalLM) -> None:
    total = sum(weight.numel() * 4 for weight in network.parameters())
    assert timing._weight_bytes(network) == total - 101 * 64 * 4  # the embedding is looked up, the head is read
    network.lm_head.weight, kept = network.model.embed_tokens.weight, network.lm_head.weight
    try:
        assert timing._weight_bytes(network) == total - 101 * 64 * 4  # one matrix, read as the head
    finally:
        network.lm_head.weight = kept


def test_the_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fasa_bench.roofline.READ_BYTES", {"cpu": 2**22})
    rates = bandwidth.__wrapped__(torch.device("cpu"), repeats=2)
    assert rates["limit"] == max(rates["sum"], rates["product"], rates["copy"]) > 1e8
    free = free_bytes(torch.device("cpu"))
    assert free is None or 2**20 < free < 2**50


# the task ---------------------------------------------------------------------------------------------------------


def example(context: int = 65536, batch: int = 1) -> Example:
    return Example("x", [1], timing=Timing(context, batch), fields={"context": context, "batch": batch})


def scores(measured: dict[str, Any] = MEASURED) -> dict[str, Any]:
    return Latency(steps=4, block=2).score(example(), Prediction([], "", "timed", measured=measured))


def test_scores_are_ratios_of_turns_and_shares_of_the_bandwidth() -> None:
    found = scores()
    assert (found["decode_ms"], found["full_ms"], found["plain_ms"]) == (10.5, 27.5, 60.0)
    assert found["speedup"] == [round(21 / 11, 4), round(33 / 10.5, 4)]
    assert found["sdpa_speedup"] == [round(23 / 11, 4), round(42 / 10.5, 4)]
    assert found["plain_speedup"] == [round(40 / 11, 4), round(80 / 10.5, 4)]
    assert found["decode_limit_ms"] == pytest.approx(1e3 * 200 / 51200)  # MiB by MiB/s
    assert found["full_limit_ms"] == pytest.approx(1e3 * 500 / 51200)
    assert found["decode_share"] == pytest.approx(found["decode_limit_ms"] / 10.5)
    assert found["decode_accounted"] == pytest.approx(10.5 / 10.5)
    assert (found["decode_attention_ms"], found["full_attention_ms"]) == (3.0, 15.0)
    assert scores({"does_not_fit": "too large"}) == {"does_not_fit": "too large"}


def test_metrics_are_by_context_and_batch() -> None:
    rows = [
        {"fields": {"context": context, "batch": batch}, "scores": scores()}
        for context, batch in ((1000, 1), (65536, 1), (65536, 4))
    ]
    rows.append({"fields": {"context": 131072, "batch": 1}, "scores": {"does_not_fit": "too large"}})
    metrics = Latency().metrics(rows)
    entry = metrics["speed-up 64K"]
    assert (entry["value"], entry["n"]) == (pytest.approx((21 / 11 + 33 / 10.5) / 2, abs=1e-4), 2)
    assert (entry["ci_low"], entry["ci_high"]) == (round(21 / 11, 4), round(33 / 10.5, 4))
    assert metrics["decode_ms/1,000"]["value"] == 10.5
    assert "over transformers/64K x 4" in metrics
    assert metrics["n_does_not_fit"]["value"] == 1
    assert not any("128K" in name for name in metrics)


@pytest.mark.parametrize(
    ("key", "value"),
    [("contexts", []), ("contexts", [0]), ("batches", [1, 1]), ("steps", 0), ("block", 5), ("warmup", 0)],
)
def test_bad_parameters_are_named(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"task\.{key}={value!r}".replace("[", r"\[").replace("]", r"\]")):
        Latency(**{key: value})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    """Compose a job as the command line does."""
    base = ["model=tiny", "logger=none", "budget=16", "calibration.prefill=128", "calibration.decode=8"]
    base += ["calibration.k=32", "task=latency", "task.contexts=[64,256]", "task.steps=4", "task.block=2"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):

        def job(*overrides: str) -> runner.Job:
            return runner.Job.of(compose("config", [*base, f"results_dir={tmp_path}", *overrides]))

        yield job


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_a_run_is_stored_and_goes_on_where_it_stopped(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ("method=fasa_plus", "task.plain=true", "task.batches=[1,2]", "task.prefill=64")
    calls: list[str] = []
    begin = timing.begin

    def counted(session: Session, ids: Any, how: Timing, observe: Observation) -> Any:
        calls.append(f"{how.context}x{how.batch}")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return begin(session, ids, how, observe)

    monkeypatch.setattr(runner, "begin", counted)
    with pytest.raises(KeyboardInterrupt):
        runner.run(make(*line))
    folder = runner.run(make(*line))
    assert calls == ["64x1", "256x1", "64x2", "64x2", "256x2"]
    rows, summary = rows_of(folder), json.loads((folder / "summary.json").read_text())
    compiled = fused_cpu.missing(torch.empty(0)) is None
    rest = {"kernels"} if compiled else {"select", "gather", "update"}
    assert [row["id"] for row in rows] == ["64x1", "256x1", "64x2", "256x2"]
    assert [row["prefill_s"] is None for row in rows] == [False, True, False, True]  # up to 64 tokens
    for row in rows:
        assert row["step_ms"] == row["measured"]["method"]["step_ms"]
        assert len(row["measured"]["plain"]["step_ms"]) == 4
        assert row["attended_tokens"] == 16
        assert row["measured"]["full"]["read_bytes"] > row["measured"]["method"]["read_bytes"] > 0
        assert set(row["stages_ms"]) == {"tip", "top_k", "attend", "modules", "glue", *rest}
        assert ("sdpa" in row["measured"]) == ("sdpa_speedup" in row["scores"]) == compiled
    tokens = rows[1]["measured"]["full"]["read_bytes"] / (2 * 2 * 2 * 16 * 4)
    assert tokens == 256 + 3 + 2 + 1 + 2  # of the last timed step: warm-up, a turn, its step for the stages, a turn
    assert summary["metrics"]["speed-up 256"]["n"] == 2
    assert summary["deviations"]["task.fill"]["value"] == "random"
    assert runner.run(make(*line)) == folder
    assert len(calls) == 5


def test_what_does_not_fit_is_reported_and_the_rest_runs(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token = 2 * 2 * 16 * 2 * 4  # layers, KV heads, dimensions, keys and values, bytes
    monkeypatch.setattr(timing, "free_bytes", lambda device: 2 * token * 200)
    folder = runner.run(make("method=fkv"))
    small, large = rows_of(folder)
    assert small["step_ms"]
    assert large["scores"]["does_not_fit"].startswith("needs 0.0 GiB of memory")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "complete"
    assert summary["metrics"]["n_does_not_fit"]["value"] == 1
    assert summary["memory"]["device_bytes"] == small["device_bytes"]
    assert "256x1: needs 0.0 GiB" in markdown(timings([load_run(folder)]))


def test_another_machine_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Latency().fingerprint()
    machine = {"cpu": "an abacus", "threads": 1, "gpu": [], "driver": None, "platform": "x"}
    monkeypatch.setattr("fasa_bench.tasks.latency.environment", lambda: machine)
    assert Latency().fingerprint() != here


# tables and figures -----------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> Timings:
    (found,) = timings([stored_run(tmp_path, "a", share="max")])
    return found


def stored_run(tmp_path: Path, letter: str, **method: str) -> Run:
    identity = {"model": {"dtype": "torch.float32"}}
    config = {"model": "m", "method": {"name": "fasa_x", **method}, "identity": identity}
    with RunStore(tmp_path, letter * 16, config) as run:
        for context in (65536, 8192):
            measured = json.loads(json.dumps(MEASURED))
            if context == 8192:
                measured["full"]["step_ms"] = [11.0] * 4
                measured["plain"]["step_ms"] = [12.0] * 4
            fields = {"context": context, "batch": 1}
            row = {"id": str(context), "fields": fields, "prefill_s": 5.5 if context == 8192 else None}
            run.append({**row, "measured": measured, "scores": scores(measured)})
        run.write_summary({"status": "complete", "model": "m", "method": "fasa_x", "task": "latency", "budget": 256})
    return load_run(tmp_path / "runs" / (letter * 16))


def test_runs_of_one_method_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    runs = [stored_run(tmp_path, letter, share=share) for letter, share in (("a", "softmax"), ("b", "max"))]
    found = timings(runs)
    assert [each.name for each in found] == ["fasa_x (share=max) 256", "fasa_x (share=softmax) 256"]
    assert [timed.name for timed in found[0].of_one("method")] == ["fasa_x (share=max) 256"] * 2


def test_the_table_has_times_ratios_limits_and_stages(stored: Timings) -> None:
    lines = markdown([stored]).splitlines()
    assert lines[0].startswith("## fasa_x 256 · m · ")
    assert lines[0].endswith("float32")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| 64K")]
    assert cells[0] == [
        *("64K", "1", "fasa_x 256", "10.5 [10.0, 11.2]", "2.53 [1.91, 3.14]", "3.05 [2.09, 4.00]"),
        "5.63 [3.64, 7.62]",
        *("100.0", "3.91", "37%", "50.00", "3.000"),
    ]
    assert cells[1][2:7] == ["full KV", "27.5 [21.5, 33.0]", "-", "-", "-"]
    assert cells[2][2:4] == ["full KV by SDPA", "33.0 [23.5, 42.0]"]
    assert cells[3][2:] == ["transformers", "60.0 [40.0, 80.0]", "-", "-", "-", "-", "-", "-", "400.0", "0"]
    assert cells[4] == ["64K", "1", "fasa_x 256", "2.00", "1.00", "7.00", "0.50", "10.5", "10.5", "100%"]
    assert cells[5] == ["64K", "1", "full KV", "-", "15.0", "7.00", "1.00", "23.0", "27.5", "84%"]
    (growth,) = (line for line in lines if line.startswith("Growth"))
    assert "fasa_x 256 1.00 times (8K to 64K), full KV 2.50 times (8K to 64K), full KV by SDPA " in growth
    assert growth.endswith("transformers 5.00 times (8K to 64K).")


def test_figures_show_the_measured_points_beside_the_papers(stored: Timings) -> None:
    paper = load()
    theirs, ours, faster = figure3([stored], paper).axes
    assert [bar.get_height() for bar in theirs.containers[0]] == [8.2, 8.3, 9.0, 10.3, 13.3, 20.4]  # type: ignore[attr-defined]
    assert [bar.get_height() for bar in ours.containers[0]] == pytest.approx([512 * 0.011, 512 * 0.0275])  # type: ignore[attr-defined]
    assert [bar.get_height() for bar in ours.containers[1]] == [5.5, 0]  # type: ignore[attr-defined]
    assert ours.get_ylim() == (0, pytest.approx(1.1 * 512 * 0.0275))  # room for what stands above the highest bar
    lines = {line.get_label(): line.get_xydata().tolist() for line in faster.get_lines()}  # type: ignore[union-attr]
    assert lines["fasa_x 256"] == [[8192, pytest.approx(1.024, abs=1e-3)], [65536, pytest.approx(2.526, abs=1e-3)]]
    assert lines["limit by bytes read"] == [[8192, 2.5], [65536, 2.5]]  # 500 MiB by 200
    assert lines["paper, FASA-C, 64K"] == [[65536, 2.56]]
    their_memory, their_time, memory, time_axes = figure7([stored], paper).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in their_memory.get_lines()}  # type: ignore[union-attr]
    assert lines == {"full KV": [[65536, 75]], "FASA-C: as full KV": [], "FASA-M": [[65536, 10]]}
    lines = {line.get_label(): line.get_xydata().tolist() for line in their_time.get_lines()}  # type: ignore[union-attr]
    assert lines["full KV"] == [[1024, 0.02], [65536, 0.14]]
    assert their_time.texts[0].get_text() == "claimed at 64K: 2.56 times;\nthese points give 1.4"
    lines = {line.get_label(): line.get_xydata().tolist() for line in memory.get_lines()}  # type: ignore[union-attr]
    assert lines == {"full KV": [[8192, 400], [65536, 400]], "fasa_x 256": [[8192, 50], [65536, 50]]}
    lines = {line.get_label(): line.get_xydata().tolist() for line in time_axes.get_lines()}  # type: ignore[union-attr]
    assert lines["transformers"] == [[8192, 12], [65536, 60]]


def test_each_machine_has_its_own_panels(stored: Timings) -> None:
    other = replace(stored, run=replace(stored.run, env={**stored.run.env, "gpu": ["Some GPU"]}))
    axes = figure7([stored, other], load()).axes
    assert len(axes) == 6
    for ax in axes[2:]:
        assert [line.get_label() for line in ax.get_lines()][:2] == ["full KV", "fasa_x 256"]
    assert sum("Some GPU" in ax.get_title() for ax in axes) == 2
    assert len(figure3([stored, other], load()).axes) == 6  # one of which is empty


def test_nothing_timed_is_said_and_not_drawn() -> None:
    _, ours, faster = figure3([], load()).axes
    for ax in (ours, faster, *figure7([], load()).axes[2:]):
        assert [text.get_text() for text in ax.texts] == ["not run"]
        assert not ax.lines
        assert not ax.patches


def test_the_report_writes_both_figures_the_same_each_time(stored: Timings, tmp_path: Path) -> None:
    command = ["figures", "--results-dir", str(tmp_path), "--only", "figure3", "figure7"]
    assert main(command) == 0
    made = {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert set(made) == {f"{name}.{kind}" for name in ("figure3", "figure7") for kind in ("pdf", "png", "json")}
    record = json.loads(made["figure7.json"])
    assert record["runs"] == {"a" * 16: f"runs/{'a' * 16}"}
    point = next(one for one in record["points"] if (one["series"], one["x"]) == ("fasa_x 256", 65536))
    assert point["ms"]["median"] == pytest.approx(10.5, abs=0.1)
    assert point["device_mib"] == 50
    assert main(command) == 0
    assert made == {path.name: path.read_bytes() for path in (tmp_path / "figures").iterdir()}
    assert main(["tables", "--results-dir", str(tmp_path)]) == 0
    assert (tmp_path / "tables" / "latency.md").read_text() == markdown([stored])
