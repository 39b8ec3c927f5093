"""Run the paper's experiments, or what is missing of them: `make reproduce`.

python -m fasa_bench.reproduce [--profile mini|paper] [--dry-run] [--data FOLDER] [EXPERIMENT ...] [key=value ...]

All runs of all experiments are one multirun: equal runs are one, and runs that share model and task share prompts. It
can be stopped at any moment; the same command goes on. A key=value replaces what the experiments list for this key.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

from fasa_bench import cli
from fasa_bench.errors import UserError
from fasa_bench.estimate import cost, group_key, rates, total
from fasa_bench.experiments import PROFILES, Experiment, Planned, composed, load_experiments

log = logging.getLogger("fasa_bench")

# where each task finds its data below --data, in the form its own key takes
DATA = {
    "longbench": {"task.data_dir": "longbench", "task.prompts_file": "longbench_config/dataset2prompt.json"},
    "math500": {"task.data_file": "math500.jsonl"},
    "aime24": {"task.data_file": "aime24.jsonl"},
    "ppl": {"task.path": "ppl/{task.corpus}"},
}
DATA["calibration"] = DATA["selection"] = DATA["longbench"] | DATA["math500"]
CORPUS_FOLDERS = {"c4_en": "c4"}
RESULTS = {"mini": "results/mini", "paper": "results"}


def plan(experiments: Iterable[Experiment], profile: str, replace: Mapping[str, Any] | None = None) -> list[Planned]:
    """The runs of all of them, equal ones once, those that share prompts one after the other."""
    found: dict[tuple[tuple[str, Any], ...], Planned] = {}
    for experiment in experiments:
        for planned in experiment.plan(profile, replace):
            found.setdefault(tuple(sorted(planned.settings, key=repr)), planned)
    return [planned for group in sharing_prompts(found.values()) for planned in group]


def sharing_prompts(planned: Iterable[Planned]) -> list[list[Planned]]:
    """The runs in groups of those that share prompts."""
    groups: dict[str, list[Planned]] = {}
    for one in planned:
        groups.setdefault(group_key(one), []).append(one)
    return list(groups.values())


def configs(
    planned: Iterable[Planned], common: Sequence[str] = (), data: Path | None = None
) -> list[tuple[str, DictConfig]]:
    """Named, composed configs, for `cli.run_jobs`. common: overrides of the command line that all of them get."""
    return [
        (
            f"{one.experiment}: {' '.join(one.overrides)}",
            composed([*one.overrides, *text_overrides(one), *data_overrides(one, data), *common]),
        )
        for one in planned
    ]


def text_overrides(planned: Planned) -> list[str]:
    """No texts of data sets in results that may be published; the embedded task's are Python's own."""
    return [] if planned.given["task"] == "stdlib" else ["store_text=false"]


def data_overrides(planned: Planned, data: Path | None) -> list[str]:
    """Where the task's data lies below the folder; nothing for what is not there: the hub has it."""
    found: list[str] = []
    if data is None:
        return found
    for key, pattern in DATA.get(planned.given["task"], {}).items():
        corpus = planned.given.get("task.corpus", "")
        path = data / pattern.replace("{task.corpus}", CORPUS_FOLDERS.get(corpus, corpus))
        if path.exists() and path != data / "ppl":
            found.append(f'{key}="{path}"')
    if text := planned.given.get("calibration.text"):  # a data set's name
        paths = [data / folder / f"{text}.jsonl" for folder in ("longbench", ".")]
        found += [f'calibration.text="{path}"' for path in paths if path.is_file()][:1]
    return found


