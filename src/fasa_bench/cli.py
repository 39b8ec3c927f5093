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
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from fasa_bench.errors import UserError

_folders: list[Path] = []  # run folders of this process
_failures: list[str] = []  # what went wrong, one entry a job


def main(conf: Path) -> None:
    """Run the job, or all jobs of a multirun, that the command line describes; exits non-zero if one failed."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    logging.getLogger("fasa_bench").setLevel(logging.INFO)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(job)()
    if _failures:
        sys.exit(1)


def job(cfg: DictConfig) -> None:
    """One job. A failure is told at once and remembered, so that the other jobs of a multirun go on."""
    from fasa_bench import runner  # here, so that --help and Hydra's own errors come without loading torch

    try:
        folder = runner.run(runner.Job.of(cfg))
    except UserError as error:
        _fail(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; finished examples are stored, the same command goes on from there")
    except Exception as error:
        traceback.print_exc()
        _fail(f"error: {type(error).__name__}: {error}")
    else:
        _folders.append(folder)
        print(f"run: {folder}", flush=True)


def _fail(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    _failures.append(f"{' '.join(HydraConfig.get().overrides.task)}: {message}")


class Overview(Callback):
    """Hydra callback: a table of all runs when a multirun ends."""

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from fasa_bench.report import print_table
        from fasa_bench.store import load_run

        if _folders:
            print_table([load_run(folder) for folder in _folders])
        if _failures:
            print(
                f"{len(_failures)} of {len(_folders) + len(_failures)} jobs failed:",
                *_failures,
                sep="\n  ",
                file=sys.stderr,
            )
