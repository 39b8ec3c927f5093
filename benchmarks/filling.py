"""Does a step on a randomly filled cache take as long as one after a real prompt? On the embedded model, in turns.

python benchmarks/filling.py [--context 4096] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from configured import method_named

from fasa_bench.calibration import Calibration
from fasa_bench.method import Method
from fasa_bench.models import Model, ModelSpec
from fasa_bench.session import Session
from fasa_bench.statistics import bootstrap
from fasa_bench.task import Timing
from fasa_bench.texts import documentation
from fasa_bench.timing import Plain, Stepping, begin, take_turns

BUDGET = 256


def main() -> None:
    parser = argparse.ArgumentParser(description="Random filling against a real prompt: the ratio of step times.")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = Model(ModelSpec("smollm2_135m", max_input=7680, source="embedded"))
    ids = model.tokenizer(documentation(), verbose=False)["input_ids"][: options.context]
    timing = Timing(context=options.context, steps=options.steps)
    fasa = method_named("fasa_plus")
    fasa.prepare(model, Calibration())
    found = {}
    with Session(model.network) as session:
        filled = begin(session, ids, timing, fasa.observes())
        prompted = begin(session, ids, replace(timing, fill="prefill"), fasa.observes())
        for each, budget in ((Method("fkv"), None), (fasa, BUDGET)):
            with contextlib.ExitStack() as stack:
                taking: dict[str, Stepping | Plain] = {
                    name: Stepping(stack.enter_context(prefilled.fork(each, budget)))
                    for name, prefilled in (("random", filled), ("prompt", prompted))
                }
                times = take_turns(taking, model.config.vocab_size, timing)
            turns = [np.reshape(times[name], (timing.turns, -1)) for name in ("random", "prompt")]
            ratios = np.median(turns[0], axis=1) / np.median(turns[1], axis=1)
            ratio = bootstrap(ratios, np.median)
            found[each.name] = {"ms": {name: median(taken) for name, taken in times.items()}, "ratio": ratio}
            low, high = ratio["ci_low"] or 0, ratio["ci_high"] or 0
            print(f"{each.name}: random filling by real prompt {ratio['value']:.3f} [{low:.3f}, {high:.3f}]")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"context": options.context, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
