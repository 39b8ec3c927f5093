"""Real text: what every Python installation carries, its own language reference, and files that are given."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from fasa_bench.errors import UserError

TEXTS = ("context", "text", "solution")  # keys of the text in rows of LongBench, of corpora and of MATH500
EVALUATED = 0.7  # share of the text that tasks may score; methods are calibrated on the rest


def documentation() -> str:
    """The part that tasks evaluate: about 260k characters; the text differs a little between Python versions."""
    return _parts()[0]


def calibration_text() -> str:
    """The part that methods are calibrated on; no paragraph of it is in `documentation`."""
    return _parts()[1]


def sample_of(path: Path) -> str:
    """A text file; of a .jsonl the texts of all rows, one after the other. Raises UserError for any other file."""
    wanted = f"must be a text file, or a .jsonl whose rows have one of {', '.join(TEXTS)}"
    try:
        content = path.read_text(encoding="utf-8")
        if path.suffix != ".jsonl":
            return content
        rows = [json.loads(line) for line in content.splitlines() if line.strip()]
        texts = [next((row[key] for key in TEXTS if row.get(key)), None) for row in rows]
    except (OSError, ValueError, AttributeError) as error:
        raise UserError.of("calibration.text", str(path), f"{wanted} ({error})") from error
    if not texts or None in texts:
        raise UserError.of("calibration.text", str(path), wanted)
    return "\n\n".join(map(str, texts))


@cache
def _parts() -> tuple[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:  # some systems ship Python without it
        raise UserError("this Python has no pydoc_data: install its documentation package or another Python") from error
    # Topics quote each other at length, with other indentation. Each paragraph counts once: a model would only copy
    # the second, and no paragraph is on both sides of the cut.
    seen: dict[tuple[str, ...], str] = {}
    for key in sorted(topics):
        for text in re.split(r"\n{2,}", topics[key].strip("\n")):
            seen.setdefault(tuple(text.split()), text)
    paragraphs = list(seen.values())
    total = sum(map(len, paragraphs))
    size = cut = 0
    while size < EVALUATED * total:
        size += len(paragraphs[cut])
        cut += 1
    return "\n\n".join(paragraphs[:cut]), "\n\n".join(paragraphs[cut:])
