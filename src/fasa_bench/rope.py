"""Which dimensions of a head rotate together under RoPE: the frequency chunks (FCs) of a model.

RoPE turns pairs of dimensions by angle position * inv_freq (Su et al., arXiv 2104.09864, Eq. 13-15). Which two
dimensions form a pair differs between implementations, so it is read off the loaded model and never looked up.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from fasa_bench.errors import UserError
from fasa_bench.latent import expansions_of
from fasa_bench.windows import full_layers

Layout = Literal["half", "interleaved", "none"]
Pairing = Literal["rope", "adjacent", "single"]

FIXED = ("default", "linear", "llama3", "yarn", "proportional")  # rope types whose frequencies ignore the length
PROBES = (1, 2, 7)  # positions at which the rotation is read and checked
APPLY = ("apply_rotary_pos_emb", "apply_rotary_emb")  # transformers' names for what turns queries and keys
TURNED = PROBES[-1]  # where the keys of all layers are checked


def _fail(network: Any, reason: str) -> NoReturn:
    raise UserError(f"the position embedding of {type(network).__name__} is not understood: {reason}")


@dataclass(frozen=True, eq=False)
class Rope:
    """How the dimensions of one head rotate, in the layers of full attention.

    layout: `half` pairs (i, i + n), `interleaved` pairs (2i, 2i + 1), both within the rotating dimensions; `none`: no
        dimension rotates. pairs: (a, b), highest frequency first; position p turns (x_a, x_b) by p * inv_freq.
    plain: dimensions that do not rotate (partial RoPE). inv_freq: radians per position, [n_pairs] float32.
    scaled: the frequencies depend on the text's length (dynamic NTK, longrope), so cached keys cannot be moved.
    layers: the layers that this is true of, those of full attention; others may rotate otherwise (Gemma 3).
    """

    layout: Layout
    pairs: list[tuple[int, int]]
    plain: list[int]
    inv_freq: Tensor
    head_dim: int
    scaled: bool = False
    layers: tuple[int, ...] = ()

    @property
    def n_chunks(self) -> int:
        return len(self.pairs)

    def units(self, pairing: Pairing) -> Tensor:
        """Dimensions of each unit that a method selects, [n_units, unit_size] int64; -1 fills up a smaller unit.

        `rope`: the true pairs, highest frequency first, then each dimension that does not rotate on its own (paper,
        Figure 9); without RoPE all are (Figure 8). `adjacent`: (2i, 2i + 1) over the whole head, as in the authors'
        code. `single`: every dimension on its own.
        """
        if pairing == "rope" and self.pairs:
            return torch.tensor([*self.pairs, *((dimension, -1) for dimension in self.plain)])
        size = 2 if pairing == "adjacent" else 1
        return torch.arange(self.head_dim).reshape(-1, size)

    def rotate(self, x: Tensor, shift: int | Tensor) -> Tensor:
        """Move rotated keys `shift` positions further: x [..., n, head_dim], shift an int or a tensor [..., n]."""
        if self.scaled:
            raise UserError("cached keys of this model cannot be moved: its RoPE frequencies depend on the length")
        if not self.pairs:
            return x
        first, second = torch.tensor(self.pairs, device=x.device).unbind(-1)
        angle = torch.as_tensor(shift, device=x.device).float()[..., None] * self.inv_freq.to(x.device)
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., first].float(), x[..., second].float()
        moved = x.clone()
        moved[..., first] = (a * cos - b * sin).to(x.dtype)
        moved[..., second] = (a * sin + b * cos).to(x.dtype)
        return moved

    @classmethod
    def of(cls, network: Any) -> Rope:
        """Read the rotation off a transformers model.

        The model's own rotary functions turn basis vectors, which gives the rotation matrix of some positions; the
        keys that each layer of full attention really caches at another position then have to agree with it.
        Raises UserError for a rotation that is not made of pairs, or that is not the same in all these layers.
        """
        layers = tuple(full_layers(network.config))
        if not layers:
            _fail(network, "no layer has full attention")
        before, after = ([keys[i].float() for i in layers] for keys in (_keys(network, None), _keys(network, TURNED)))
        if len({key.shape[-1] for key in before}) != 1:
            _fail(network, "its heads differ in size between layers")
        head_dim, exact = before[0].shape[-1], torch.finfo(network.dtype).eps

        def agrees(rope: Rope) -> bool:
            turn = _rotation(rope, TURNED).T
            tolerance = max(1e-4, 2 * exact)
            return all((b - a @ turn).norm() <= tolerance * a.norm() for a, b in zip(before, after, strict=True))

        still = cls("none", [], list(range(head_dim)), torch.empty(0), head_dim, layers=layers)
        if agrees(still) or not _has_rotary(network):  # learned positions move keys too, but are no rotation
            return still
        # what cannot be called, or is not made of pairs, may belong to other layers: the reason counts if nothing fits
        reasons = ["the keys of some layer do not rotate the way its rotary functions do"]
        for scaled, read in _rotations(network, head_dim):
            try:
                rope = cls._from_matrices(network, read(), scaled)
            except (TypeError, ValueError, AttributeError, IndexError, KeyError, RuntimeError) as error:
                reasons.append(f"its rotary functions cannot be called ({error})")
                continue
            except UserError as error:
                reasons.append(str(error).partition("not understood: ")[2])
                continue
            if agrees(rope):
                return replace(rope, layers=layers)
        _fail(network, reasons[-1])

    @classmethod
    def _from_matrices(cls, network: Any, matrices: Tensor, scaled: bool) -> Rope:
        """matrices: see `_read`."""
        head_dim = matrices.shape[-1]
        connected = (matrices != 0).any(0) & ~torch.eye(head_dim, dtype=torch.bool)
        partners = [row.nonzero().flatten().tolist() for row in connected]
        found: list[tuple[float, tuple[int, int], float]] = []  # angle at position 1, pair, attention scaling
        for i, partner in enumerate(partners):
            if len(partner) > 1 or (partner and partners[partner[0]] != [i]):
                _fail(network, f"dimension {i} of a head rotates with {partner}")
            if partner and i < partner[0]:
                j = partner[0]
                cos, sin = matrices[0, i, i], matrices[0, j, i]
                angle = torch.atan2(sin, cos).item()
                found.append((abs(angle), (i, j) if angle > 0 else (j, i), torch.hypot(sin, cos).item()))
        found.sort(key=lambda item: -item[0])
        pairs = [pair for _, pair, _ in found]
        plain = [i for i, partner in enumerate(partners) if not partner]
        angles = torch.tensor([angle for angle, _, _ in found], dtype=torch.float32)
        rope = cls(_layout(network, pairs), pairs, plain, angles, head_dim, scaled)
        scale = torch.ones(head_dim, dtype=torch.float64)
        for _, pair, factor in found:
            scale[list(pair)] = factor
        for position, matrix in zip(PROBES, matrices, strict=True):
            if not torch.allclose(_rotation(rope, position).double() * scale, matrix, atol=1e-4):
                _fail(network, "its rotary matrices are no rotations by position times frequency")
        return rope


def _layout(network: Any, pairs: list[tuple[int, int]]) -> Layout:
    rotating = sorted(dimension for pair in pairs for dimension in pair)
    n = len(pairs)
    if sorted(pairs) == list(zip(rotating[:n], rotating[n:], strict=True)):
        return "half"
    if sorted(pairs) == list(zip(rotating[::2], rotating[1::2], strict=True)):
        return "interleaved"
    _fail(network, f"its pairs of dimensions are neither halves nor neighbours: {pairs}")


def _rotaries(network: Any) -> list[Any]:
    return [module for name, module in network.named_modules() if name.rpartition(".")[2].startswith("rotary_emb")]


def _has_rotary(network: Any) -> bool:
    return bool(_rotaries(network)) or any("rotary" in name for source in _sources(network) for name in vars(source))


def _sources(network: Any) -> set[ModuleType]:
    """The Python modules that define the attention of the network's layers."""
    found = {type(module) for module in network.modules() if getattr(module, "layer_idx", None) is not None}
    return {sys.modules[kind.__module__] for kind in found if "Attention" in kind.__name__}


