"""Projections: which rows of which parameters make the q and k of each head, as a table that can be printed and read."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import InputError, checked_options
from ..watch.examine import named_modules
from .derivatives import NOBODY
from .write import check_there

PER_HEAD, BY_LAYER = "per head", "by layer"
SIDES = {"q": "q", "k": "k", "both": "q and k", "gain": "gain"}
TAKES = {
    "q": "keys are left alone: q takes the whole factor",
    "k": "q is left alone: keys take the whole factor",
    "both": "they take the square root of the factor",
    "gain": "keys are left alone: q takes the whole factor",
}


class HeadPart(NamedTuple):
    """The rows of one parameter that belong to one head."""

    parameter: str
    dim: int
    rows: tuple[int, ...]
    side: str  # "q", "k", "both" or "gain"


@dataclass(frozen=True)
class ProjectionPart:
    """The rows of one parameter that make q or k of a layer's heads."""

    parameter: str  # its name in the model, without the wrappers of torch.compile and distributed training
    dim: int  # the dimension whose rows belong to heads
    side: str  # "q"; "k"; "both": it makes q and k of a head; "gain": it multiplies the scores of a head
    owner: Tensor  # (rows,): the query head of q and gain, the key head of k; -1: none of them
    whole: Tensor  # (rows,): rows of q whose keys other heads or layers use too: they take the whole factor
    offset: float = 0.0  # 1.0 for a gain that is applied as 1 + w


@dataclass(frozen=True)
class LayerProjections:
    """One layer's attention: what its q and k are made of, or why that is not known."""

    layer: str
    kind: str
    heads: int
    key_heads: int
    parts: tuple[ProjectionPart, ...] = ()
    how: str | None = None  # "per head"; "by layer": one gain serves all heads; None: nothing can be scaled
    why: str | None = None  # why nothing can be scaled, or only the layer
    biased: bool = False  # whether a bias is added to its scores (T5, ALiBi)

    @property
    def splits(self) -> bool:
        """Whether the factor is split between q and k."""
        return {part.side for part in self.parts} >= {"q", "k"}

    def of_head(self, head: int) -> list[HeadPart]:
        """The rows of one query head; of k, those of its key head."""
        parts = []
        for part in self.parts:
            owner = head * self.key_heads // self.heads if part.side == "k" else head
            rows = (part.owner == (0 if self.how == BY_LAYER else owner)).nonzero().flatten().tolist()
            if rows:
                parts.append(HeadPart(part.parameter, part.dim, tuple(rows), part.side))
        return parts

    def __str__(self) -> str:
        if self.how is None:
            return f"nothing: {self.why}"
        sides = []
        for side, word in SIDES.items():
            names = [_shown(part, self.layer) for part in self.parts if part.side == side]
            if names:
                sides.append(f"{word} from {' and '.join(names)}")
        notes = [] if self.why is None else [self.why]
        alone = {part.side for part in self.parts}
        if self.how == PER_HEAD and len(alone) == 1:
            notes.append(TAKES[alone.pop()])
        elif self.how == PER_HEAD and any(bool(part.whole.any()) for part in self.parts):
            notes.append("some channels of k are shared: q takes the whole factor there")
        notes += ["its logits have a bias" for _ in range(self.biased)]
        return f"{self.how}: {', '.join(sides)}{''.join(f'; {note}' for note in notes)}"


def _shown(part: ProjectionPart, layer: str) -> str:
    name = part.parameter.removeprefix(f"{layer}.") if layer else part.parameter
    first = (part.owner == part.owner[part.owner != NOBODY].min()).nonzero().flatten().tolist()
    word = "rows" if part.dim == 0 else "columns" if part.dim == 1 else f"dimension {part.dim}"
    return f"{'1 + ' if part.offset else ''}{name} ({word} {_ranges(first)}, …)"


def _ranges(rows: list[int]) -> str:
    """0, 1, 2, 8, 9 → 0–2, 8–9; the first three of them."""
    ranges: list[list[int]] = []
    for row in rows:
        if ranges and row == ranges[-1][1] + 1:
            ranges[-1][1] = row
        else:
            ranges.append([row, row])
    shown = [str(low) if low == high else f"{low}–{high}" for low, high in ranges[:3]]
    return ", ".join(shown) + (" and others" if len(ranges) > 3 else "")


