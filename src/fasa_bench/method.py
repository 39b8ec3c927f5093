"""What a method is: a few hooks on one layer, and the meaning of a budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fasa_bench.cache import KVLayer
from fasa_bench.clock import stage
from fasa_bench.errors import UserError
from fasa_bench.softmax import capped, scaled, weights

if TYPE_CHECKING:
    from fasa_bench.calibration import Calibration
    from fasa_bench.models import Model


GROUP = 8  # entries of which `highest` looks at the largest first


class Observation(NamedTuple):
    """What a method wants recorded during the dense prompt pass.

    window: the last so many queries, in `layer.prompt_queries` [b, Hq, w, d]. mass: the attention that each token
    received, summed over all prompt queries, in `layer.prompt_mass` [b, Hq, n] float32.
    """

    window: int = 0
    mass: bool = False

    def union(self, other: Observation) -> Observation:
        return Observation(max(self.window, other.window), self.mass or other.mass)


@dataclass
class Method:
    """Base of every method; parameters are dataclass fields, set from conf/method/*.yaml.

    Hooks are called for layers of full attention only: those with a sliding window keep it and are read whole.

    A method object belongs to one model (`prepare`) and holds nothing of a sequence: what it remembers of one goes
    into `layer.state`. Budgets are in tokens per head and step and count everything that is read: sinks, recent
    tokens and the current token too. `layer.budget` is the budget of that layer; `select` is asked only when it is
    set and the layer holds more.

    name: what the run is filed under. dense_layers: layers that read everything.
    layer_budget: how the budget is spread over the layers, see fasa_bench.layer_budget: uniform, or PyramidKV's
    linear decrease with depth, whose steepness is pyramid_beta. pyramid_rounding: integers that sum exactly to
    layers * budget, or the official floor divisions, which spend up to 12 % more.
    """

    name: str
    dense_layers: list[int] = field(default_factory=list)
    layer_budget: Literal["uniform", "pyramid"] = "uniform"
    pyramid_beta: int = 20
    pyramid_rounding: Literal["exact", "official"] = "exact"

    takes_budget: ClassVar[bool] = True
    uses_calibration: ClassVar[bool] = False
    speed: ClassVar[Literal["physical", "simulated"]] = "physical"  # simulated: reads as much as full KV does
    uses_weights: ClassVar[bool] = False  # `decoded` needs the weights of attention
    ragged: ClassVar[bool] = False  # `select` may fill rows up with slots of -1
    padding: ClassVar[bool] = True  # works on batches of left-padded prompts of different lengths
    # field name -> how paper, authors' code and ours differ there; logged with every run
    notes: ClassVar[dict[str, str]] = {}

    def prepare(self, model: Model, calibration: Calibration) -> None:
        """Once per run, before any sequence: look up what depends on the model only."""

    @property
    def parallel(self) -> bool:
        """What a step reads depends on its query and the tokens up to it only, and `reads` says it for many at once."""
        return False

    def observes(self) -> Observation:
        """What `prefill` wants to know of the prompt pass."""
        return Observation()

    def smallest_budget(self) -> int:
        """The least number of tokens this method can work with."""
        return 1

    def prefill(self, layer: KVLayer, query: Tensor | None) -> None:
        """After the dense prompt pass: build an index, or evict.

        query [b, Hq, w, d]: the last w = `observes().window` prompt queries, fewer in a shorter prompt; None if 0.
        """

    def select(self, layer: KVLayer, query: Tensor) -> Tensor | None:
        """Slots to read for this query [b, Hq, 1, d]: [b, H or Hq, 1, m], ascending; None reads everything."""
        return None

    def reads(self, layer: KVLayer, query: Tensor, visible: Tensor) -> Tensor:
        """`select` for many steps at once, whose tokens are the layer's newest: query [b, Hq, q, d].

        visible [b, 1, q, n] bool: the tokens up to each query's own. Returns those that are read, [b, heads, q, n]
        bool, heads 1, H or Hq. `combine` and `decoded` then get all q steps as well. Only called if `parallel`.
        """
        return visible

    def step(self, layer: KVLayer, query: Tensor) -> tuple[Tensor, int] | None:
        """Selection and attention in one, for a method with kernels of its own.

        Called where `select` would be. Returns the output [b, 1, Hq, d] and the tokens that a head read, and `combine`
        and `decoded` are not called then; None to go the usual way.
        """
        return None

    def combine(self, layer: KVLayer, query: Tensor, output: Tensor) -> Tensor:
        """Change what attention over the selected tokens gave, [b, 1, Hq, d]; not called when everything was read."""
        return output

    def decoded(self, layer: KVLayer, query: Tensor, weights: Tensor | None) -> None:
        """After each step: update statistics, or evict.

        weights [b, Hq, m] over the tokens that were read, for a method that `uses_weights`; else perhaps None.
        """


class TopTokens(Method):
    """A method that reads the best tokens by a score of its own, which no other step has a part in."""

    @property
    def parallel(self) -> bool:
        return True

    def scores(self, layer: KVLayer, query: Tensor, visible: Tensor | None) -> Tensor:
        """Worth of every token for queries [b, Hq, q, d]: [b, H or Hq, q, n].

        visible [b, 1, q, n] bool: the tokens that count for each query; None when all do.
        """
        raise NotImplementedError

    def always(self, layer: KVLayer) -> tuple[int, int]:
        """How many of the first and of the newest tokens are read whatever their score."""
        return 0, 0

    def select(self, layer: KVLayer, query: Tensor) -> Tensor:
        assert layer.budget is not None
        sinks, recent = self.always(layer)
        scores = self.scores(layer, query, None if layer.real is None else layer.real[:, :, None])[:, :, 0]
        with stage("top_k"):
            return top_slots(scores, layer, layer.budget, sinks=sinks, recent=recent)[:, :, None]

    def reads(self, layer: KVLayer, query: Tensor, visible: Tensor) -> Tensor:
        assert layer.budget is not None
        sinks, recent = self.always(layer)
        return top_mask(self.scores(layer, query, visible), visible, layer.budget, sinks=sinks, recent=recent)


def resolve_budget(budget: int | float | None, prompt_tokens: int) -> int | None:
    """Tokens per head and step: an int is tokens, a float in (0, 1] a share of the prompt (at least 1 token).

    None and the ratio 1.0 mean no limit: what is generated after the prompt is then read as well.
    """
    if budget is None or (isinstance(budget, float) and budget == 1.0):
        return None
    if isinstance(budget, float):
        return max(1, int(budget * prompt_tokens))
    return budget


def check_budget(budget: object, method: Method) -> int | float | None:
    """The budget key of a run, checked; None for a method that takes none."""
    if not method.takes_budget:
        return None
    allowed = "tokens (an integer of at least 1) or a share of the prompt (a number in (0, 1])"
    if isinstance(budget, bool) or not isinstance(budget, int | float):
        raise UserError.of("budget", budget, f"{method.name} needs {allowed}")
    if (isinstance(budget, int) and budget < 1) or (isinstance(budget, float) and not 0 < budget <= 1):
        raise UserError.of("budget", budget, f"must be {allowed}")
    if isinstance(budget, int) and budget < method.smallest_budget():
        raise UserError.of("budget", budget, f"{method.name} needs at least {method.smallest_budget()} tokens")
    return budget


def resolve_count(key: str, count: int | float, total: int) -> int:
    """A number of things out of `total`: an int as it is, a float in (0, 1] as a share, at least 1."""
    if isinstance(count, float) and 0 < count <= 1:
        return max(1, round(count * total))
    if isinstance(count, int) and 1 <= count <= total:
        return count
    raise UserError.of(key, count, f"must be an integer from 1 to {total} or a share in (0, 1]")


def top_slots(scores: Tensor, layer: KVLayer, budget: int, *, sinks: int = 0, recent: int = 0) -> Tensor:
    """The `budget` best slots of each row of scores [b, heads, n], ascending: [b, heads, budget].

    The first `sinks` and the last `recent` slots are among them whatever their score; padding comes last of all.
    """
    n = scores.shape[-1]
    if layer.real is None:
        last = n - min(recent, n - sinks)
        free = highest(scores[..., sinks:last], budget - sinks - (n - last)).sort(dim=-1).values + sinks
        if sinks or last < n:
            first, newest = (torch.arange(*ends, device=scores.device) for ends in ((0, sinks), (last, n)))
            rows = scores.shape[:-1]
            free = torch.cat([first.expand(*rows, -1), free, newest.expand(*rows, -1)], dim=-1)
        return free
    real = layer.real
    if 1 < real.shape[1] < scores.shape[1]:
        real = real.repeat_interleave(scores.shape[1] // real.shape[1], dim=1)
    rank = real.cumsum(-1)  # 1 for a row's first real token
    forced = (rank <= sinks) | (rank > rank[..., -1:] - recent)
    scores = scores.masked_fill(forced, torch.inf).masked_fill(~real, -torch.inf)
    return highest(scores, budget).sort(dim=-1).values


def highest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest entries of each row, in no order: [..., n] -> [..., count].

    Among many, the largest of each of n / GROUP groups are found first: only the best `count` groups can hold one of
    the entries wanted, and on a CPU a maximum costs far less than a place among the best.
    """
    groups = scores.shape[-1] // GROUP
    if scores.device.type != "cpu" or groups <= 4 * count:
        return scores.topk(count, dim=-1, sorted=False).indices
    whole = scores[..., : groups * GROUP].unflatten(-1, (GROUP, groups))  # a group: every so many-th entry
    group = whole.amax(-2).topk(count, dim=-1, sorted=False).indices
    within = (group[..., None, :] + torch.arange(0, groups * GROUP, groups)[:, None]).flatten(-2)
    rest = torch.arange(groups * GROUP, scores.shape[-1]).expand(*scores.shape[:-1], -1)
    index = torch.cat([within, rest], dim=-1)
    return index.gather(-1, scores.gather(-1, index).topk(count, dim=-1, sorted=False).indices)


def top_mask(scores: Tensor, visible: Tensor, budget: int, *, sinks: int = 0, recent: int = 0) -> Tensor:
    """`top_slots` for many queries, of the tokens that each may see: scores [b, heads, q, n] -> bool, the same shape.

    visible [b, 1, q, n] bool. A query that sees no more than `budget` tokens gets them all.
    """
    budget = min(budget, scores.shape[-1])
    scores = hidden(scores, visible)
    if sinks or recent:
        rank = visible.cumsum(-1)  # 1 for the first token that a query sees
        forced = visible & ((rank <= sinks) | (rank > rank[..., -1:] - recent))
        scores = scores.clamp(min=torch.where(forced, torch.inf, -torch.inf).to(scores.dtype))
    return best_mask(scores, budget)


def best_mask(scores: Tensor, count: int) -> Tensor:
    """The `count` largest entries of each row, -inf apart: [..., n] -> bool [..., n]; of ties no more than that."""
    if scores.device.type == "cpu":  # where numpy's partition and comparison are several times faster than torch's
        numbers = scores.float().numpy()
        parted = np.partition(numbers, -count, axis=-1)
        least, next_best = parted[..., -count, None], parted[..., :-count].max(-1, keepdims=True, initial=-np.inf)
        if not ((least == next_best) & (least > -np.inf)).any():  # else there are ties, of which not all may count
            return torch.from_numpy(numbers >= np.maximum(least, np.finfo(np.float32).min))
    best = scores.topk(count, dim=-1, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & (scores > -torch.inf)


def hidden(scores: Tensor, visible: Tensor, least: float = -torch.inf) -> Tensor:
    """The scores, and at most `least` where nothing is visible: bool, broadcast to them.

    The same as masked_fill, whose time is several times that of clamp where a mask is broadcast on a CPU.
    """
    return scores.clamp(max=torch.where(visible, torch.inf, least).to(scores.dtype))


def group_softmax(scores: Tensor, layer: KVLayer, visible: Tensor | None = None, position_bias: bool = True) -> Tensor:
    """Mean over the query heads of each KV head of the softmax of products: [b, Hq, ..., n] -> [b, H, ..., n] float32.

    visible: the tokens that count, which broadcasts to the scores; None for the layer's real ones. position_bias:
    whether to add ALiBi's, in a model that has it.
    """
    products = scores.float()
    logits = scaled(layer, products) if position_bias else capped(layer, products * layer.scale)
    visible = layer.real if visible is None else visible
    if visible is not None:
        logits = hidden(logits, visible)
    return weights(layer, logits).unflatten(1, (layer.heads, -1)).mean(2)
