"""Cases that the official implementations answered: kept positions exactly, floats to the case's own tolerance.

Cases lie in tests/conformance/cases and in the folder that FASA_BENCH_CASES names.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from fasa_bench.errors import UserError

HERE = Path(__file__).parent
ADAPTERS = {
    key: adapter
    for path in sorted(HERE.glob("adapters*.py"))
    for key, adapter in importlib.import_module(f"tests.conformance.{path.stem}").ADAPTERS.items()
}
FOLDERS = [HERE / "cases", *map(Path, filter(None, [os.environ.get("FASA_BENCH_CASES")]))]
CASES = {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.npz"))}


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    facts = json.loads(CASES[case].with_suffix(".json").read_text())
    adapter = ADAPTERS.get((facts["method"], facts["variant"]))
    if adapter is None:
        pytest.skip(f"{facts['method']} ({facts['variant']}) is not among the methods yet")
    with np.load(CASES[case]) as archive:
        arrays = dict(archive)
    expected = {name: array for name, array in arrays.items() if name.startswith("exp_")}
    inputs = {name: array for name, array in arrays.items() if name not in expected}
    if facts.get("expected_error"):  # the official code raises: ours refuses it too, or simply works
        with contextlib.suppress(UserError):
            adapter(inputs, facts["params"])
        return
    found = adapter(inputs, facts["params"])
    assert expected
    for name, array in expected.items():
        if array.dtype.kind == "b" or "order" in name:
            assert np.array_equal(found[name], array), name
        elif array.dtype.kind in "iu":
            assert np.array_equal(np.sort(found[name], axis=-1), np.sort(array, axis=-1)), name
        else:
            np.testing.assert_allclose(found[name], array, **_tolerance(facts["tolerance"], name), err_msg=name)


def _tolerance(stated: dict[str, str], name: str) -> dict[str, float]:
    """The sidecar says for example {"exp_scores/exp_attn*": "rtol 1e-4, atol 1e-5"}."""
    patterns = [(pattern, text) for keys, text in stated.items() for pattern in keys.split("/")]
    text = next(text for pattern, text in patterns if re.fullmatch(pattern.replace("*", ".*"), name))
    return {kind: float(number) for kind, number in re.findall(r"(rtol|atol) ([\d.e-]+)", text)}
