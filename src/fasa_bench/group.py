"""Jobs of one model and one task go through the examples together: one dense prompt pass serves all of them."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fasa_bench import runner
from fasa_bench.errors import FailedExamplesError, UserError
from fasa_bench.interrupt import finishing
from fasa_bench.prompts import Prompts, dense_ids
from fasa_bench.runner import Job
from fasa_bench.session import Session
from fasa_bench.store import BusyError, Run, RunStore, has_files, load_run, run_id
from fasa_bench.task import Example
from fasa_bench.tracking import Tracker

log = logging.getLogger("fasa_bench")

# Called as soon as a job has ended: its run folder unless it raised, and what went wrong, if something did.
Report = Callable[[Job, Path | None, Exception | None], None]


def grouped(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that can share prompts, in the order given; one model after the other, each loaded once.

    Jobs of a group hold the same model and task objects, and so the same weights and examples.
    """
    groups: dict[str, dict[str, list[Job]]] = {}
    for job in jobs:
        shared = [job.config[key] for key in ("task", "limit", "shard")]
        of_model = groups.setdefault(repr(job.model.spec), {})
        of_model.setdefault(repr(shared), []).append(job)
    result = []
    for of_model in groups.values():
        model = next(iter(of_model.values()))[0].model
        result += [[replace(job, model=model, task=group[0].task) for job in group] for group in of_model.values()]
    return result


def run_group(jobs: Sequence[Job], report: Report) -> None:
    """Run the jobs of one group, or what is missing of them; one that fails leaves the others alone."""
    lanes: dict[Path, Lane] = {}
    try:
        for job in jobs:
            try:
                _enter(job, lanes, report)
            except Exception as error:
                report(job, None, error)
        if lanes:
            _walk(list(lanes.values()))
    except Exception as error:  # what all of them need
        for lane in lanes.values():
            lane.fail(error)
    except BaseException as error:
        for lane in lanes.values():
            lane.close("interrupted", error)
        raise


def _enter(job: Job, lanes: dict[Path, Lane], report: Report) -> None:
    lane = Lane(job, report)
    if lane.folder in lanes:  # full KV is the same run at every budget
        lanes[lane.folder].jobs.append(job)
    elif is_complete(lane.folder):
        log.info("nothing to do: %s is complete", lane.folder)
        _tell_of_texts(job, lane.folder, load_run(lane.folder).rows)
        report(job, lane.folder, None)
        _merge(job, report)
    else:
        lane.open()
        lanes[lane.folder] = lane


def _walk(lanes: Sequence[Lane]) -> None:
    """Example by example: no more than one prompt is held at a time."""
    job = lanes[0].job
    examples = list(job.task.examples(job.model, job.limit))
    if not examples:
        raise UserError("the task has no examples")
    if job.shard:
        examples = job.shard.of_examples(examples)
    for lane in lanes:
        with lane.failing():
            lane.examples = {example.id: example for example in lane.job.protocol.apply(examples, job.model)}
    if any(lane.waiting for lane in lanes):
        network = job.model.network
        for lane in lanes:
            with lane.failing():
                if lane.waiting:
                    lane.job.prepare()
        with Session(network, job.model.prefill_backend) as session, _progress(lanes) as bar:
            for example in examples:
                _evaluate(session, [lane for lane in lanes if lane.wants(example.id)], example.id, bar)
    for lane in lanes:
        with lane.failing():
            lane.finish([example.id for example in examples])


def _evaluate(session: Session, lanes: Sequence[Lane], name: str, bar: tqdm[Any]) -> None:
    """The rows of one example. Where memory is short, it is tried once more for that job alone."""
    lanes = sorted(lanes, key=lambda lane: dense_ids(lane.job, lane.examples[name]))
    prompts = Prompts(session, [(lane.job, lane.examples[name]) for lane in lanes])
    short = [lane for lane in lanes if not _row(session, lane, name, prompts, again=False, bar=bar)]
    del prompts
    for lane in short:
        gc.collect()
        if session.device.type != "cpu":
            torch.get_device_module(session.device).empty_cache()
        _row(session, lane, name, None, again=True, bar=bar)


def _row(session: Session, lane: Lane, name: str, prompts: Prompts | None, *, again: bool, bar: tqdm[Any]) -> bool:
    """Compute and store one row; False if memory was short for the first time."""
    example = lane.examples[name]
    with finishing(f"example {name}"), lane.failing():
        try:
            row = runner.evaluate(session, lane.job, example, prompts)
        except Exception as error:
            if is_out_of_memory(error) and not again:
                return False
            if not (is_out_of_memory(error) or isinstance(error, FloatingPointError)):
                raise
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            row = runner.failed_row(lane.job, example, reason)
            log.warning("%s: example %s failed: %s", lane.folder, name, reason)
        lane.keep(row)
    bar.update()
    return True


