"""Alter: count the ops that make scores in one run, and replace their scale in the next.

An op is identified by its place: the module it runs in, and its number among the products and attention ops there. What was found
at each place is kept, so that a second run on the same inputs can be compared with the first. The model is not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from .._torch_private import OpOverload
from .attach.attachment import Attachment
from .attach.dispatch import Mode
from .attach.running import OpPlace, running
from .routes.handwritten.op_names import PRODUCTS, op_name

BIASED = ("baddbmm", "addmm")  # they also add a bias, which is not a score: the ratio goes to their alpha


@dataclass(frozen=True)
class Op:
    """What was found at a place: the op, and the shapes of its two factors."""

    func: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, func: Any, factors: tuple[Tensor, ...]) -> Op:
        # a nested tensor has no shape
        return cls(func, tuple(() if factor.is_nested else tuple(factor.shape) for factor in factors))

    @property
    def can_be_altered(self) -> bool:
        """Whether its scale can be replaced: a product's output can be multiplied; an attention op must have a scale argument."""
        return op_name(self.func) in PRODUCTS or scale_argument(self.func) is not None


@dataclass
class Alteration:
    """One run: by what ratio ops are altered, and which op was found at each place."""

    ratios: Mapping[OpPlace, float] = field(default_factory=dict)
    found: dict[OpPlace, Op] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)

    def next_op(self, module: int, op: Op) -> tuple[OpPlace, float]:
        """The place of the next op in a module, and the ratio of its scores."""
        place = (module, self.counts[module])
        self.counts[module] += 1
        self.found[place] = op
        return place, self.ratios.get(place, 1.0)


class Altering(Mode):
    """The watch's mode, which also counts ops and alters their scale before they are measured."""

    def __init__(self, attachment: Attachment, alteration: Alteration) -> None:
        super().__init__(attachment)
        self.alteration = alteration

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        current = running.current
        name = op_name(func) if isinstance(func, OpOverload) else ""
        reads = func in self.readers
        if current is None or not running.frames or not (reads or name in PRODUCTS):
            return super().__torch_dispatch__(func, types, args, kwargs)
        factors = args[:2] if reads else tuple(args[place] for place in PRODUCTS[name])
        place, ratio = self.alteration.next_op(id(running.frames[-1].module), Op.of(func, factors))
        kwargs = dict(kwargs or {})
        after = 1.0
        if ratio != 1 and reads:
            args, kwargs = scaled(func, args, kwargs, ratio)
        elif ratio != 1 and name in BIASED:
            kwargs["alpha"] = kwargs.get("alpha", 1) * ratio
        elif ratio != 1:
            after = ratio
        current.place, current.ratio = place, after
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            current.place, current.ratio = None, 1.0
        return out if after == 1 else out.mul_(after)


@cache
def scale_argument(func: Any) -> int | None:
    """The place of an op's scale among its arguments; None if it has none."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("scale") if "scale" in names else None


def scaled(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], ratio: float
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an attention op on (query, key, …), with its scale multiplied."""
    place = scale_argument(func)
    assert place is not None
    scale = args[place] if place < len(args) else kwargs.get("scale")
    scale = ratio * (args[0].shape[-1] ** -0.5 if scale is None else scale)
    if place < len(args):
        return (*args[:place], scale, *args[place + 1 :]), kwargs
    return args, {**kwargs, "scale": scale}


@contextmanager
def altered(alteration: Alteration) -> Iterator[None]:
    """Inside, the ops of this thread's watched models are counted, and altered by the ratios of the alteration."""
    before = running.mode
    running.mode = lambda attachment: Altering(attachment, alteration)
    try:
        yield
    finally:
        running.mode = before
