"""A verdict in words on every number in the paper's text: by the paper's own tables, and by our runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fasa_bench.paper import Claim, Place
from fasa_bench.paper_checks import Check
from fasa_bench.paper_claims import Recomputed, recomputed
from fasa_bench.site.evidence import Evidence, Found, find
from fasa_bench.tables import number

BY_PAPER = {
    "none": "The paper gives no numbers to check it by.",
    "agrees": "The paper's own numbers give it.",
    "differs": "The paper's own numbers do not give it.",
    "unclear": "Points read off a drawing do not give it, which decides nothing.",
}
HOW = {"headline.longbench": ">="}  # how claim and number compare where the paper's own numbers are not asked
SYMBOLS = {"<=": "at most", ">=": "at least", "<": "less than", ">": "more than", "=": ""}


@dataclass(frozen=True)
class ClaimView:
    """own: what the paper's own numbers give, None if they cannot; ours: what our runs give; how: = < <= > >=."""

    place: Place
    claim: Claim
    own: Recomputed | None
    ours: tuple[Found, ...]
    how: str

    @property
    def claimed(self) -> str:
        return f"{SYMBOLS[self.how]} {self.claim.value:g} {self.claim.unit}".strip()

    @property
    def own_text(self) -> str:
        return f"{number(float(self.own.value), 3)} {self.claim.unit}" if self.own else ""

    @property
    def own_verdict(self) -> str:
        """A key of `fasa_bench.site.cells.VERDICTS`."""
        if self.own is None:
            return "none"
        return "agrees" if self.own.holds else "differs" if self.own.sure else "unclear"

    @property
    def verdict(self) -> str:
        """In sentences."""
        return " ".join(
            [BY_PAPER[self.own_verdict], *(map(self._sentence, self.ours) if self.ours else ["Not run here."])]
        )

    def _sentence(self, found: Found) -> str:
        unfinished = ", from runs that are not finished" if found.partial else ""
        small = " (a far smaller model than the paper's)" if found.profile == "mini" else ""
        own = self.claim.where.get("model")
        other = found.profile == "mini" or (own is not None and found.model != own)
        if self.how == "=" and other:  # a number of one model, and not what holds for all
            verdict = "measured, but the claim's number is another model's"
        else:
            verdict = judge(found, self.how, self.claim.value)
        return f"{found.name}{small}: {verdict}{unfinished}."


def judge(found: Found, how: str, claimed: float) -> str:
    """Whether our number bears the claim out: by its whole interval, which may be too wide to tell."""
    low, high = found.low, found.high
    if low is None or high is None:
        return "a number without an interval"
    if how == "=":
        return "agrees, the claim lies in the interval" if low <= claimed <= high else "differs"
    if how in ("<=", "<"):
        return "holds" if high <= claimed else "does not hold" if low > claimed else "the interval is too wide to tell"
    return "holds" if low >= claimed else "does not hold" if high < claimed else "the interval is too wide to tell"


def claims(paper: Mapping[str, Place], evidence: Evidence) -> list[ClaimView]:
    """In the order of the paper's tables and figures, the headline's first."""
    own = {each.claim.text: each for each in recomputed(paper)}
    views = []
    for place in sorted(paper.values(), key=_order):
        for key, claim in place.claims.items():
            name, given = f"{place.id}.{key}", own.get(claim.text)
            how = HOW.get(name) or (given.how if given else "=")
            views.append(ClaimView(place, claim, given, tuple(find(name, claim, evidence)), how))
    return views


def as_table(views: Sequence[ClaimView]) -> Check:
    """All claims with what the paper's own numbers and our runs say."""
    rows = [
        (
            f"{view.claim.text} ({view.place.name})",
            view.claimed,
            view.own_text or "-",
            "; ".join(f"{each.name}: {each.text(view.claim.unit)}" for each in view.ours) or "not run",
            view.verdict,
        )
        for view in views
    ]
    ran = sum(bool(view.ours) for view in views)
    finding = f"{ran} of {len(views)} numbers in the paper's text have one of ours beside them."
    columns = ("claim", "the paper says", "its own numbers give", "our runs give", "verdict")
    return Check("The paper's claims", finding, columns, rows)


def _order(place: Place) -> tuple[int, int]:
    kind = place.id.rstrip("0123456789")
    return ("headline", "table", "figure").index(kind), int(place.id[len(kind) :] or 0)
