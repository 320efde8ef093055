"""Derivatives: which rows of which parameters a head is made of, and whether scaling them scales the head.

Two questions, each answered by autograd on a tensor ``(B, H, L, E)``, the q or k of one attention call:

- :func:`owners`: which head does a row of a parameter serve? A cotangent that is zero for some heads gives a gradient of
  exactly zero to the rows that serve other heads, in any dtype. So the bits of a head's number are read with two backward
  passes each.
- :class:`Directional`: by how much does the tensor change if rows are scaled? The derivative of a head along the rows' own
  values is the head itself if and only if the head has degree 1 in them (Euler's theorem), channel by channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

NOBODY, SEVERAL = -1, -2
"""In place of a head's number: the row is not used; more than one head uses it."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far a degree may be from 1, relative to the head: several times the rounding of a projection, below any other degree."""
HALF = 0.05

Used = tuple[Tensor, ...]
"""For each dimension of a parameter, which of its rows along that dimension are used."""


def tolerance(tensor: Tensor) -> float:
    return TOLERANCE.get(tensor.dtype, HALF)


def used(output: Tensor, parameters: Sequence[Tensor], where: Tensor | None = None) -> list[Used | None]:
    """Which rows of each parameter ``output`` depends on, where ``where`` is True; None for a parameter that it does not."""
    generator = torch.Generator("cpu").manual_seed(1)  # the run's own generator is not touched
    used_rows: list[Used | None] = [None] * len(parameters)
    times = 3 if output.element_size() < 4 else 1  # in half precision a sum may be exactly 0 by chance
    for _ in range(times if parameters else 0):
        cotangent = torch.rand(output.shape, generator=generator, dtype=torch.float32, device="cpu") + 0.5
        cotangent = cotangent.to(output.device, output.dtype)
        if where is not None:
            cotangent = cotangent * where
        gradients = torch.autograd.grad(output, parameters, cotangent, retain_graph=True, allow_unused=True)
        used_rows = [
            _either(rows, None if new is None else _rows(new)) for rows, new in zip(used_rows, gradients, strict=True)
        ]
    return used_rows


def _either(first_rows: Used | None, other: Used | None) -> Used | None:
    if first_rows is None or other is None:
        return other if first_rows is None else first_rows
    return tuple(first | second for first, second in zip(first_rows, other, strict=True))


def _rows(gradient: Tensor) -> Used | None:
    nonzero = gradient != 0
    if not bool(nonzero.any()):
        return None
    if nonzero.dim() == 0:
        return (nonzero.reshape(1),)
    every = range(nonzero.dim())
    return tuple(nonzero.amax([d for d in every if d != dim]) if nonzero.dim() > 1 else nonzero for dim in every)


def owners(output: Tensor, parameters: Sequence[Tensor]) -> list[Used | None]:
    """For each parameter and dimension, the head that each row serves, or NOBODY or SEVERAL."""
    heads = output.shape[1]
    numbers = torch.arange(heads, device=output.device).view(1, heads, 1, 1)
    owner: list[list[Tensor] | None] = [None] * len(parameters)
    for bit in range(max(1, (heads - 1).bit_length())):
        digits = (numbers >> bit) & 1
        sides = [used(output, parameters, digits == side) if heads > side else None for side in (0, 1)]
        for index in range(len(parameters)):
            zero, one = (None if side is None else side[index] for side in sides)
            if zero is None and one is None:
                continue
            owner[index] = _with_bit(owner[index], zero, one, bit)
    return [None if part is None else tuple(part) for part in owner]


def _with_bit(before: list[Tensor] | None, zero: Used | None, one: Used | None, bit: int) -> list[Tensor]:
    """The owners with one more bit of their numbers."""
    shown = zero or one
    assert shown is not None
    both = []
    for dim, rows in enumerate(shown):
        none = torch.zeros_like(rows)
        low, high = none if zero is None else zero[dim], none if one is None else one[dim]
        owner = torch.full_like(rows, NOBODY, dtype=torch.int64)
        if before is not None:
            owner = before[dim]
        known = owner.clamp(min=0) + (high.long() << bit)
        owner = torch.where((owner != SEVERAL) & (low | high), known, owner)
        both.append(owner.masked_fill(low & high, SEVERAL))
    return both


class Directional:
    """Derivatives of a tensor along directions in its parameters, by differentiating its vector-Jacobian product again."""

    def __init__(self, output: Tensor, parameters: Sequence[Tensor]) -> None:
        self.like = torch.zeros_like(output).requires_grad_()
        self.products = torch.autograd.grad(
            output, parameters, self.like, create_graph=True, retain_graph=True, allow_unused=True
        )

    def __call__(self, index: int, direction: Tensor) -> Tensor:
        """The derivative along ``direction`` in the parameter with this index."""
        return self.together({index: direction})

    def together(self, directions: Mapping[int, Tensor]) -> Tensor:
        """The derivative along directions in several parameters at once, by their indices."""
        products = {index: self.products[index] for index in directions}
        known = {index: product for index, product in products.items() if product is not None and product.requires_grad}
        if not known:
            return torch.zeros_like(self.like)
        along = [directions[index] for index in known]
        (derivative,) = torch.autograd.grad(
            list(known.values()), self.like, along, retain_graph=True, allow_unused=True
        )
        return torch.zeros_like(self.like) if derivative is None else derivative


def share(part: Tensor, whole: Tensor) -> Tensor:
    """The size of a part relative to the whole, for each head ``(H,)``."""
    size = whole.double().square().sum((0, 2, 3))
    return (part.double().square().sum((0, 2, 3)) / size.masked_fill(size == 0, 1.0)).sqrt()


def share_by_channel(part: Tensor, whole: Tensor) -> Tensor:
    """The size of a part relative to the whole, by head and channel ``(H, E)``. A channel near 0 is compared with its head."""
    size = whole.double().square().sum((0, 2))
    floor = size.mean(-1, keepdim=True) * (1e-12 if whole.element_size() >= 4 else 1e-2)
    return (part.double().square().sum((0, 2)) / size.clamp(min=floor.clamp(min=1e-300))).sqrt()
