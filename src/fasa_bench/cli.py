"""The command line: Hydra composes configs, the runner runs them, one clear error tells what was wrong with one."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fasa_bench.errors import FailedExamplesError, UserError
from hydra_plugins.fasa_bench_launcher import Together

if TYPE_CHECKING:
    from fasa_bench.runner import Job


# Hydra's launchers that come with plugins, and what installs each
LAUNCHERS = {
    "hydra/launcher/joblib": "pip install 'fasa-bench[processes]'",
    "hydra/launcher/submitit_slurm": "pip install 'fasa-bench[slurm]'",
    "hydra/launcher/ray": "pip install 'fasa-bench[ray]' && pip install --no-deps hydra-ray-launcher",
}


@dataclass
class End:
    """How a job ended: its run folder, a message if something went wrong, or both (some examples failed)."""

    job: str
    folder: Path | None
    error: str | None


_ends: list[End] = []  # of this process's jobs, in the order in which they ended


def main(conf: Path) -> None:
    """Run the job, or all jobs of a multirun, that the command line describes; exits non-zero if one failed."""
    set_up()
    if os.environ.get("TORCHELASTIC_RUN_ID"):  # each of its processes would run, and write, everything
        sys.exit("error: run.py is one process, not several of torchrun; for several GPUs: docs/sweeps.md")
    Plugins.instance().register(Together)  # Hydra's own search misses it in some editable installs
    try:
        hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:  # jobs handle their own
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        print("interrupted; finished examples are stored, the same command goes on from there", file=sys.stderr)
        sys.exit(130)  # as the shell has it for an interrupted command
    if any(end.error for end in _ends):
        sys.exit(1)


def set_up() -> None:
    """What every process needs that runs jobs."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("fasa_bench").setLevel(logging.INFO)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on, and they are told here in one line


def job(cfg: DictConfig) -> None:
    """The one job of a command without -m, or all of an experiment's."""
    OmegaConf.resolve(cfg)  # what an experiment asks Hydra is known only here
    run_jobs([(" ".join(HydraConfig.get().overrides.task), cfg)])
    if "experiment" in cfg:
        overview()


def run_jobs(configs: Sequence[tuple[str, DictConfig]], quiet: bool = False) -> list[End]:
    """Run named jobs, those that share model and task together. A failure is told at once and stops no other job.

    One among several whose config is refused gets a run folder that says so; a single one is only told.
    quiet: in a worker: whoever gets what is returned tells it on standard output.
    """
    from fasa_bench import group, refused, runner  # here: --help and Hydra's own errors come without loading torch
    from fasa_bench.reproduce import expanded

    jobs: list[Job] = []
    named: list[tuple[str, DictConfig]] = []
    ends: list[End] = []

    def report(name: str, folder: Path | None, error: Exception | None) -> None:
        end = End(name, folder, None if error is None else _message(error))
        ends.append(end)
        if end.error:
            print(end.error, file=sys.stderr, flush=True)
        if not quiet:
            tell(end)

    for label, composed in configs:
        try:
            named += expanded(label, composed)
        except Exception as error:
            report(label, None, error)
    for name, cfg in named:
        try:
            jobs.append(runner.Job.of(cfg, name))
        except Exception as error:
            if quiet or len(named) > 1:
                refused.keep(cfg, error)
            report(name, None, error)
    groups = group.grouped(jobs)
    jobs.clear()
    while groups:  # popped, so that one model's weights are free before the next one's are loaded
        group.run_group(groups.pop(0), lambda job, folder, error: report(job.label, folder, error))
    return ends


def _message(error: Exception) -> str:
    if isinstance(error, UserError | FailedExamplesError):
        return f"error: {error}"
    traceback.print_exception(error)
    return f"error: {type(error).__name__}: {error}"


def tell(end: End) -> None:
    """One line on stdout for a run folder; what went wrong is remembered for the end."""
    _ends.append(end)
    if end.folder:
        print(f"run: {end.folder}", flush=True)


def explain(error: Exception) -> str:
    """What Hydra found wrong with the command line, in one line, naming the key and what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = ", ".join(option for option in error.options if not option.startswith("_"))
        return str(UserError.of(group, name, f"must be one of {known}"))
    if isinstance(error, MissingConfigException) and (install := LAUNCHERS.get(error.missing_cfg_file or "")):
        return f"{error.missing_cfg_file} is not installed: {install} (docs/sweeps.md)"
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = ", ".join(str(key) for key in cause.parent_node if key not in ("hydra", "_target_"))
        return f"{cause.full_key} is not allowed: unknown key; known keys are {known}"
    text = " ".join(line.strip() for line in str(error).splitlines() if "hydra.cc" not in line and line.strip(" ^"))
    if isinstance(error, OverrideParseException):
        quoted = "a value with =, a comma, brackets or letters beyond ASCII needs quotes within the shell's"
        return f"{error.override} cannot be read ({text}): {quoted}, as in 'results_dir=\"a=b\"'"
    return text


def overview() -> None:
    """A table of all runs of this process, and what went wrong."""
    from fasa_bench.report import print_table
    from fasa_bench.store import load_run, without_parts

    folders = dict.fromkeys(end.folder for end in _ends if end.folder)  # full KV is one run for all budgets
    if folders:
        print_table(without_parts([load_run(folder) for folder in folders]))
    failures = [f"{end.job}: {end.error}" for end in _ends if end.error]
    if failures:
        print(f"{len(failures)} of {len(_ends)} jobs failed:", *failures, sep="\n  ", file=sys.stderr)


class Overview(Callback):
    """Hydra callback: a table of all runs when a multirun ends."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        overview()