class Projections(Mapping[tuple[str, str], LayerProjections]):
    """What makes the q and k of each layer's heads: a mapping from (layer, kind) to :class:`LayerProjections`.

    Made by :func:`attemper.projections`, or by :meth:`named` where that finds nothing. ``print(projections)`` shows a line per
    layer; ``projections["layers.0.self_attn", "self"].of_head(3)`` has the rows of a head.
    """

    def __init__(self, layers: Mapping[tuple[str, str], LayerProjections]) -> None:
        self._layers = dict(layers)

    def __getitem__(self, place: tuple[str, str]) -> LayerProjections:
        return self._layers[place]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def __str__(self) -> str:
        lines = []
        for layer in self._layers.values():
            heads = f"{layer.heads} heads" + (f", {layer.key_heads} for keys" if layer.key_heads != layer.heads else "")
            cross = " (cross)" if layer.kind == "cross" else ""
            lines.append(f"{layer.layer or 'the model'}{cross}: {heads}; {layer}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        located = sum(layer.how is not None for layer in self._layers.values())
        return f"Projections(layers: {len(self)}, found: {located})"

    @classmethod
    @checked_options
    def named(
        cls,
        model: nn.Module,
        *,
        heads: int,
        q: str,
        k: str | None = None,
        key_heads: int | None = None,
        dim: int = 0,
        kind: str = "self",
    ) -> Projections:
        """Projections by the names of parameters, for attention that :func:`attemper.projections` cannot differentiate.

        The rows of each parameter are divided equally among the heads, in order. The layer is the module around the projection:
        ``layers.0.attn`` for ``layers.0.attn.q_proj.weight``. Nothing is checked by a derivative.

        Args:
            model: the model.
            heads: how many query heads.
            q: the parameters that make q, with ``*`` and ``?`` as in file names: ``"*.q_proj.*"`` for weights and biases.
            k: those that make k; None leaves keys alone, and q takes the whole factor.
            key_heads: how many key heads; as many as ``heads`` when left out.
            dim: the dimension whose rows belong to heads: 0 for ``nn.Linear``, 1 for GPT-2's Conv1D.
            kind: ``"self"`` or ``"cross"``.

        Example:
            >>> model = torch.nn.Sequential()
            >>> model.q_proj, model.k_proj = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            >>> print(attemper.Projections.named(model, heads=2, q="q_proj.weight"))
            the model: 2 heads; per head: q from q_proj.weight (rows 0–3, …); keys are left alone: q takes the whole factor
        """
        key_heads = heads if key_heads is None else key_heads
        parameters = parameters_of(model)
        layers: dict[str, list[ProjectionPart]] = {}
        for side, pattern, count in (("q", q, heads), ("k", k, key_heads)):
            names = [] if pattern is None else fnmatch.filter(parameters, pattern)
            if pattern is not None and not names:
                raise InputError(
                    f"Projections.named(): `{side}` matches no parameter; got {pattern!r}. "
                    "Names are those of model.named_parameters()."
                )
            for name in names:
                check_there("Projections.named()", name, parameters[name])
                along = min(dim, parameters[name].dim() - 1)
                rows = parameters[name].shape[along]
                if not count or rows % count:
                    raise InputError(
                        f"Projections.named(): {name} has {rows} rows along dimension {along}, which {count} heads do not "
                        "divide. Pass the number of its heads, or dim=."
                    )
                owner = torch.arange(rows, device="cpu") // (rows // count)
                whole = torch.full((rows,), k is None, device="cpu")
                layer = name.rpartition(".")[0].rpartition(".")[0]
                layers.setdefault(layer, []).append(ProjectionPart(name, along, side, owner, whole))
        return cls(
            {
                (layer, kind): LayerProjections(layer, kind, heads, key_heads, tuple(parts), PER_HEAD)
                for layer, parts in layers.items()
            }
        )


def check_model(caller: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{caller}(): `model` must be a torch.nn.Module; got {type(model).__name__}. Pass the model that you call."
        )


def check_projections(caller: str, projections: object) -> None:
    if not isinstance(projections, Projections):
        raise InputError(
            f"{caller}(): `projections` must be what attemper.projections() returned; got {type(projections).__name__}. Call "
            "attemper.projections(model, batch), and pass its result."
        )


def check_number(caller: str, name: str, value: object, rule: str, holds: Callable[[float], bool], advice: str) -> None:
    """Refuse what is not a number, NaN, and a number for which the rule does not hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
        raise InputError(f"{caller}(): `{name}` must be {rule}; got {value!r}. {advice}.")


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, without the names of wrappers; a shared one has its first name."""
    return {
        f"{name}.{word}" if name else word: parameter
        for module, name in named_modules(model).items()
        for word, parameter in module._parameters.items()
        if parameter is not None
    }


def factors_of(
    projections: LayerProjections, gamma: Tensor, alpha: float, shared: str
) -> Iterator[tuple[str, int, float, Tensor]]:
    """The rows to multiply so that head h is scaled by ``gamma[h]``: parameter, dimension, offset, and a factor for each row."""
    grouped = projections.key_heads != projections.heads
    by_key = gamma.view(projections.key_heads, -1).amin(-1)
    if grouped and shared == "group" and projections.splits:
        gamma = by_key.repeat_interleave(projections.heads // projections.key_heads)
    elif grouped:
        by_key = torch.ones_like(by_key)
    splits = projections.splits and (not grouped or shared == "group")
    for part in projections.parts:
        mine = part.owner >= 0
        row = part.owner.clamp(min=0)
        if part.side == "both":
            factor = gamma[row].sqrt()
        elif part.side == "k":
            factor = by_key[row] ** (1 - alpha if splits else float(not projections.splits))
        else:
            each = gamma[row]
            factor = torch.where(part.whole, each, each**alpha) if splits else each
        yield part.parameter, part.dim, part.offset, torch.where(mine, factor, torch.ones_like(factor))
