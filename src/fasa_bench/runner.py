"""Run one job: each prompt is prefilled once and densely, decoded with the job's method, scored and stored."""

from __future__ import annotations

import logging
import resource
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from fasa_bench.calibration import Calibration
from fasa_bench.config import build
from fasa_bench.errors import UserError
from fasa_bench.identity import identity_of
from fasa_bench.method import Method, check_budget, resolve_budget
from fasa_bench.models import Model, ModelSpec
from fasa_bench.prompts import Prompts
from fasa_bench.protocol import Protocol
from fasa_bench.rows import answers, prompt, prompt_ends, without_texts
from fasa_bench.segments import Packing
from fasa_bench.session import Decoder, Generation, Prefilled, Session
from fasa_bench.shards import Shard
from fasa_bench.statistics import quantiles
from fasa_bench.store import run_id
from fasa_bench.study import Study
from fasa_bench.task import Example, Prediction, Task, Timing
from fasa_bench.timing import DoesNotFitError, begin, measure
from fasa_bench.windows import full_layers, windows

log = logging.getLogger("fasa_bench")

SECTIONS = ("protocol", "cache", "calibration", "model", "method", "task", "logger")
KEYS = ("budget", "seed", "limit", "shard", "results_dir", "store_text", *SECTIONS)
# of a row that could not be computed
NOTHING: dict[str, Any] = {"prompt_tokens": 0, "prefill_s": None, "compress_s": None, "step_ms": [], "stages_ms": {}}
NOTHING |= {"device_bytes": 0, "host_bytes": 0, "attended_tokens": None, "cached_tokens": None, "read_bytes": None}
NOTHING |= {
    "transferred_bytes": None,
    "hit_rate": None,
    "layer_steps": 0,
    "sparse_steps": 0,
    "sparse_steps_by_layer": [],
}


