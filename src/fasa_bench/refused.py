"""A job of a sweep whose config is refused: its run folder says so, or it would look like one that nobody asked for."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fasa_bench.store import RunStore, plain, run_id, section_name
from fasa_bench.tracking import Tracker

log = logging.getLogger("fasa_bench")

ASIDE = ("results_dir", "store_text", "logger")  # they change no output, and no refusal but their own


def keep(cfg: DictConfig, error: Exception) -> Path | None:
    """Write the run folder of a job that cannot start, failed; None where the config does not allow even that.

    It is named by the config itself, since what a run id is made of is not known of it.
    """
    try:
        config: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
        identity = {"refused": plain({key: value for key, value in config.items() if key not in ASIDE})}
        store = RunStore(config["results_dir"], run_id(identity), config | {"identity": identity})
        names = {part: section_name(config.get(part)) for part in ("model", "method", "task")}
        summary: dict[str, Any] = {"status": "failed", **names, "budget": config.get("budget"), "metrics": {}}
        summary |= {"examples": 0, "failed_examples": 0, "error": f"{type(error).__name__}: {error}", "config": config}
        with store, Tracker.of(config["logger"], store.run_id, config, store.results_dir) as tracker:
            store.write_summary(summary)
            tracker.log_summary(summary)
    except Exception as other:  # the wrong key may be the folder or the logger itself
        log.warning("this job has no run folder (%s)", str(other).split("\n")[0])
        return None
    return store.folder