def given(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Overrides of a command line: {key: value} that replace what experiments list, and all of them as text."""
    values = {}
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        if override.type is not OverrideType.CHANGE or override.is_sweep_override():
            raise UserError.of(
                "override", override.input_line, "must be key=value with one value: the experiment is the sweep"
            )
        values[override.key_or_group] = _value(override)
    return values, list(arguments)


def expanded(name: str, cfg: DictConfig) -> list[tuple[str, DictConfig]]:
    """The runs of `run.py +experiment=NAME`; a config without an experiment of ours is one run."""
    if "experiment" not in cfg:
        return [(name, cfg)]
    known = load_experiments()
    experiment = known[cfg.experiment.name]
    kept = [text for text in cfg.experiment.overrides if not text.lstrip("+").startswith("experiment")]
    values, texts = given(kept)
    return configs(plan([experiment], cfg.experiment.profile, values), texts)


def dry_run(planned: Sequence[Planned], profile: str) -> None:
    """Print the runs by model and task, with the time and memory they will need."""
    machine = rates()["machines"][profile]
    groups: dict[tuple[str, str], list[Planned]] = {}
    for one in planned:
        groups.setdefault((one.given["model"], one.given["task"]), []).append(one)
    print(f"{'model':20} {'task':12} {'runs':>5} {'hours':>9} {'GiB':>6}  experiments")
    for (model, task), members in sorted(groups.items()):
        names = dict.fromkeys(one.experiment for one in members)
        gib = max(cost(one).gib for one in members)
        print(f"{model:20} {task:12} {len(members):5} {total(members) / 3600:9.2f} {gib:6.1f}  {', '.join(names)}")
    print(f"{'all':33} {len(planned):5} {total(planned) / 3600:9.2f}         on {machine['name']}, prompts shared")
    print(
        "Memory: weights and the cache of a mean prompt with its answer. Times: rates of results/measured/rates.yaml",
        end="",
    )
    print("; that of the prompt pass is assumed, not measured." if machine.get("prefill_is_assumed") else ".")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fasa_bench.reproduce", description="Run the paper's experiments.")
    parser.add_argument("what", nargs="*", metavar="EXPERIMENT | key=value", help="only these; settings for all runs")
    parser.add_argument("--profile", default="mini", choices=PROFILES, help="mini: the embedded model; paper: its own")
    parser.add_argument("--dry-run", action="store_true", help="print the runs, hours and memory, and run nothing")
    parser.add_argument("--data", type=Path, help="folder with longbench/, math500.jsonl, ppl/ ...; else from the hub")
    parser.add_argument("--results-dir", help="default: results/mini, or results for the paper's models")
    options = parser.parse_intermixed_args(arguments)
    cli.set_up()
    try:
        return _run(options)
    except (UserError, HydraException) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; finished examples are stored, the same command goes on from there", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    known = load_experiments()
    names = [text for text in options.what if "=" not in text]
    for name in names:
        if name not in known:
            raise UserError.of("EXPERIMENT", name, f"must be one of {', '.join(known)}")
    if options.data and not options.data.is_dir():
        raise UserError.of("--data", str(options.data), "must be a folder")
    values, texts = given([text for text in options.what if "=" in text])
    folder = values.pop("results_dir", None) or options.results_dir or RESULTS[options.profile]
    planned = plan([known[name] for name in names or known], options.profile, values)
    if options.dry_run:
        dry_run(planned, options.profile)
        return 0
    common = [f'results_dir="{folder}"', *(text for text in texts if not text.startswith("results_dir="))]
    clock = Clock(planned)
    failures = []
    for members in sharing_prompts(planned):
        clock.tell(members)
        ends = cli.run_jobs(configs(members, common, options.data))
        failures += [f"{end.job}: {end.error}" for end in ends if end.error]
        clock.done(members)
    print(f"{len(planned) - len(failures)} of {len(planned)} runs are complete in {folder}", file=sys.stderr)
    if failures:
        print(f"{len(failures)} failed:", *failures, sep="\n  ", file=sys.stderr)
    return 1 if failures else 0


class Clock:
    """Says how much time is left: the estimate of each task, corrected by how long its groups took so far."""

    def __init__(self, planned: Sequence[Planned]) -> None:
        groups = sharing_prompts(planned)
        self._groups, self._finished = len(groups), 0
        self._left: dict[str, float] = {}  # seconds, by task
        self._taken: dict[str, tuple[float, float]] = {}  # estimate and truth of what was computed, by task
        for members in groups:
            task = members[0].given["task"]
            self._left[task] = self._left.get(task, 0.0) + total(members)

    def tell(self, members: Sequence[Planned]) -> None:
        names = ", ".join(dict.fromkeys(one.experiment for one in members))
        left = 0.0
        for task, seconds in self._left.items():
            estimate, truth = self._taken.get(task, (1.0, 1.0))
            left += seconds * truth / estimate
        log.info(
            "[%d of %d] %s, %d runs for %s; about %.0f min left in all",
            self._finished + 1, self._groups, members[0].given["task"], len(members), names, left / 60,
        )  # fmt: skip
        self._started = time.monotonic()

    def done(self, members: Sequence[Planned]) -> None:
        task, estimate, taken = members[0].given["task"], total(members), time.monotonic() - self._started
        self._left[task] -= estimate
        self._finished += 1
        if taken > 0.1 * estimate:  # else most of it was there
            before = self._taken.get(task, (0.0, 0.0))
            self._taken[task] = (before[0] + estimate, before[1] + taken)


def _value(override: Override) -> Any:
    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(plain, value))
        return value.text if isinstance(value, QuotedString) else value

    return plain(override.value())


if __name__ == "__main__":
    sys.exit(main())