@dataclass
class Job:
    """One run: a method and a budget on a model and a task, with everything of its config checked."""

    config: dict[str, Any]
    model: Model
    task: Task
    method: Method
    calibration: Calibration
    budget: int | float | None
    packing: Packing
    protocol: Protocol
    limit: int | None
    shard: Shard | None
    results_dir: Path
    store_text: bool
    label: str = ""

    @classmethod
    def of(cls, cfg: DictConfig, label: str = "") -> Job:
        """Check a composed config as far as that goes without loading weights. label: what messages call the job."""
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
        for key in config:
            if key not in KEYS:
                raise UserError.of(key, config[key], f"unknown key; known keys are {', '.join(KEYS)}")
        limit, seed, results_dir = config["limit"], config["seed"], config["results_dir"]
        if not isinstance(results_dir, str) or not results_dir:
            raise UserError.of("results_dir", results_dir, "must be the path of a folder")
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise UserError.of("limit", limit, "must be an integer of at least 1, or null for all examples")
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise UserError.of("seed", seed, "must be an integer")
        if not isinstance(config["store_text"], bool):
            raise UserError.of("store_text", config["store_text"], "must be true or false")
        method = build("method", config["method"], Method)
        task, packing = build("task", config["task"], Task), build("cache", config["cache"], Packing)
        if task.parallel:
            _check_parallel(method, packing)
        task.check(method)
        protocol = build("protocol", config["protocol"], Protocol)
        if task.studies:
            _check_study(task, packing, protocol)
        config["protocol"] = asdict(protocol)  # as it is followed: tables name runs by it
        return cls(
            config=config,
            model=Model(build("model", config["model"], ModelSpec)),
            task=task,
            method=method,
            calibration=build("calibration", config["calibration"], Calibration),
            budget=check_budget(config["budget"], method),
            packing=packing,
            protocol=protocol,
            limit=limit,
            shard=Shard.of(config["shard"]),
            results_dir=Path(results_dir),
            store_text=config["store_text"],
            label=label,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that can change an output: what the run id is made of."""
        identity = identity_of(
            self.model,
            self.task,
            self.method,
            self.calibration,
            self.packing,
            self.protocol,
            budget=self.budget,
            seed=self.config["seed"],
            limit=self.limit,
        )
        return identity | {"shard": str(self.shard)} if self.shard else identity

    @property
    def run_id(self) -> str:
        return run_id(self.identity)

    def sharded(self, shard: Shard | None) -> Job:
        """The same on another part of the examples, or on all of them."""
        return replace(self, shard=shard, config=self.config | {"shard": str(shard) if shard else None})

    def prepare(self) -> None:
        """What needs the model: check layers, calibrate the method."""
        layers = self.model.config.num_hidden_layers
        for layer in self.method.dense_layers:
            if not 0 <= layer < layers:
                raise UserError.of("method.dense_layers", layer, f"layers of {self.model.name} are 0 to {layers - 1}")
        if self.method.takes_budget and not full_layers(self.model.config):
            allowed = f"fkv for {self.model.name}: all its layers have a sliding window, so that no method can act"
            raise UserError.of("method", self.method.name, allowed)
        self.method.prepare(self.model, self.calibration)

    @property
    def deviations(self) -> dict[str, dict[str, Any]]:
        """Every switch on which paper, official code and ours differ: its value here, and the difference."""
        parts: list[tuple[str, Any]] = [("method", self.method), ("task", self.task)]
        parts += [("protocol", self.protocol), ("cache", self.packing)]
        if self.method.uses_calibration or self.task.uses_calibration:
            parts.append(("calibration", self.calibration))
        return {
            f"{section}.{key}": {"value": getattr(part, key, None), "note": note}
            for section, part in parts
            for key, note in part.notes.items()
        } | self._windows

    @property
    def _windows(self) -> dict[str, dict[str, Any]]:
        """What a model's sliding windows mean for a run."""
        sizes = windows(self.model.config)
        if not any(sizes):
            return {}
        note = "a layer with a sliding window keeps it and is read whole; the method, its budget, its calibration and "
        note += "the realised tokens are those of the layers with full attention"
        found = {"window": max(filter(None, sizes)), "full_attention_layers": full_layers(self.model.config)}
        return {"model.windows": {"value": found, "note": note}}


def run(job: Job) -> Path:
    """Run one job, or what is missing of it; returns its run folder."""
    from fasa_bench.group import run_group  # it needs this module

    ends: list[tuple[Path | None, Exception | None]] = []
    run_group([job], lambda job, folder, error: ends.append((folder, error)))
    folder, error = ends[0]
    if error is not None:
        raise error
    assert folder is not None
    return folder


def evaluate(session: Session, job: Job, example: Example, prompts: Prompts | None = None) -> dict[str, Any]:
    """Decode and score one example: its row. A budget that is a share is one of the whole prompt.

    prompts: dense passes that other jobs share; None makes one.
    """
    if example.timing is not None:
        return _time(session, job, example, example.timing)
    prefilled = (prompts or Prompts(session, [(job, example)])).prefilled(job, example)
    if example.study is not None:
        return _study(prefilled, job, example, example.study)
    _, rest = job.protocol.split(example)
    budget = resolve_budget(job.budget, len(example.prompt_ids))
    samples = len(example.sampling.seeds) if example.sampling else 1
    with prefilled.fork(job.method, budget, samples, packing=job.packing) as decoder:
        decoder.feed(rest)
        prediction = _decode(decoder, job.model, example)
        row = _row(prefilled, decoder, example, prediction)
    row["scores"] = job.task.score(example, prediction)
    if not job.store_text:
        return without_texts(row, job.task.texts)
    return row | prompt_ends(example, job.model.tokenizer)


def failed_row(job: Job, example: Example, reason: str) -> dict[str, Any]:
    """What is stored of an example that could not be computed."""
    row = {"id": example.id, "error": reason, "prompt_tokens": len(example.prompt_ids), "fields": example.fields}
    return row if job.store_text else without_texts(row, job.task.texts)


def _time(session: Session, job: Job, example: Example, timing: Timing) -> dict[str, Any]:
    """Time a decode step on the cache that the example describes: its row."""
    try:
        prefilled = begin(session, example.prompt_ids, timing, job.method.observes())
        with prefilled.fork(job.method, job.budget, packing=job.packing) as decoder:
            measured = measure(decoder, timing)
            prediction = Prediction([], "", "timed", measured=measured)
            row = _row(prefilled, decoder, example, prediction)
            row |= {"step_ms": measured["method"]["step_ms"], "stages_ms": measured["method"]["stages_ms"]}
    except DoesNotFitError as reason:
        log.warning("%s: %s", example.id, reason)
        prediction = Prediction([], "", "timed", measured={"does_not_fit": str(reason)})
        row = {"id": example.id, **answers(prediction), "fields": example.fields, **NOTHING}
    return row | {"measured": prediction.measured, "scores": job.task.score(example, prediction)}


def _study(prefilled: Prefilled, job: Job, example: Example, study: Study) -> dict[str, Any]:
    """Full KV decodes the example, and the study looks on: its row. What is recorded takes time: none is told."""
    recorder = study.recorder(job, example, prefilled)
    with prefilled.fork(recorder, None) as decoder:
        prediction = _decode(decoder, job.model, example)
        row = _row(prefilled, decoder, example, prediction)
    prediction.measured, file = recorder.found()
    row |= {"compress_s": None, "decode_s": None, "step_ms": [], "stages_ms": {}, "files": {study.file(example): file}}
    row |= {"scores": job.task.score(example, prediction)}
    return row if job.store_text else without_texts(row, job.task.texts)


def _decode(decoder: Decoder, model: Model, example: Example) -> Prediction:
    if example.target_ids is not None:
        losses = decoder.force(example.target_ids, example.parallel)
        return Prediction(example.target_ids, "", "forced", losses)
    ends = [*model.end_token_ids, *example.stop_token_ids]
    if example.sampling:
        answers = decoder.sample(example.sampling, example.max_new_tokens, ends, example.min_new_tokens)
        samples = [_prediction(model, answer) for answer in answers]
        return replace(samples[0], samples=samples)
    return _prediction(model, decoder.generate(example.max_new_tokens, ends, example.min_new_tokens))


def _prediction(model: Model, answer: Generation) -> Prediction:
    text = model.tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    return Prediction(answer.token_ids, text, answer.finish_reason)


def _row(prefilled: Prefilled, decoder: Decoder, example: Example, prediction: Prediction) -> dict[str, Any]:
    tally, steps, timed = decoder.state.tally, len(decoder.step_seconds), len(decoder.timed_steps)
    stages = decoder.state.clock.seconds
    per_step = max(tally.layer_steps, 1)
    return {
        "id": example.id,
        **answers(prediction),
        **prompt(example),
        "fields": example.fields,
        "prefill_tokens": prefilled.tokens,  # the others were fed under the method
        "budget_tokens": next((layer.budget for layer in decoder.cache.full), None),
        "prefill_s": round(prefilled.seconds, 6),
        "compress_s": round(decoder.compress_seconds, 6),
        "feed_s": round(decoder.feed_seconds, 6),
        "decode_s": round(sum(decoder.step_seconds), 6),
        "parallel_s": round(decoder.parallel_seconds, 6),
        "step_ms": [round(1e3 * seconds, 3) for seconds in decoder.timed_steps],
        "stages_ms": {name: round(1e3 * value / timed, 4) for name, value in stages.items()} if timed else {},
        "device_bytes": decoder.peak_device_bytes,
        "host_bytes": decoder.peak_host_bytes,
        "attended_tokens": tally.attended / per_step,
        "cached_tokens": tally.cached / per_step,
        # a pass over many tokens is no step
        "read_bytes": round(decoder.read_bytes / steps) if steps else None,
        "transferred_bytes": round(decoder.moved_bytes / steps) if steps else None,
        "hit_rate": decoder.cache.hit_rate,
        "layer_steps": tally.layer_steps,
        "sparse_steps": sum(tally.sparse.values()),
        "sparse_steps_by_layer": [tally.sparse[index] for index in sorted(tally.sparse)],
    }


def summarise(job: Job, name: str, rows: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """summary.json of these rows; every number comes from them, so that a resumed run gives the same."""
    steps = [ms for row in rows for ms in row["step_ms"]]

    def stage_mean(name: str) -> float:
        return sum(row["stages_ms"].get(name, 0.0) * len(row["step_ms"]) for row in rows) / len(steps)

    def mean(key: str) -> float | None:
        known = [row[key] for row in rows if row[key] is not None]
        return sum(known) / len(known) if known else None

    def per_layer_step(key: str) -> float | None:
        known = [(row[key], row["layer_steps"]) for row in rows if row[key] is not None]
        layer_steps = sum(count for _, count in known)
        return sum(value * count for value, count in known) / layer_steps if layer_steps else None

    stages = sorted({stage for row in rows for stage in row["stages_ms"]})
    return {
        "run_id": name,
        "status": status,
        "model": job.model.name,
        "method": job.method.name,
        "task": job.task.name,
        "budget": job.budget,
        "speed": job.method.speed,
        "metrics": job.task.metrics(rows) if rows else {},
        "latency": {
            "prefill_s": mean("prefill_s"),
            "compress_s": mean("compress_s"),
            "decode_ms_per_token": quantiles(steps),
            "stages": {stage: stage_mean(stage) for stage in stages},
        },
        "memory": {
            "device_bytes": max((row["device_bytes"] for row in rows), default=None),
            "host_bytes": max((row["host_bytes"] for row in rows), default=None),
            "peak_bytes": _peak_bytes(job.model),
        },
        "realised": {
            "attended_tokens": per_layer_step("attended_tokens"),
            "cached_tokens": per_layer_step("cached_tokens"),
            "read_bytes": per_layer_step("read_bytes"),
            "transferred_bytes": per_layer_step("transferred_bytes"),
            "hit_rate": per_layer_step("hit_rate"),
            "sparse_steps": sum(row["sparse_steps"] for row in rows),
            "sparse_steps_by_layer": [
                sum(layer) for layer in zip(*(r["sparse_steps_by_layer"] for r in rows), strict=False)
            ],
        },
        "examples": len(rows),
        "warnings": list(getattr(job.task, "warnings", [])),
        "deviations": job.deviations,
        "config": job.config,
    }


def _check_parallel(method: Method, packing: Packing) -> None:
    """UserError unless scoring many tokens in one pass gives what steps would give."""
    if not method.parallel:
        raise UserError.of(
            "task.mode",
            "parallel",
            f"{method.name} must be scored with stepwise; parallel is for methods (with their parameters) that "
            "choose by the query and the keys before it, whatever earlier steps did",
        )
    if packing.bits < 16:
        raise UserError.of("cache.bits", packing.bits, "must be 16 with task.mode=parallel: steps would pack later")


def _check_study(task: Task, packing: Packing, protocol: Protocol) -> None:
    """UserError for settings that would not be followed."""
    if packing.bits < 16:
        raise UserError.of("cache.bits", packing.bits, f"must be 16: task={task.name} observes a cache that is exact")
    if protocol.first_token == "sparse":
        raise UserError(f"task={task.name} decodes with full KV: protocol.first_token and question must be the default")


def _peak_bytes(model: Model) -> int:
    """Most memory in use so far: of the accelerator, or of this process where there is none."""
    if model.device.type == "cpu":
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(torch.get_device_module(model.device).max_memory_allocated(model.device))


def is_whole(job: Job, row: dict[str, Any]) -> bool:
    """Whether a stored row can be summed up; rows of an earlier version or of another hand may lack a part."""
    try:
        summarise(job, "", [row], "partial")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError):
        return False
    return True
