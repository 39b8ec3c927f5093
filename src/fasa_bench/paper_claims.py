"""Numbers in the text of FASA's paper (arXiv 2602.03152v3), computed anew from its tables, figures and formulas."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fasa_bench.paper import Claim, Place, Value

Paper = Mapping[str, Place]
EPSILON = 1e-9


class Recomputed(NamedTuple):
    """A number of the text, and what other numbers of the paper give for it; source: which ones."""

    claim: Claim
    value: float
    source: str
    how: str = "="  # how value and claim have to compare
    sure: bool = True  # False: from numbers that others read off a drawing

    @property
    def holds(self) -> bool:
        """= and >= up to the digits of the claim, < and > strictly, <= exactly."""
        claimed = self.claim.value
        value = round(self.value + EPSILON, decimals(claimed))
        exact = {"<": self.value < claimed, ">": self.value > claimed, "<=": self.value <= claimed + EPSILON}
        return {**exact, "=": value == claimed, ">=": value >= claimed}[self.how]


def recomputed(paper: Paper) -> Iterable[Recomputed]:
    """Every number of the text that other numbers of the paper give."""
    ca, longbench, cot, text = (paper[name] for name in ("table1", "table2", "table3", "headline"))
    gains = [a - b for a, b in zip(ca.series(n_tip=8), ca.series(method="snapkv"), strict=True)]
    yield Recomputed(ca.claims["f8_over_snapkv"], statistics.mean(gains), "Table 1")
    yield Recomputed(ca.claims["f8_at_64"], ca.number(n_tip=8, budget=64), "Table 1")

    claim = longbench.claims["quest_narrativeqa"]
    full, quest = (longbench.number(**{**claim.where, "method": name}) for name in ("fkv", "quest"))
    yield Recomputed(claim, full - quest, "Table 2, Mistral-7B-v0.3")
    losses = [-value for value in longbench.series(metric="avg_difference_to_fkv", method="fasa")]
    yield Recomputed(longbench.claims["fasa_loss"], max(losses), "Table 2, largest of the models", "<=")

    for name in ("snapkv_math500", "fasa_math500"):
        yield Recomputed(cot.claims[name], cot.number(metric="pass@1", **cot.claims[name].where), "Table 3")
    where = dict(cot.claims["tenth"].where)
    budget = where.pop("budget")
    total = cot.number(metric="tokens/total", **where)
    yield Recomputed(cot.claims["tenth"], 100 * float(budget) / total, f"Table 3, {budget} of {total:g} tokens")
    # The paper gives no derivation; this is the only pair of its numbers that was found to give it.
    decoded = cot.number(metric="tokens/decode", model="r1_llama_8b", method="fkv", task="aime24")
    budget = max(value.budget or 0 for value in cot.values)
    share = 100 * budget / decoded
    yield Recomputed(text.claims["cache_share"], share, f"Table 3, R1-Llama-8B, {budget} of {decoded:g} tokens")

    claim = paper["figure3"].claims["decode_share"]
    prefill, decode = (paper["figure3"].number(metric=name, **claim.where) for name in ("prefill_s", "decode_s"))
    yield Recomputed(claim, 100 * decode / (prefill + decode), "Figure 3")
    yield Recomputed(text.claims["speedup"], read_off_speedup(paper, 65536), "Figure 7, times read off", sure=False)
    printed = paper["figure7"].number(metric="speedup", context=65536)
    yield Recomputed(text.claims["speedup_rounded"], printed, "Section 5.3")
    claim = text.claims["compression"]
    shares = float(claim.where["dominant_share"]), float(claim.where["budget_share"])
    yield Recomputed(claim, compression_factor(*shares), "Equation 10")

    dominant, rest = (paper["table9"].series(metric=name) for name in ("dominant", "non_dominant"))
    yield Recomputed(text.claims["dominant"], max(dominant), "Table 9, largest", "<")
    yield Recomputed(text.claims["non_dominant"], min(rest), "Table 9, smallest", ">=")
    smallest = min(number(value) for value in pairs_of_sets(paper))
    yield Recomputed(paper["table10"].claims["above"], smallest, "Table 10, smallest", ">")
    both = zip(paper["table8"].series(method="fasa"), paper["table8"].series(method="fkv"), strict=True)
    yield Recomputed(paper["table8"].claims["not_below"], min(a - b for a, b in both), "Table 8, smallest", ">=")


def compression_factor(dominant_share: float, budget_share: float) -> float:
    """Equation 10: full KV's 2 L d over L d_dom + b d_rest + b d, shares being of d and of L."""
    return 2 / (dominant_share + budget_share * (1 - dominant_share) + budget_share)


def pairs_of_sets(paper: Paper) -> list[Value]:
    """Table 10's pairs of different sets, each once: the matrices are symmetric."""
    found = [
        value for value in paper["table10"].find(metric="overlap") if value.get("other") != value.get("calibration")
    ]
    names = list(dict.fromkeys(value.get("calibration") for value in found))
    return [value for value in found if names.index(value.get("calibration")) < names.index(value.get("other"))]


def read_off_speedup(paper: Paper, context: int) -> float:
    """Figure 7: a step of full KV by one of FASA-C, of the times read off. LookupError if one of them is not given."""
    wanted = {"metric": "step_s", "context": context}
    return paper["figure7"].number(method="fkv", **wanted) / paper["figure7"].number(method="fasa_c", **wanted)


def decimals(value: float) -> int:
    return len(f"{value:g}".partition(".")[2])


def number(value: Value) -> float:
    """Of a value that is no range."""
    if value.value is None:
        raise ValueError(f"{value.source} is a range")
    return float(value.value)