def _rotations(network: Any, head_dim: int) -> Iterator[tuple[bool, Callable[[], Tensor]]]:
    """Rotations that the model has: whether their frequencies depend on the length, and what reads them.

    A model has one rotary module `rotary_emb`, or one for each type of layer, or one that is told the type.
    """
    found = {(name, getattr(source, name, None)) for source in _sources(network) for name in APPLY}
    applies = [apply for _, apply in sorted(found, key=lambda item: APPLY.index(item[0])) if apply is not None]
    rotaries = _rotaries(network)
    if not rotaries or not applies:
        _fail(network, f"it has no module `rotary_emb` with one of {', '.join(APPLY)}")
    for rotary, apply, behind in itertools.product(rotaries, applies, (False, True)):
        read = partial(_read, rotary, apply, head_dim, behind)
        kind: Any = getattr(rotary, "rope_type", "default")
        if isinstance(kind, dict):
            for name, its in kind.items():
                yield its not in FIXED, partial(read, layer_type=name)
        else:
            yield kind not in FIXED, read


def _read(
    rotary: Any, apply: Callable[..., tuple[Tensor, Tensor]], head_dim: int, behind: bool, **layer_type: str
) -> Tensor:
    """What rotary position embedding multiplies a key (a column) by at the PROBES, [len(PROBES), d, d] float64.

    behind: whether the dimensions that do not rotate come first (latent attention), and not last.
    """
    device = next((buffer.device for buffer in rotary.buffers()), torch.device("cpu"))
    positions = torch.tensor([PROBES], device=device)
    turning = rotary(torch.zeros(1, len(PROBES), head_dim, device=device), positions, **layer_type)
    turning = turning if isinstance(turning, tuple) else (turning,)  # cosines and sines, or complex numbers
    turned = turning[0].shape[-1] * (2 if turning[0].is_complex() else 1)
    # Some attention classes hand over the whole head, others the part that rotates; the keys decide later.
    for width in (head_dim, turned):
        basis = torch.eye(width, device=device)[None, :, None, :].expand(1, width, len(PROBES), width)
        try:
            rotated = apply(basis, basis, *turning)[1]
        except RuntimeError:  # shapes do not fit
            continue
        matrices = torch.eye(head_dim, dtype=torch.float64).repeat(len(PROBES), 1, 1)
        part = slice(head_dim - width, None) if behind else slice(width)
        matrices[:, part, part] = rotated[0].permute(1, 2, 0).double().cpu()  # [basis, position, out] before
        return matrices
    raise ValueError(f"a rotation of {turned} dimensions fits no part of a head of {head_dim}")


