"""`python -m fasa_bench.score BENCHMARK PATH`: official scores of predictions made anywhere, as one JSON object.

A benchmark is a module of fasa_bench.tasks with a function `score_path(path) -> (scores, notes)`; notes go to stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fasa_bench import tasks
from fasa_bench.errors import UserError

Scorer = Callable[[Path], tuple[dict[str, Any], list[str]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 after one line on stderr about bad input (2 for wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m fasa_bench.score", description="Official scores of predictions.")
    parser.add_argument("benchmark", help="such as longbench or math")
    parser.add_argument(
        "path",
        type=Path,
        help='longbench: folder of official <dataset>.jsonl; math: JSONL of "answer" and "pred" or "preds"',
    )
    given = parser.parse_args(arguments)
    try:
        scores, notes = _scorer(given.benchmark)(given.path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(json.dumps(scores, indent=2))
    return 0


def _scorer(benchmark: str) -> Scorer:
    names = [module.name for module in pkgutil.iter_modules(tasks.__path__)]
    scorer = _score_path(benchmark) if benchmark in names else None
    if scorer is None:
        raise UserError.of("benchmark", benchmark, f"one of {', '.join(name for name in names if _score_path(name))}")
    return scorer


def _score_path(name: str) -> Scorer | None:
    return getattr(importlib.import_module(f"{tasks.__name__}.{name}"), "score_path", None)


if __name__ == "__main__":
    sys.exit(main())
