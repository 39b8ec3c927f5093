"""What planned runs will cost, from measured rates (results/measured/rates.yaml) and the size of each task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fasa_bench.errors import UserError
from fasa_bench.experiments import Planned
from fasa_bench.store import flatten

RATES = Path(__file__).resolve().parents[2] / "results" / "measured" / "rates.yaml"
GIB = 2**30
ANSWER = {"math500": 3000, "aime24": 13000}  # tokens of an answer, rounded from the paper's Table 3, full KV
LONGBENCH = {  # examples, and mean length in words (Chinese: characters): LongBench paper (arXiv 2308.14508), Table 1
    "narrativeqa": (200, 18409), "qasper": (200, 3619), "multifieldqa_en": (150, 4559), "multifieldqa_zh": (200, 6701),
    "hotpotqa": (200, 9151), "2wikimqa": (200, 4887), "musique": (200, 11214), "dureader": (200, 15768),
    "gov_report": (200, 8734), "qmsum": (200, 10614), "multi_news": (200, 2113), "vcsum": (200, 15380),
    "trec": (200, 5177), "triviaqa": (200, 8209), "samsum": (200, 6258), "lsht": (200, 22337),
    "passage_count": (200, 11141), "passage_retrieval_en": (200, 9289), "passage_retrieval_zh": (200, 6745),
    "lcc": (500, 1235), "repobench-p": (500, 4206),
}  # fmt: skip
TOKENS_A_WORD = 1.3
NOT_IN_TABLE2 = {"multifieldqa_zh", "dureader", "vcsum", "samsum", "lsht", "passage_retrieval_zh"}
LONGEST_ANSWER = 128  # mean over LongBench's limits


@dataclass(frozen=True)
class Size:
    """Examples of a task, and what each is on average: prompt tokens, generated tokens, answers drawn of one prompt."""

    examples: int
    prompt: float
    answer: float
    answers: int = 1


@dataclass(frozen=True)
class Cost:
    """prefill_s is paid once by all runs that share prompts; gib: weights and the longest cache."""

    prefill_s: float
    decode_s: float
    gib: float


@cache
def rates() -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load(RATES.read_text("utf-8"))
    return found


def cost(planned: Planned) -> Cost:
    """Of one run, on the machine of its profile. Raises UserError for a model whose size is not known."""
    model = rates()["models"].get(planned.given["model"])
    if model is None:
        known = ", ".join(rates()["models"])
        raise UserError.of("model", planned.given["model"], f"its size is not in {RATES.name}; known are {known}")
    machine, size = rates()["machines"][planned.profile], task_size(planned)
    step_ms = (
        machine["step_ms"]["fkv" if planned.get("method") == "fkv" else "other"] * model["layers"] / machine["layers"]
    )
    if "prefill_flops" in machine:
        prefill = size.prompt * 2e9 * model["billions"] / machine["prefill_flops"]
    else:
        prefill = size.prompt / machine["prefill_tokens_per_s"]
    steps = size.examples * size.answer * (1 if planned.get("task.mode") != "parallel" else 1 / 15)
    tokens = size.prompt + size.answer * size.answers
    gib = (1e9 * model["billions"] * model["weight_bytes"] + 1024 * model["token_kib"] * tokens) / GIB
    return Cost(size.examples * prefill, steps * step_ms / 1000 * size.answers, gib)


def total(planned: Iterable[Planned]) -> float:
    """Seconds of all of them together, prompts shared."""
    prompts: dict[str, float] = {}
    decode = 0.0
    for one in planned:
        each = cost(one)
        prompts[group_key(one)] = each.prefill_s
        decode += each.decode_s
    return sum(prompts.values()) + decode


def group_key(planned: Planned) -> str:
    """Runs of one key share their prompts."""
    own = {key: value for key, value in planned.settings if key.partition(".")[0] in ("model", "task", "limit")}
    return repr(sorted(own.items()))


def task_size(planned: Planned) -> Size:
    """Of the whole task, or of what limit and lengths leave of it."""
    config = {**flatten({"task": planned.config["task"]}), **planned.given}
    task, limit = planned.given["task"], config.get("limit")
    longest = config.get("model.max_input") or 10**9

    def answer(most: float) -> float:
        return min(most, config.get("task.max_new_tokens") or most)

    if task == "longbench":
        names = config["task.datasets"]
        sets = list(LONGBENCH.values())
        if names == "table2":
            sets = [size for name, size in LONGBENCH.items() if name not in NOT_IN_TABLE2]
        elif names != "all":
            sets = [LONGBENCH[name] for name in names]
        counts = [min(count, limit or count) for count, _ in sets]
        prompts = [min(longest, TOKENS_A_WORD * words) for _, words in sets]
        mean = sum(map(lambda n, p: n * p, counts, prompts)) / sum(counts)
        return Size(sum(counts), mean, answer(LONGEST_ANSWER))
    if task in ANSWER:
        examples = {"math500": 500, "aime24": 30}[task]
        return Size(min(examples, limit or examples), 130, answer(ANSWER[task]), config["task.n"])
    if task == "ppl":
        return Size(config["task.windows"] or 60, config["task.prefill"], config["task.decode"])
    if task == "stdlib":
        return Size(min(3, limit or 3) + 2 * min(6, limit or 6), config["task.context"], 60)
    if task == "latency":
        batches, contexts = len(config["task.batches"]), len(config["task.contexts"])
        return Size(batches * contexts, 0, 3 * config["task.steps"])
    lengths = [config.get(f"task.{key}") or 0 for key in ("prefill", "decode")]
    samples = (config.get("task.n_samples") or 1) * len(config.get("task.sources") or [1])
    return Size(samples, lengths[0], lengths[1])
