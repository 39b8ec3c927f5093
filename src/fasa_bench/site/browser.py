"""Stored examples as scripts, one a run, so that a page opened from file:// can load them one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fasa_bench.store import Run

LONGEST = 4000  # characters of a text that is shown; the run folder has it whole
GROUPS = ("dataset", "group", "document", "subject")  # fields that say which part of its task an example is of
REFERENCES = ("answers", "answer")
HALF = re.compile("[\ud800-\udfff]")  # of a pair that makes up one character


def script(run: Run) -> str:
    """A call that hands the run's rows to the page."""
    rows = [row(each) for each in [*run.rows, *run.failed]]
    return f"report.rows({_js(run.folder.name)}, {_js(rows)});\n"


def index(name: str, value: Any) -> str:
    """A script that sets a value of the page."""
    return f"report.{name} = {_js(value)};\n"


def row(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What the browser shows of a stored row; keys without a value are left out."""
    fields = stored.get("fields") or {}
    reference = next((fields[key] for key in REFERENCES if key in fields), None)
    has_text = stored.get("prediction") is not None or "prompt_head" in stored
    shown = {
        "id": stored["id"],
        "group": next((str(fields[key]) for key in GROUPS if key in fields), None),
        "head": _short(stored.get("prompt_head")),
        "tail": _short(stored.get("prompt_tail")),
        "prediction": _texts(stored.get("prediction")),
        "reference": _texts(reference),
        "scores": {key: value for key, value in (stored.get("scores") or {}).items() if _is_score(value)},
        "tokens": stored.get("prompt_tokens"),
        "generated": stored.get("generated_tokens"),
        "finish": stored.get("finish_reason"),
        "error": stored.get("error"),
        "texts": None if has_text or "error" in stored else False,
    }
    return {key: value for key, value in shown.items() if value is not None and value != {}}


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(value: Any) -> list[str] | None:
    """As a list, for answers that were drawn and references that are many."""
    if value is None:
        return None
    return [_short(str(each)) or "" for each in (value if isinstance(value, list) else [value])]


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _js(value: Any) -> str:
    """JSON in ASCII, safe within a script element too."""
    return json.dumps(_whole(value), separators=(",", ":")).replace("<", "\\u003c")


def _whole(value: Any) -> Any:
    """The same with half characters shown as the sign for what is unreadable; browsers may fall over them."""
    if isinstance(value, str):
        return HALF.sub("\ufffd", value)
    if isinstance(value, Mapping):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value
