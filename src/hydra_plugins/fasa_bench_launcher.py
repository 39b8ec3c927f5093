"""Hydra's launcher for `-m`: jobs that share model and task run together, here or through another launcher.

In this package, because Hydra takes launchers from nowhere else. Every Hydra program that finds this package
imports it, and not as other modules are: no dataclasses, and nothing that takes long to load.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict


class Together(Launcher):
    """conf/hydra/launcher: runs all jobs of a multirun, one prompt pass for all that share model and task.

    through: the config of another launcher, which then gets one job for each group of jobs that share prompts.
    one_device_each: worker processes of one machine take its accelerators in turn, one each.
    """

    def __init__(self, through: DictConfig | None = None, one_device_each: bool = False) -> None:
        self.through = through
        self.one_device_each = one_device_each

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.config = hydra_context, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from fasa_bench import cli

        setup_globals()
        Path(self.config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        composed = [self._compose(overrides, initial_job_idx + i) for i, overrides in enumerate(job_overrides)]
        jobs = [(" ".join(result.overrides or []), result.return_value) for result in composed]
        if self.through is None:
            cli.run_jobs(jobs)
        else:
            self._hand_on(jobs, job_overrides, initial_job_idx)
        for result in composed:
            result.return_value, result.status = None, JobStatus.COMPLETED
        return composed

    def _compose(self, overrides: Sequence[str], number: int) -> JobReturn:
        """The job's config, with everything in it that Hydra knows of the job filled in."""
        config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        return run_job(
            hydra_context=self.hydra_context,
            task_function=lambda cfg: OmegaConf.create(OmegaConf.to_container(cfg, resolve=True)),
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            configure_logging=False,
        )

    def _hand_on(
        self, jobs: Sequence[tuple[str, DictConfig]], job_overrides: Sequence[Sequence[str]], first: int
    ) -> None:
        from fasa_bench import cli
        from fasa_bench.worker import Work, ends_by_folders

        groups: dict[str, list[int]] = {}
        for index, (_, cfg) in enumerate(jobs):
            groups.setdefault(repr([cfg.get(key) for key in ("model", "task", "limit", "shard")]), []).append(index)
        work = Work([[jobs[index] for index in members] for members in groups.values()], first, self.one_device_each)
        config = self.config.copy()
        with open_dict(config):
            config.hydra.launcher = self.through
        launcher = Plugins.instance().instantiate_launcher(self.hydra_context, work, config)
        try:
            results = launcher.launch([job_overrides[members[0]] for members in groups.values()], first)
        except Exception as error:  # the scheduler refuses, or a worker died: then the results of no group come
            for end in ends_by_folders(jobs, error):
                cli.tell(end)
            return
        for members, result in zip(groups.values(), results, strict=True):
            try:
                ends = result.return_value
            except Exception as error:  # the worker itself did not get through
                message = f"error: {type(error).__name__}: {error}"
                ends = [cli.End(jobs[index][0], None, message) for index in members]
            for end in ends:
                cli.tell(end)
