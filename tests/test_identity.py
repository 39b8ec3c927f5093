"""What code a run's id covers."""

from __future__ import annotations

import ast

from fasa_bench.identity import _imports, code_fingerprint


def imported(text: str, module: str) -> set[str]:
    return set(_imports(ast.parse(text), module))


def test_imports_are_followed_whether_absolute_or_relative() -> None:
    assert imported("from fasa_bench.cache import KVLayer", "fasa_bench.x") == {"fasa_bench.cache"}
    assert imported("from .tip import LOG2E", "fasa_bench.kernels.attend") == {"fasa_bench.kernels.tip"}
    assert imported("from ..cache import KVLayer", "fasa_bench.kernels.attend") == {"fasa_bench.cache"}
    assert imported("import torch\nfrom fasa_bench import errors", "fasa_bench.x") == {"fasa_bench.errors"}


def test_the_code_of_a_method_tells_it_from_others() -> None:
    one, other = (code_fingerprint("fasa_bench.session", f"fasa_bench.methods.{name}") for name in ("fasa", "quest"))
    assert one != other
    assert one == code_fingerprint("fasa_bench.methods.fasa", "fasa_bench.session")
