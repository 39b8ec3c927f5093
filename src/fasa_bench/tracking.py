"""Follow a run while it goes on. What counts stands in the run folder; trouble with a tracker never stops a run."""

from __future__ import annotations

import logging
import math
import netrc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

from fasa_bench.config import build
from fasa_bench.errors import UserError
from fasa_bench.store import flatten, plain, section_name

log = logging.getLogger("fasa_bench")

FINISH_TIMEOUT = 120.0  # seconds; a dead network must not hold up the next run of a sweep


@dataclass
class Logger:
    """conf/logger: where runs are followed.

    mode (of W&B): `auto` is online if an API key is configured, else offline; WANDB_MODE in the environment wins.
    """

    kind: Literal["wandb", "none"] = "wandb"
    project: str = "fasa-bench"
    mode: Literal["auto", "online", "offline"] = "auto"


class Tracker:
    """A context manager around one run; this base follows nothing.

    The run is finished on leaving, as failed if the body raised or the logged summary says "failed".
    """

    failed = False

    @staticmethod
    def of(logger: Mapping[str, Any], run_id: str, config: Mapping[str, Any], results_dir: str | Path) -> Tracker:
        """The tracker that `logger`, the section of a config, asks for. config: all settings of the run."""
        settings = build("logger", logger, Logger)
        return Tracker() if settings.kind == "none" else WandbTracker(settings, run_id, config, Path(results_dir))

    def start(self) -> None:
        """Begin; called on entering."""

    def log_row(self, row: Mapping[str, Any]) -> None:
        """The numbers under "scores" of one finished example."""

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        """The numbers and the status of summary.json."""
        self.failed = summary.get("status") == "failed"

    def finish(self) -> None:
        """End; called on leaving."""

    def __enter__(self) -> Tracker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.failed = self.failed or kind is not None
        self.finish()


class WandbTracker(Tracker):
    """One W&B run per run folder, with the same id, so that a resumed run goes on in the same place.

    Offline runs lie under <results_dir>/wandb; `wandb sync` uploads them.
    """

    strict = False  # True: a failure is an error of the caller's, and no warning
    place = ""  # where the run is to be found
    unreachable = False  # known of the whole process: not every run of a sweep has to wait for the timeout

    def __init__(self, logger: Logger, run_id: str, config: Mapping[str, Any], results_dir: Path) -> None:
        self.logger, self.run_id, self.config, self.results_dir = logger, run_id, plain(config), results_dir
        self.name = " ".join(section_name(config.get(part)) for part in ("model", "method", "task", "budget"))
        self._run: Any = None

    def start(self) -> None:
        with self._harmless():
            import wandb  # not at the top: it takes a second, and logger=none does without

            mode = self._mode()
            try:
                self._run = self._init(wandb, mode)
            except Exception as error:
                if mode != "online":
                    raise
                log.warning("W&B cannot be reached (%s); runs of this process are logged offline", _line(error))
                WandbTracker.unreachable = True
                if wandb.run is None:  # else a run of the user's own would end too
                    wandb.teardown()  # the failed attempt still holds the run's id
                mode = "offline"
                self._run = self._init(wandb, mode)
            self.place = self._run.url if mode == "online" else f"{mode}, under {self.results_dir / 'wandb'}"
            log.info("W&B: %s", self.place)

    def log_row(self, row: Mapping[str, Any]) -> None:
        with self._harmless():
            scores = _numbers(row.get("scores") or {}, "example/")
            if self._run is not None and scores:
                self._run.log(scores)

    def log_summary(self, summary: Mapping[str, Any]) -> None:
        super().log_summary(summary)
        with self._harmless():
            if self._run is not None:
                parts = {key: value for key, value in summary.items() if key not in ("env", "config")}
                self._run.summary.update({"status": summary.get("status"), **_numbers(parts)})

    def log_report(
        self, tables: Mapping[str, tuple[Sequence[str], list[Any]]], images: Iterable[Path], folders: Iterable[Path]
    ) -> None:
        """Tables (columns and lines) to plot and filter, pictures, and folders as artefacts of their names."""
        with self._harmless():
            import wandb

            for name, (columns, lines) in tables.items():
                self._run.log({name: wandb.Table(columns=list(columns), data=lines, allow_mixed_types=True)})
            for path in images:
                self._run.log({f"figures/{path.stem}": wandb.Image(str(path))})
            for folder in folders:
                artefact = wandb.Artifact(folder.name, type="report")
                artefact.add_dir(str(folder))
                self._run.log_artifact(artefact)
            self._run.summary.update({f"{name} lines": len(lines) for name, (_, lines) in tables.items()})

    def finish(self) -> None:
        run, self._run = self._run, None
        with self._harmless():
            if run is not None:
                run.finish(exit_code=int(self.failed))

    def _mode(self) -> str:
        mode = os.environ.get("WANDB_MODE") or self.logger.mode
        if mode not in ("auto", "online"):
            return mode
        if self.unreachable:
            return "offline"
        if _has_api_key():
            return "online"
        if mode == "online":
            log.warning("W&B: no API key is configured (run `wandb login`); this run is logged offline")
        return "offline"

    def _init(self, wandb: Any, mode: str) -> Any:
        wanted = {
            "silent": True,  # standard output belongs to the run
            "console": "off",  # no copy of the terminal: progress bars would fill it
            "disable_git": True,  # env.json names the commit; a diff of the source is nobody's business
            "disable_code": True,
            "init_timeout": 30.0,
            "finish_timeout": FINISH_TIMEOUT,
        }
        known = wandb.Settings.model_fields  # older versions lack some
        return wandb.init(
            project=self.logger.project,
            id=self.run_id,
            name=self.name,
            dir=str(self.results_dir),
            config=self.config,
            resume="allow",
            reinit="create_new",  # a sweep runs several in one process; a user's own W&B run stays untouched
            mode=mode,
            settings=wandb.Settings(**{key: value for key, value in wanted.items() if key in known}),
        )

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """The first exception ends the tracking with one warning; the run itself goes on."""
        try:
            yield
        except Exception as error:  # whatever a service may raise
            self._run = None
            if self.strict:
                raise UserError(f"W&B: {_line(error)}") from error
            log.warning("W&B: %s; the run goes on without it", _line(error))


def _has_api_key() -> bool:
    """A key in the environment, or in the netrc file where `wandb login` puts it.

    W&B's own `login` would tell as well, but asks its server for the user's name and may wait for an answer forever.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    home = Path("~").expanduser()
    candidates = [os.environ.get("NETRC"), home / ".netrc", home / "_netrc"]
    path = next((Path(name).expanduser() for name in candidates if name and Path(name).expanduser().exists()), None)
    if path is None:
        return False
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError) as error:
        log.warning("W&B: %s cannot be read (%s)", path, _line(error))
        return False


def _numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The finite numbers of a tree under dotted names; W&B draws nothing else."""
    return {
        f"{prefix}{key}": value
        for key, value in flatten(plain(tree)).items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
