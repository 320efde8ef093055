"""Alter: the ops that make scores, counted in one run and made with another scale in the next.

An op is known by its place: the module it runs in, and which of the products and attention ops in there it is. A second run
on the same inputs finds the same op at the same place, or it is said that it did not. Nothing of the model is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from ..kernels.seam import Problem
from . import own
from .attach import Attachment, Mode
from .fused import ENCODER, MHA
from .opnames import PRODUCTS, op_name
from .running import Place, running

BIASED = ("baddbmm", "addmm")  # what they add is no score: the ratio goes to their alpha
SCALE = Problem._fields.index("scale")  # in the arguments of attemper's own op
UNSCALED = (ENCODER, MHA)  # they take no scale


@dataclass(frozen=True)
class Op:
    """What was found at a place: the op, and the shapes of the two factors it was given."""

    func: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, func: Any, factors: tuple[Tensor, ...]) -> Op:
        return cls(func, tuple(tuple(factor.shape) for factor in factors))

    @property
    def can_be_altered(self) -> bool:
        return op_name(self.func) not in UNSCALED


@dataclass
class Alteration:
    """One run: which ops are to be altered, by what ratio, and which op was found at each place."""

    ratios: Mapping[Place, float] = field(default_factory=dict)
    found: dict[Place, Op] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)

    def meet(self, module: int, op: Op) -> tuple[Place, float]:
        """The place of the op that comes next in a module, and what its scores are to be multiplied by."""
        place = (module, self.counts[module])
        self.counts[module] += 1
        self.found[place] = op
        return place, self.ratios.get(place, 1.0)


class Altering(Mode):
    """The watch's mode, which also counts ops and alters those that it is told to, before they are looked at."""

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
        place, ratio = self.alteration.meet(id(running.frames[-1].module), Op.of(func, factors))
        kwargs = dict(kwargs or {})
        after = 1.0
        if ratio != 1 and func is own.FORWARD:
            args = (*args[:SCALE], ratio * args[SCALE], *args[SCALE + 1 :])
        elif ratio != 1 and reads:
            scale = kwargs.get("scale")
            kwargs["scale"] = ratio * (factors[0].shape[-1] ** -0.5 if scale is None else scale)
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


@contextmanager
def altered(alteration: Alteration) -> Iterator[None]:
    """What this thread's watched models compute in here is counted, and altered where the alteration says so."""
    before = running.mode
    running.mode = lambda attachment: Altering(attachment, alteration)
    try:
        yield
    finally:
        running.mode = before