def _rotation(rope: Rope, position: int) -> Tensor:
    """The matrix that turns a key (a column) by `position`, [d, d]."""
    return replace(rope, scaled=False).rotate(torch.eye(rope.head_dim), position).T


def _keys(network: Any, position: int | None) -> list[Tensor]:
    """Keys that every layer caches for some tokens, each alone at `position`, [tokens, kv_heads, 1, d] per layer.

    A lone token attends to itself alone, so what enters a layer does not depend on the position: only keys do.
    """
    device = network.get_input_embeddings().weight.device
    ids = torch.tensor([[3], [5], [7], [11]], device=device)
    where = {} if position is None else {"position_ids": torch.full_like(ids, position)}
    attention = network.config._attn_implementation
    if attention != "eager":  # a method's attention may be installed, which wants its own cache
        network.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            output = network(input_ids=ids, use_cache=True, **where)
    finally:
        if attention != "eager":
            network.set_attn_implementation(attention)
    cache = getattr(output, "cache", None)  # its name in newer transformers 5
    layers = (output.past_key_values if cache is None else cache).layers
    whole = {index: expansion.whole for index, expansion in expansions_of(network).items()}
    return [
        (whole[index](layer.keys, layer.values)[0] if index in whole else layer.keys).cpu()
        for index, layer in enumerate(layers)
    ]
