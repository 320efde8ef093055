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
"""How much of the logarithm of a head's peak must be unexplained, over clips in a row: more than batches differ by."""
UNDONE = 0.25
"""Rows that are so much nearer to what they were before a clip than to what it left were written back, not trained."""

NO_EFFECT = (
    "it was clipped before, and its largest logit did not fall by more than the training since explains: something writes the "
    "weights back (a copy of them that the optimizer holds: pass optimizer=) or undoes their size. Once that is mended, call "
    "attemper.projections(model, batch) again"
)

HeadOfLayer = tuple[str, str, int]  # layer, kind, head
PlaceOfRows = tuple[str, int, float]  # parameter, dimension, offset


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
        """For every row of the parameter, squares: its size after the clip, its way since, and its way from before the clip."""
        now, values = (one.float() for one in (_taken(parameter, dim, self.numbers), self.values))
        way, after = now - values, values + offset

        def by_row(products: Tensor) -> Tensor:
            others = [other for other in range(products.dim()) if other != dim]
            sums = products.sum(others) if others else products
            gather = getattr(sums, "full_tensor", None)
            whole = sums if gather is None else gather()[self.numbers.to(sums.device)]
            return torch.zeros_like(self.factor).index_copy(0, self.numbers, whole.to("cpu", self.factor.dtype))

        size, change, along = by_row(after * after), by_row(way * way), by_row(way * after)
        back = 1 / self.factor - 1
        return torch.stack([size, change, (change - 2 * back * along + back**2 * size).clamp(min=0)])


def _taken(parameter: Tensor, dim: int, numbers: Tensor) -> Tensor:
    held = parameter.detach()
    if hasattr(held, "device_mesh"):
        return held
    return (held if held.dim() else held.view(1)).index_select(dim, numbers.to(held.device))


class Expected(NamedTuple):
    """What a clip was to make of a head."""

    peak: float
    fall: float  # the logarithm of the factor, as a positive number


@dataclass
class Afterwards:
    """What the last clip of a model did, until the next measured step shows whether it had its effect."""

    known: Projections
    step: int = -1
    peaks: dict[HeadOfLayer, float] = field(default_factory=dict)
    expected: dict[HeadOfLayer, Expected] = field(default_factory=dict)
    rows: dict[PlaceOfRows, ClippedRows] = field(default_factory=dict)
    unexplained: dict[HeadOfLayer, float] = field(default_factory=dict)
    failed: set[HeadOfLayer] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module, known: Projections) -> Afterwards:
        """That of a model; projections that are found anew begin anew."""
        inner = innermost(model)
        kept = _kept.get(inner)
        if kept is None or kept.known is not known:
            kept = _kept[inner] = cls(known)
        return kept

    def judge(self, step: int, layers: list[LayerPeaks], tau: float, parameters: Mapping[str, Tensor]) -> None:
        """Which of the heads that were clipped did not come down."""
        if step <= self.step:
            return  # the same step once more, or another run
        now = _peaks(layers)
        free = [head for head in now.keys() & self.peaks.keys() if head not in self.expected]
        then, largest = (max((each[head] for head in free), default=0.0) for each in (self.peaks, now))
        batch = max(1.0, largest / then) if 0 < then < math.inf and largest < math.inf else 1.0
        moved: dict[PlaceOfRows, Tensor] = {}
        for head, (peak, fall) in self.expected.items():
            found = self.known.get(head[:2])
            reached = now.get(head, 0.0)
            rest = 0.0
            if found is not None and tau < reached < math.inf and math.log(reached / peak) > fall / 2:
                explained = ROUNDING * batch * self._growth(found, head[2], parameters, moved)
                rest = max(0.0, math.log(reached / peak) - math.log(explained))
                # a clip without effect adds its own fall; what is far above that has another cause
                rest = min(rest, fall) if rest < fall + ENOUGH else 0.0
            self.unexplained[head] = self.unexplained.get(head, 0.0) + rest if rest else 0.0
            if self.unexplained[head] >= ENOUGH:
                self.failed |= {head}
        self.settle()

    def settle(self) -> None:
        """Let the copies go."""
        self.expected, self.rows = {}, {}

    def note(
        self,
        step: int,
        layers: list[LayerPeaks],
        expected: Mapping[HeadOfLayer, Expected],
        factors: Mapping[PlaceOfRows, Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        """Remember a clip, and the rows of the clipped heads as it left them."""
        self.step, self.peaks, self.expected = step, _peaks(layers), dict(expected)
        self.unexplained = {head: rest for head, rest in self.unexplained.items() if head in expected}
        chosen: dict[PlaceOfRows, Tensor] = {}
        for layer, kind, head in expected:
            found = self.known[layer, kind]
            for part in found.parts:
                place = (part.parameter, part.dim, part.offset)
                if place in factors:
                    mine = _mine(found, part, head)
                    chosen[place] = chosen[place] | mine if place in chosen else mine
        self.rows = {
            place: ClippedRows.of(parameters[place[0]], place[1], mine.nonzero().flatten(), factors[place])
            for place, mine in chosen.items()
        }

    def _growth(
        self, found: LayerProjections, head: int, parameters: Mapping[str, Tensor], moved: dict[PlaceOfRows, Tensor]
    ) -> float:
        """The most that training since the clip may have raised a head's logits by, if all of it meets one token's direction."""
        sides: dict[str, list[tuple[float, Tensor]]] = {}
        for part in found.parts:
            place = (part.parameter, part.dim, part.offset)
            if place not in self.rows:
                continue
            parameter, rows = parameters[part.parameter], self.rows[place]
            if place not in moved:
                moved[place] = rows.moved(parameter, part.dim, part.offset)
            squares = (moved[place] * _mine(found, part, head)).sum(-1)
            sides.setdefault(part.side, []).append((parameter.numel() / rows.factor.numel(), squares))
        matrices = torch.stack(
            [squares for parts in sides.values() for width, squares in parts if width > 1]
            or [torch.zeros(3, dtype=torch.float64, device="cpu")]
        )
        _, change, back = matrices.double().sum(0).tolist()
        way = 2 if back <= UNDONE**2 * change else 1
        growths = []
        for parts in sides.values():
            size = math.sqrt(sum(float(squares[0]) for _, squares in parts))
            steps = sum(math.sqrt(width * float(squares[way])) for width, squares in parts)
            growths.append(1 + steps / size if size else math.inf)
        return growths[0] ** 2 if len(growths) == 1 else math.prod(growths)


_kept: weakref.WeakKeyDictionary[nn.Module, Afterwards] = weakref.WeakKeyDictionary()


def innermost(model: nn.Module) -> nn.Module:
    """The model that wrappers hold."""
    return [module for module, name in named_modules(model).items() if not name][-1]


def settled(model: nn.Module) -> None:
    """No head is above its limit any more: let the copies go."""
    kept = _kept.get(innermost(model)) if _kept else None
    if kept is not None:
        kept.settle()
        kept.unexplained = {}


def _peaks(layers: Iterable[LayerPeaks]) -> dict[HeadOfLayer, float]:
    return {
        (layer.layer, layer.kind, head): score
        for layer in layers
        for head, score in zip(layer.heads, layer.scores.tolist(), strict=True)
    }


def _mine(found: LayerProjections, part: ProjectionPart, head: int) -> Tensor:
    """The rows of a part that make a head."""
    if found.how == BY_LAYER:
        return part.owner >= 0
    return part.owner == (head * found.key_heads // found.heads if part.side == "k" else head)
