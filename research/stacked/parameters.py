"""parameters: the parameters of many models of one shape, in one tensor with a row per run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ALIGNED = 64  # numbers: each parameter begins where a GPU reads fast


class StackedParameters:
    """``flat`` has all numbers, (runs, numbers). ``views`` are its parts by name, (runs, *shape), which require gradients.

    ``flat`` is changed in place, and the views see it.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], runs: int, device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        self.shapes = dict(shapes)
        self.starts, size = {}, 0
        for name, shape in self.shapes.items():
            self.starts[name] = size
            size += -(-math.prod(shape) // ALIGNED) * ALIGNED
        self._set(torch.zeros(runs, size, device=device, dtype=dtype))

    def _set(self, flat: Tensor) -> None:
        self.flat = flat
        self.views = {name: self.part(flat, name).detach().requires_grad_() for name in self.shapes}

    def part(self, flat: Tensor, name: str) -> Tensor:
        """A parameter's part of a tensor like ``flat``, (runs, *shape)."""
        start, shape = self.starts[name], self.shapes[name]
        return flat[:, start : start + math.prod(shape)].view(len(flat), *shape)

    @torch.no_grad()
    def fill(self, run: int, values: Mapping[str, Tensor]) -> None:
        """The parameters of one run."""
        for name, value in values.items():
            self.views[name][run].copy_(value)

    def keep(self, runs: Tensor) -> None:
        """Keep only these runs, given by index."""
        self._set(self.flat[runs].clone())

    def gathered(self, gradients: Sequence[Tensor]) -> Tensor:
        """The gradients of the views, in their order, as one tensor like ``flat``."""
        parts = []
        for gradient, shape in zip(gradients, self.shapes.values(), strict=True):
            part = gradient.reshape(len(self.flat), -1)
            parts.append(part)
            if gap := -math.prod(shape) % ALIGNED:
                parts.append(part.new_zeros(len(self.flat), gap))
        return torch.cat(parts, 1)
