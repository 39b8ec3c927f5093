"""What a run is: everything that can change an output goes into its id, nothing else does."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import fasa_bench
from fasa_bench.calibration import Calibration
from fasa_bench.method import Method
from fasa_bench.models import Model
from fasa_bench.protocol import Protocol
from fasa_bench.segments import Packing
from fasa_bench.task import Task

PACKAGE = "fasa_bench"
# what stores, shows or composes computes no output: a change there must not make stored runs strangers
ASIDE = {f"{PACKAGE}.{name}" for name in ("clock", "config", "errors", "paths", "statistics", "store", "tracking")}


def identity_of(
    model: Model,
    task: Task,
    method: Method,
    calibration: Calibration,
    packing: Packing,
    protocol: Protocol,
    *,
    budget: int | float | None,
    seed: int,
    limit: int | None,
) -> dict[str, Any]:
    """The facts behind a run id. Places of files do not count, their content does."""
    return {
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            PACKAGE: fasa_bench.__version__,
        },
        "code": code_fingerprint(
            f"{PACKAGE}.session", f"{PACKAGE}.protocol", type(method).__module__, type(task).__module__
        ),
        "model": model.identity(),
        "method": {"class": type(method).__qualname__, **asdict(method)},
        "task": {"class": type(task).__qualname__, **task.identity(), "data": task.fingerprint()},
        "calibration": calibration.identity() if method.uses_calibration or task.uses_calibration else None,
        "cache": asdict(packing) if packing.bits < 16 else None,
        "protocol": asdict(protocol),
        "budget": budget,
        "seed": seed,
        "limit": limit,
    }


@functools.cache
def code_fingerprint(*modules: str) -> str:
    """Hash of the code of these modules and of all that they import from this package.

    Comments, docstrings and layout do not count.
    """
    sources: dict[str, str] = {}
    waiting = sorted(set(modules))
    while waiting:
        name = waiting.pop()
        if name in sources or name in ASIDE:
            continue
        tree = _tree(name)
        sources[name] = ast.unparse(_without_docstrings(tree)) + _compiled(name)
        waiting += _imports(tree, name)
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(f"{name}\n{sources[name]}\n".encode())
    return digest.hexdigest()[:16]


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    return ast.parse(source)


def _compiled(module: str) -> str:
    """The C++ beside a module that has some; its headers have the same beginning."""
    spec = importlib.util.find_spec(module)
    beside = Path(spec.origin) if spec and spec.origin else Path()
    parts = [*beside.parent.glob(f"{beside.stem}.cpp"), *sorted(beside.parent.glob(f"{beside.stem}_*.h"))]
    return "".join(part.read_text(encoding="utf-8") for part in parts)


def _imports(tree: ast.Module, module: str) -> Iterator[str]:
    """Modules of this package that are imported anywhere in the tree of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            source = f"{module.rsplit('.', node.level)[0]}.{node.module}" if node.level else node.module
            names = [source, *(f"{source}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.startswith(f"{PACKAGE}.") and _is_module(name))


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # `from module import function`
        return False


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body.pop(0)
    return tree