class Lane:
    """A run folder on its way through the examples, and the jobs that asked for it.

    examples: all of its examples by id, in order; waiting: how many of them have no row yet.
    """

    def __init__(self, job: Job, report: Report, identity: dict[str, Any] | None = None) -> None:
        self.jobs = [job]
        self.examples: dict[str, Example] = {}
        identity = identity or job.identity
        self.name = run_id(identity)
        self.folder = job.results_dir / "runs" / self.name
        self._report = report
        settings = job.config | {"identity": identity}
        self._store = RunStore(job.results_dir, self.name, settings, lambda row: runner.is_whole(job, row))
        self._tracker = Tracker.of(job.config["logger"], self.name, job.config, job.results_dir)
        self._stack = contextlib.ExitStack()
        self._peak_bytes = 0  # of the processes of shards
        self._running = False

    @property
    def job(self) -> Job:
        return self.jobs[0]

    @property
    def waiting(self) -> int:
        return sum(map(self.wants, self.examples))

    def wants(self, name: str) -> bool:
        return self._running and name in self.examples and name not in self._store.done

    def open(self) -> None:
        """Take the run folder; UserError if it cannot be had."""
        self._stack.enter_context(self._store)
        _tell_of_texts(self.job, self.folder, self._store.rows)
        self._stack.enter_context(self._tracker)
        self._running = True

    def keep(self, row: dict[str, Any]) -> None:
        self._store.append(row)
        self._tracker.log_row(row)

    def take(self, part: Run) -> None:
        """Rows that a shard has computed."""
        self._peak_bytes = max(self._peak_bytes, part.summary["memory"]["peak_bytes"] or 0)
        for row in self._store.take(part):
            self._tracker.log_row(row)

    def finish(self, names: Sequence[str]) -> None:
        """All examples were gone through. names: their ids, in order."""
        if not self._running:
            return
        order = {name: place for place, name in enumerate(names)}
        rows = sorted((row for row in self._store.rows if row["id"] in order), key=lambda row: order[row["id"]])
        failed = self._store.failed
        self._summarise(rows, "complete" if not failed else "partial" if rows else "failed")
        self._leave(None)
        error = None
        if failed:
            reasons = "; ".join(list(dict.fromkeys(row["error"] for row in failed))[:3])
            again = "they are no part of the scores; the same command tries them again"
            error = FailedExamplesError(f"{len(failed)} of {len(order)} examples failed ({reasons}): {again}")
        for job in self.jobs:
            self._report(job, self.folder, error)
        if not failed:
            _merge(self.job, self._report)

    def fail(self, error: Exception) -> None:
        """The run cannot go on: told at once, and in its folder."""
        if not self._running:
            return
        self.close("failed", error)
        for job in self.jobs:
            self._report(job, None, error)

    def close(self, status: str, error: BaseException) -> None:
        """Leave before all examples are done."""
        if not self._running:
            return
        try:
            self._summarise(self._store.rows, status, error)
        except Exception as other:  # a full disk, most likely; the first error is the one to tell
            log.warning("%s", other)
        self._leave(error)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """An exception inside ends this lane and no other."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def _summarise(self, rows: list[dict[str, Any]], status: str, error: BaseException | None = None) -> None:
        summary = runner.summarise(self.job, self.name, rows, status)
        summary["failed_examples"] = len(self._store.failed)
        summary["memory"]["peak_bytes"] = self._peak_bytes or summary["memory"]["peak_bytes"]
        if error is not None:
            summary["error"] = f"{type(error).__name__}: {error}"
            if not isinstance(error, UserError | KeyboardInterrupt):
                summary["traceback"] = "".join(traceback.format_exception(error))
        self._store.write_summary(summary)
        self._tracker.log_summary(summary)

    def _leave(self, error: BaseException | None) -> None:
        self._running = False
        self._stack.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _merge(job: Job, report: Report) -> None:
    """If this was the last shard of its run, write the whole run from the rows of all shards."""
    if job.shard is None:
        return
    identity = {key: value for key, value in job.identity.items() if key != "shard"}
    whole = Lane(job.sharded(None), report, identity)
    folders = [whole.folder.with_name(run_id(identity | {"shard": str(shard)})) for shard in job.shard.all]
    try:
        if not all(map(is_complete, folders)):
            return
        if is_complete(whole.folder):
            report(whole.job, whole.folder, None)
            return
        whole.open()
        for folder in folders:
            whole.take(load_run(folder))
        whole.finish([example.id for example in job.task.examples(job.model, job.limit)])
    except BusyError as error:
        log.info("%s", error)  # another shard has ended at the same time, and does it
    except Exception as error:
        whole.close("failed", error)
        report(whole.job, None, error)


def is_complete(folder: Path) -> bool:
    """Whether all of a run is there, and whole."""
    try:
        run = load_run(folder)
    except (OSError, ValueError):
        return False
    whole = run_id(run.config.get("identity") or {}) == folder.name  # its last entry: the file was not cut
    whole = whole and all(has_files(folder, row) for row in run.rows)
    return whole and run.summary.get("status") == "complete" and run.summary.get("examples") == len(run.rows)


def _tell_of_texts(job: Job, folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    """`store_text` changes no output and so no run id: rows that are stored already stay as they are."""
    stored = [row["prediction"] for row in rows if row.get("prediction", "") != ""]  # "": there is no text to store
    others = sum((text is None) == job.store_text for text in stored)
    if others:
        had = "without texts" if job.store_text else "with their texts"
        log.warning("%s: %d rows were stored %s and stay so; another results_dir starts anew", folder, others, had)


def is_out_of_memory(error: Exception) -> bool:
    """An accelerator's, Python's own, or one that torch raises like any other RuntimeError."""
    told = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(part in str(error) for part in told)


def _progress(lanes: Sequence[Lane]) -> tqdm[Any]:
    """A bar that counts rows, the stored ones as done."""
    job = lanes[0].job
    budget = "" if job.budget is None else f" budget={job.budget}"
    what = f"{job.method.name}{budget}" if len(lanes) == 1 else f"{len(lanes)} runs"
    total = sum(len(lane.examples) for lane in lanes)
    return tqdm(
        total=total,
        initial=total - sum(lane.waiting for lane in lanes),
        desc=f"{job.task.name} {what}",
        mininterval=0.2 if sys.stderr.isatty() else 15.0,
        file=sys.stderr,
        unit="ex",
    )
