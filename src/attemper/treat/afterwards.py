"""Afterwards: whether heads that were clipped came down by the next step that was measured; those that did not are left alone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..watch.examine import named_modules
from .peaks import LayerPeaks
from .table import BY_LAYER, LayerProjections, ProjectionPart, Projections

ROUNDING = 1.01
ENOUGH = math.log(2)
"""How far ln(peak) may lie above what training explains, summed over clips in a row: more than batches differ by."""
UNDONE = 0.25
"""Rows this many times nearer to their values before a clip than to those after it were written back, not trained."""

NO_EFFECT = (
    "it was clipped before, and its largest logit did not fall by more than the training since explains: something writes the "
    "weights back (a copy of them that the optimizer holds: pass optimizer=) or undoes their size. Once that is fixed, call "
    "attemper.projections(model, batch) again"
)

HeadKey = tuple[str, str, int]  # layer, kind, head
RowsKey = tuple[str, int, float]  # parameter, dimension, offset


@dataclass
class ClippedRows:
    """Rows of one parameter, as a clip left them."""

    numbers: Tensor
    values: Tensor  # of a sharded parameter its whole shard
    factor: Tensor  # (rows of the parameter,): what the clip multiplied by

    @classmethod
    def of(cls, parameter: Tensor, dim: int, numbers: Tensor, factor: Tensor) -> ClippedRows:
        return cls(numbers, _taken(parameter, dim, numbers).clone(), factor)

    def moved(self, parameter: Tensor, dim: int, offset: float) -> Tensor:
        """Squared norms of every row, (3, rows): after the clip, of its change since, and of its distance from before it."""
        now, values = (rows.float() for rows in (_taken(parameter, dim, self.numbers), self.values))
        step, after = now - values, values + offset

        def by_row(products: Tensor) -> Tensor:
            others = [other for other in range(products.dim()) if other != dim]
            sums = products.sum(others) if others else products
            gather = getattr(sums, "full_tensor", None)
            whole = sums if gather is None else gather()[self.numbers.to(sums.device)]
            return torch.zeros_like(self.factor).index_copy(0, self.numbers, whole.to("cpu", self.factor.dtype))

        size, change, along = by_row(after * after), by_row(step * step), by_row(step * after)
        back = 1 / self.factor - 1
        return torch.stack([size, change, (change - 2 * back * along + back**2 * size).clamp(min=0)])


def _taken(parameter: Tensor, dim: int, numbers: Tensor) -> Tensor:
    held = parameter.detach()
    if hasattr(held, "device_mesh"):
        return held
    return (held if held.dim() else held.view(1)).index_select(dim, numbers.to(held.device))


class Expected(NamedTuple):
    """What a clip should do to a head."""

    peak: float
    fall: float  # the logarithm of the factor, as a positive number


@dataclass
class Afterwards:
    """What the last clip of a model did, until the next measured step shows whether it worked."""

    known: Projections
    step: int = -1
    peaks: dict[HeadKey, float] = field(default_factory=dict)
    expected: dict[HeadKey, Expected] = field(default_factory=dict)
    rows: dict[RowsKey, ClippedRows] = field(default_factory=dict)
    unexplained: dict[HeadKey, float] = field(default_factory=dict)
    failed: set[HeadKey] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, known: Projections) -> Afterwards:
        """The state of a model; a new one if its projections are new."""
        inner = innermost(model)
        afterwards = _kept.get(inner)
        if afterwards is None or afterwards.known is not known:
            afterwards = _kept[inner] = cls(known)
        return afterwards

    def judge(self, step: int, layers: list[LayerPeaks], tau: float, parameters: Mapping[str, Tensor]) -> None:
        """Which of the heads that were clipped did not come down."""
        if step <= self.step:
            return  # the same step again, or another run
        now = _peaks(layers)
        free = [head for head in now.keys() & self.peaks.keys() if head not in self.expected]
        then, largest = (max((each[head] for head in free), default=0.0) for each in (self.peaks, now))
        batch = max(1.0, largest / then) if 0 < then < math.inf and largest < math.inf else 1.0
        moved: dict[RowsKey, Tensor] = {}
        for head, (peak, fall) in self.expected.items():
            projections = self.known.get(head[:2])
            reached = now.get(head, 0.0)
            rest = 0.0
            if projections is not None and tau < reached < math.inf and math.log(reached / peak) > fall / 2:
                explained = ROUNDING * batch * self._growth(projections, head[2], parameters, moved)
                rest = max(0.0, math.log(reached / peak) - math.log(explained))
                # a clip without effect adds exactly its own fall; much more than that has another cause
                rest = min(rest, fall) if rest < fall + ENOUGH else 0.0
            self.unexplained[head] = self.unexplained.get(head, 0.0) + rest if rest else 0.0
            if self.unexplained[head] >= ENOUGH:
                self.failed |= {head}
        self.settle()

    def settle(self) -> None:
        """Free the copies of clipped rows."""
        self.expected, self.rows = {}, {}

    def note(
        self,
        step: int,
        layers: list[LayerPeaks],
        expected: Mapping[HeadKey, Expected],
        factors: Mapping[RowsKey, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        """Remember a clip, and the rows of the clipped heads as it left them."""
        self.step, self.peaks, self.expected = step, _peaks(layers), dict(expected)
        self.unexplained = {head: rest for head, rest in self.unexplained.items() if head in expected}
        chosen: dict[RowsKey, Tensor] = {}
        for layer, kind, head in expected:
            projections = self.known[layer, kind]
            for part in projections.parts:
                place = (part.parameter, part.dim, part.offset)
                if place in factors:
                    mine = _mine(projections, part, head)
                    chosen[place] = chosen[place] | mine if place in chosen else mine
        self.rows = {
            place: ClippedRows.of(parameters[place[0]], place[1], mine.nonzero().flatten(), factors[place])
            for place, mine in chosen.items()
        }

    def _growth(
        self,
        projections: LayerProjections,
        head: int,
        parameters: Mapping[str, Tensor],
        moved: dict[RowsKey, Tensor],
    ) -> float:
        """The most by which training since the clip can have raised a head's logits: if every change points along one token."""
        sides: dict[str, list[tuple[float, Tensor]]] = {}
        for part in projections.parts:
            place = (part.parameter, part.dim, part.offset)
            if place not in self.rows:
                continue
            parameter, rows = parameters[part.parameter], self.rows[place]
            if place not in moved:
                moved[place] = rows.moved(parameter, part.dim, part.offset)
            squares = (moved[place] * _mine(projections, part, head)).sum(-1)
            sides.setdefault(part.side, []).append((parameter.numel() / rows.factor.numel(), squares))
        matrices = torch.stack(
            [squares for parts in sides.values() for width, squares in parts if width > 1]
            or [torch.zeros(3, dtype=torch.float64, device="cpu")]
        )
        _, change, back = matrices.double().sum(0).tolist()
        measured_from = 2 if back <= UNDONE**2 * change else 1  # before the clip, or after it
        growths = []
        for parts in sides.values():
            size = math.sqrt(sum(float(squares[0]) for _, squares in parts))
            steps = sum(math.sqrt(width * float(squares[measured_from])) for width, squares in parts)
            growths.append(1 + steps / size if size else math.inf)
        return growths[0] ** 2 if len(growths) == 1 else math.prod(growths)


_kept: weakref.WeakKeyDictionary[nn.Module, Afterwards] = weakref.WeakKeyDictionary()


def innermost(model: nn.Module) -> nn.Module:
    """The model that wrappers hold."""
    return [module for module, name in named_modules(model).items() if not name][-1]


def settled(model: nn.Module) -> None:
    """No head is above its limit any more: free the copies."""
    afterwards = _kept.get(innermost(model)) if _kept else None
    if afterwards is not None:
        afterwards.settle()
        afterwards.unexplained = {}


def _peaks(layers: Iterable[LayerPeaks]) -> dict[HeadKey, float]:
    return {
        (layer.layer, layer.kind, head): score
        for layer in layers
        for head, score in zip(layer.heads, layer.scores.tolist(), strict=True)
    }


def _mine(projections: LayerProjections, part: ProjectionPart, head: int) -> Tensor:
    """The rows of a part that make a head."""
    if projections.how == BY_LAYER:
        return part.owner >= 0
    return part.owner == (head * projections.key_heads // projections.heads if part.side == "k" else head)
