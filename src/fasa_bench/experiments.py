"""The paper's experiments as lists of runs: conf/experiment/*.yaml, and which stored run is which of them.

An experiment has a profile `paper` (the paper's models and settings) and a profile `mini` (the embedded model). Each is
a list of entries; an entry maps keys of the command line to values, a list of values being swept. `layout` says what
its table or figure is made of: see fasa_bench.exhibits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError

from fasa_bench.errors import UserError
from fasa_bench.store import Run, flatten

CONF = Path(__file__).resolve().parents[2] / "conf"
PROFILES = ("paper", "mini")
DEFAULTS = {"model": "smollm2_135m", "method": "fasa", "task": "stdlib", "budget": 256}
SECTIONS = ("method", "task", "protocol", "cache", "calibration", "seed")  # what tells runs of one name apart
UNSET = ("limit", "task.parts")  # null in an entry that extends another: not given
# how much of an experiment was run, and where its data lay: never part of what it is
SCALE = (
    "limit",
    "shard",
    "store_text",
    "task.datasets",
    "task.max_new_tokens",
    "task.windows",
    "task.n_samples",
    "model.max_input",
)
PLACES = ("task.data_dir", "task.prompts_file", "task.data_file", "task.path", "calibration.file")
OF_ITS_OWN = ("task.seed", "method.backend")  # follow from others, or change no output


@dataclass(frozen=True)
class Planned:
    """One run of an experiment. settings: what its entry gives, defaults of model, method, task and budget included."""

    experiment: str
    profile: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def given(self) -> dict[str, Any]:
        return dict(self.settings)

    @property
    def overrides(self) -> list[str]:
        """As they would be given on the command line."""
        return [f"{key}={_text(value)}" for key, value in self.settings]

    def get(self, key: str) -> Any:
        """The value of a key of the command line, as the composed config has it; method is the method's own name."""
        if key in ("model", "task"):
            return self.given[key]
        if key == "method":
            return self.config["method"]["name"]
        if key in self.given:
            return self.given[key]
        return flatten(self.config).get(key)

    @cached_property
    def config(self) -> dict[str, Any]:
        """The sections that tell runs apart, composed. The model's is left out: it changes none of the others.

        Nor do method and task change each other, so that few of a sweep's configs need to be composed.
        """
        method, task, rest = (self._settings_of(group) for group in ("method", "task", ""))
        return {**_sections(rest), "method": _sections(method)["method"], "task": _sections(task)["task"]}

    def _settings_of(self, group: str) -> tuple[tuple[str, Any], ...]:
        """Those of method or task; of all others but the model and the budget if group is ""."""
        groups = {key: key.partition(".")[0] for key, _ in self.settings}
        aside = ("method", "task", "model", "budget")
        return tuple(
            (key, value)
            for key, value in self.settings
            if key == "seed" or (groups[key] == group if group else groups[key] not in aside)
        )

    def matches(self, run: Run) -> bool:
        """Whether this stored run is it, at whatever scale. What a run does not say does not count against it."""
        if run.name("model") != self.given["model"] or run.name("task") != self.given["task"]:
            return False
        if run.name("method") != self.get("method"):
            return False
        budget = run.summary.get("budget") if run.summary else run.config.get("budget")
        if budget is not None and budget != self.given["budget"]:
            return False
        stored = _identity({key: run.config.get(key) for key in SECTIONS if _matters(run, key)})
        return all(stored[key] == value for key, value in self._identity.items() if key in stored)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return _identity(self.config)

    def find(self, runs: Iterable[Run]) -> Run | None:
        """The stored run that comes nearest: of the same scale, then complete, then with the most examples."""
        scale = {key: value for key, value in self.settings if key in SCALE}

        def rank(run: Run) -> tuple[int, bool, int, str]:
            flat = flatten(run.config)
            same = sum(_frozen(flat.get(key)) == value for key, value in scale.items())
            return same, run.status == "complete", len(run.rows), run.folder.name

        return max((run for run in runs if self.matches(run)), key=rank, default=None)


