"""What a run is: everything that can change an output goes into its id, nothing else does."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from dataclasses import asdict
from typing import Any

import torch
import transformers

import fasa_bench
from fasa_bench.calibration import Calibration
from fasa_bench.method import Method
from fasa_bench.models import Model
from fasa_bench.task import Task

# modules whose code takes part in computing an output; those that only store, show or compose are left out
ENGINE = ("attention", "cache", "calibration", "embedded", "method", "metrics", "models", "rope", "session", "task", "texts")


def identity_of(
    model: Model,
    task: Task,
    method: Method,
    calibration: Calibration,
    budget: int | float | None,
    seed: int,
    limit: int | None,
) -> dict[str, Any]:
    """The facts behind a run id. Places of files do not count, their content does."""
    return {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "fasa_bench": fasa_bench.__version__},
        "code": code_fingerprint(type(method).__module__, type(task).__module__),
        "model": _model(model),
        "method": {"class": type(method).__qualname__, **asdict(method)},
        "task": {"class": type(task).__qualname__, **task.identity(), "data": task.fingerprint()},
        "calibration": calibration.identity() if method.uses_calibration else None,
        "budget": budget,
        "seed": seed,
        "limit": limit,
    }


def _model(model: Model) -> dict[str, Any]:
    spec = model.spec
    settings = {"dtype": spec.dtype, "device": model.device_type, "attention": model.prefill_backend}
    return {"fingerprint": model.fingerprint, "max_input": spec.max_input, **settings}


def code_fingerprint(*modules: str) -> str:
    """Hash of the engine's and the given modules' code, without comments, docstrings and layout."""
    names = [f"fasa_bench.{name}" for name in ENGINE] + sorted(modules)
    digest = hashlib.sha256()
    for name in names:
        if name not in sys.modules:
            continue
        tree = ast.parse(inspect.getsource(sys.modules[name]))
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list) and len(body) > 1 and isinstance(body[0], ast.Expr):
                value = body[0].value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    body.pop(0)
        digest.update(ast.unparse(tree).encode())
    return digest.hexdigest()[:16]
