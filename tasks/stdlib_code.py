"""Lines of standard-library source to be completed, each with its file's text before it."""

from __future__ import annotations

import ast
import hashlib
import random
from bisect import bisect_right
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fasa_bench.errors import UserError

# Long, pure Python, and a single file in every supported version.
MODULES = (
    "argparse",
    "calendar",
    "configparser",
    "difflib",
    "fractions",
    "ipaddress",
    "json.decoder",
    "mailbox",
    "optparse",
    "shutil",
    "statistics",
    "tarfile",
)
SHORTEST = 20  # characters; shorter lines say little
SKIPPED_BY_METRIC = ("`", "#", "//")  # LCC's metric passes over lines with these


@dataclass
class Completion:
    """The ids before a line (up to and with its line break and indentation), and the line without indentation."""

    module: str
    line: int  # counted from 1
    prompt_ids: list[int]
    answer: str


def completion(index: int, tokenizer: Any, context: int, seed: int) -> Completion:
    """The index-th example: a line of module `index` (in turn), drawn among those with `context` ids before them."""
    module = MODULES[index % len(MODULES)]
    text = source(module)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in encoded["offset_mapping"]]
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    usable = []
    for number, answer in _statements(text):
        first = starts[number - 1] + text[starts[number - 1] :].index(answer)
        # Cut where the tokenizer cuts: the blank before the first word usually belongs to that word's token.
        before = bisect_right(ends, first)
        if before >= context:
            usable.append((number, answer, before))
    if not usable:
        raise UserError.of("task.context", context, f"no line of the module {module} has so many tokens before it")
    number, answer, before = random.Random(f"{seed}/{index}").choice(usable)
    return Completion(module, number, encoded["input_ids"][before - context : before], answer)


def fingerprint() -> str:
    return hashlib.sha256("\n".join(source(module) for module in MODULES).encode()).hexdigest()


@cache
def source(module: str) -> str:
    """A standard-library module's source text."""
    spec = find_spec(module)
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise UserError(f"this Python does not carry the source of its module {module}; use task.parts without code")
    return Path(spec.origin).read_text(encoding="utf-8")


def _statements(text: str) -> list[tuple[int, str]]:
    """Line number and text of one-line statements inside functions that are worth predicting, in order."""
    lines = text.splitlines()
    numbers = set()
    for function in ast.walk(ast.parse(text)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if isinstance(node, ast.stmt) and node.lineno == node.end_lineno and not docstring:
                    numbers.add(node.lineno)
    stripped = ((number, lines[number - 1].strip()) for number in sorted(numbers))
    return [
        (number, line)
        for number, line in stripped
        if len(line) >= SHORTEST and not any(mark in line for mark in SKIPPED_BY_METRIC)
    ]