@dataclass(frozen=True)
class Experiment:
    """One file of conf/experiment. layout: see fasa_bench.exhibits; entries: by profile.

    notes: what a reader of the table must know; needs: what the embedded model lacks, if it has no `mini` for that.
    """

    id: str
    title: str
    layout: Mapping[str, Any]
    entries: Mapping[str, Sequence[Mapping[str, Any]]]
    notes: tuple[str, ...] = ()
    needs: str = ""

    def plan(self, profile: str, replace: Mapping[str, Any] | None = None) -> list[Planned]:
        """The runs of a profile, each once. replace: keys of the command line whose values replace those listed."""
        if profile not in PROFILES:
            raise UserError.of("profile", profile, f"must be one of {', '.join(PROFILES)}")
        planned = (
            Planned(self.id, profile, tuple(settings.items()))
            for entry in self.entries.get(profile, ())
            for settings in _product({**entry, **{key: [value] for key, value in (replace or {}).items()}})
        )
        return list(dict.fromkeys(planned))


@cache
def load_experiments(folder: Path = CONF / "experiment") -> dict[str, Experiment]:
    """{"table1": Experiment, ...} in the paper's order, tables first. Raises UserError for a file that is none."""
    found = {}
    for path in folder.glob("[!_]*.yaml"):
        content = yaml.safe_load(path.read_text("utf-8")).get("experiment")
        if content is None:  # one of Hydra's own kind, such as demo
            continue
        unknown = content.keys() - {"title", "layout", "notes", "needs", *PROFILES}
        if unknown or "title" not in content:
            problem = f"unknown key {sorted(unknown)[0]}" if unknown else "title is missing"
            raise UserError(
                f"{path}: {problem}; an experiment has title, layout, notes, needs, {' and '.join(PROFILES)}"
            )
        entries = {profile: content.get(profile) or [] for profile in PROFILES}
        notes, needs = tuple(content.get("notes", ())), content.get("needs", "")
        found[path.stem] = Experiment(path.stem, content["title"], content["layout"], entries, notes, needs)
    return dict(sorted(found.items(), key=lambda item: _order(item[0])))


def composed(overrides: Sequence[str]) -> DictConfig:
    """The config of one command line."""
    started = GlobalHydra.instance().is_initialized()
    with nullcontext() if started else initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


@cache
def _sections(settings: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Hydra composes the choices (method=quest), which takes it a third of a second; values are put in here."""
    config = deepcopy(_chosen(tuple((key, value) for key, value in settings if _is_choice(key))))
    for key, value in settings:
        if not _is_choice(key):
            try:
                OmegaConf.update(config, key, _plain(value))
            except ConfigAttributeError as error:
                raise UserError.of(key, value, "conf/ has no such key") from error
    whole: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    return {key: whole[key] for key in SECTIONS}


@cache
def _chosen(choices: tuple[tuple[str, Any], ...]) -> DictConfig:
    return composed([f"{key}={_text(value)}" for key, value in choices])


def _is_choice(key: str) -> bool:
    """Whether it chooses a file of conf/, or needs Hydra's own rules for other reasons (+key, ~key)."""
    return key in ("model", "method", "task") or not key[0].isalpha()


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config makes a run another run; names are compared apart."""
    aside = {*SCALE, *PLACES, *OF_ITS_OWN, "method.name"}
    flat = flatten({key: value for key, value in config.items() if value is not None})
    if text := flat.get("calibration.text"):
        flat["calibration.text"] = Path(text).stem  # qasper, whatever folder qasper.jsonl lies in
    return {key: value for key, value in flat.items() if key not in aside and not key.endswith("_target_")}


def _matters(run: Run, section: str) -> bool:
    """Whether the run's identity has it: a method that is not calibrated is the same run whatever calibration says."""
    return section != "calibration" or (run.config.get("identity") or {}).get(section, True) is not None


def _product(entry: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    entry = {**DEFAULTS, **entry}
    choices = [value if isinstance(value, list) else [value] for value in entry.values()]
    for values in itertools.product(*choices):
        settings = {key: _frozen(value) for key, value in zip(entry, values, strict=True)}
        yield {key: value for key, value in settings.items() if not (key in UNSET and value is None)}


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(_text, value))}]"
    text = str(value)
    plain = text.replace("_", "").replace("-", "").replace(".", "").replace("/", "").isalnum()
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _order(name: str) -> tuple[int, int, str]:
    kind = name.rstrip("0123456789")
    number = name[len(kind) :]
    return ("table", "figure").index(kind) if kind in ("table", "figure") else 2, int(number or 0), name
