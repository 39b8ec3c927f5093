"""The command line: Hydra composes a config, the runner runs it, one clear error tells what was wrong with it."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fasa_bench.errors import UserError

_folders: list[Path] = []  # run folders of this process
_failures: list[str] = []  # what went wrong, one entry a job


def main(conf: Path) -> None:
    """Run the job, or all jobs of a multirun, that the command line describes; exits non-zero if one failed."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("fasa_bench").setLevel(logging.INFO)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra hands its errors on, and they are told here in one line
    try:
        hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(job)()
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:  # jobs handle their own
        sys.exit(f"error: {explain(error)}")
    except KeyboardInterrupt:
        print("interrupted; finished examples are stored, the same command goes on from there", file=sys.stderr)
        sys.exit(130)  # as the shell has it for an interrupted command
    if _failures:
        sys.exit(1)


def job(cfg: DictConfig) -> None:
    """One job. A failure is told at once and remembered, so that the other jobs of a multirun go on."""
    from fasa_bench import runner  # here, so that --help and Hydra's own errors come without loading torch

    try:
        folder = runner.run(runner.Job.of(cfg))
    except UserError as error:
        _fail(f"error: {error}")
    except Exception as error:
        traceback.print_exc()
        _fail(f"error: {type(error).__name__}: {error}")
    else:
        _folders.append(folder)
        print(f"run: {folder}", flush=True)


def _fail(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    _failures.append(f"{' '.join(HydraConfig.get().overrides.task)}: {message}")


def explain(error: Exception) -> str:
    """What Hydra found wrong with the command line, in one line, naming the key and what is allowed."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = ", ".join(option for option in error.options if not option.startswith("_"))
        return str(UserError.of(group, name, f"must be one of {known}"))
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and isinstance(cause.parent_node, DictConfig):
        known = ", ".join(str(key) for key in cause.parent_node if key not in ("hydra", "_target_"))
        return f"{cause.full_key} is not allowed: unknown key; known keys are {known}"
    text = " ".join(line.strip() for line in str(error).splitlines() if "hydra.cc" not in line and line.strip(" ^"))
    if isinstance(error, OverrideParseException):
        quoted = "a value with =, a comma, brackets or letters beyond ASCII needs quotes within the shell's"
        return f"{error.override} cannot be read ({text}): {quoted}, as in 'results_dir=\"a=b\"'"
    return text


class Overview(Callback):
    """Hydra callback: a table of all runs when a multirun ends."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from fasa_bench.report import print_table
        from fasa_bench.store import load_run

        if _folders:
            print_table([load_run(folder) for folder in dict.fromkeys(_folders)])  # full KV is one run for all budgets
        if _failures:
            print(
                f"{len(_failures)} of {len(_folders) + len(_failures)} jobs failed:",
                *_failures,
                sep="\n  ",
                file=sys.stderr,
            )
