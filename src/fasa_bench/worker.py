"""What runs in the worker processes of other launchers."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from fasa_bench import cli


@dataclass
class Work:
    """What another launcher calls in a worker: runs the group of jobs that belongs to the number of Hydra's job."""

    groups: Sequence[Sequence[tuple[str, DictConfig]]]
    first: int
    one_device_each: bool

    def __call__(self, cfg: DictConfig) -> list[cli.End]:
        cli.set_up()
        if self.one_device_each:
            take_device()
        return cli.run_jobs(self.groups[HydraConfig.get().job.num - self.first], quiet=True)


def ends_by_folders(jobs: Sequence[tuple[str, DictConfig]], error: Exception) -> list[cli.End]:
    """How jobs ended as far as their folders tell, when a launcher that should have run them raised `error`."""
    from fasa_bench import group, runner
    from fasa_bench.reproduce import expanded

    said = str(error).strip().split("\n")[0]
    message = (
        f"error: no results came from the launcher ({type(error).__name__}: {said}). Jobs that it has started may "
        "still go on; once they have ended, the same command computes what is missing"
    )
    print(message, file=sys.stderr, flush=True)
    ends: list[cli.End] = []
    for name, cfg in (one for label, composed in jobs for one in expanded(label, composed)):
        try:
            job = runner.Job.of(cfg, name)
            folder = job.results_dir / "runs" / job.run_id
            complete = group.is_complete(folder)
            ends.append(cli.End(name, folder if complete else None, None if complete else message))
        except Exception as own:  # its config is wrong, which its worker may not have come to tell
            ends.append(cli.End(name, None, f"error: {own}"))
    return ends


def take_device() -> None:
    """Let this worker process see one accelerator only: the n-th worker the n-th, and again from the first on."""
    import torch

    number = re.search(r"\d+$", multiprocessing.current_process().name)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if number and len(devices) > 1:  # a worker that comes again has one left
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[(int(number[0]) - 1) % len(devices)]
