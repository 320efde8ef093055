"""adam: AdamW for stacked parameters. Every run has its own rates, and its gradient is clipped by its own norm.

Nothing is read back from the device, so that a step can be recorded and replayed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .parameters import StackedParameters

EPS = 1e-8  # as in torch.optim.Adam
SMALL = 1e-6  # what torch.nn.utils.clip_grad_norm_ adds to a norm


class StackedAdam:
    """``rates`` is (runs, steps): the rate of each run at each step; the last one stays. ``clip`` is the largest norm of a
    run's gradient.

    ``decay``, (runs, steps), is the part of a number that is taken off at a step, independent of the rate; ``decayed`` is 1 for
    the numbers it applies to, and 0 for others. After an update ``norm`` and ``moved`` have, for each run, the norm of its
    gradient before clipping and that of the update.
    """

    def __init__(
        self,
        parameters: StackedParameters,
        rates: Tensor,
        betas: tuple[float, float] = (0.9, 0.999),
        clip: float | None = None,
        decay: Tensor | None = None,
        decayed: Tensor | None = None,
    ) -> None:
        flat = parameters.flat
        self.parameters, self.rates, self.betas, self.clip = parameters, rates, betas, clip
        self.decay, self.decayed = decay, decayed
        self.first, self.second = torch.zeros_like(flat), torch.zeros_like(flat)
        self.step = torch.zeros(1, dtype=torch.int64, device=flat.device)
        self.norm, self.moved = flat.new_zeros(len(flat)), flat.new_zeros(len(flat))

    @torch.no_grad()
    def update(self, gradient: Tensor, adjust: Callable[[Tensor], None] | None = None) -> None:
        """One step; ``gradient`` is like the flat parameters. ``adjust`` may change the update in place before it is applied."""
        self.norm.copy_(torch.linalg.vector_norm(gradient, dim=1))
        if self.clip is not None:
            gradient = gradient * (self.clip / (self.norm + SMALL)).clamp(max=1.0)[:, None]
        one, two = self.betas
        flat, now = self.parameters.flat, self.step.clamp(max=self.rates.shape[1] - 1)
        rate = self.rates.index_select(1, now)
        self.step += 1
        count = self.step.to(flat.dtype)
        self.first.lerp_(gradient, 1 - one)
        self.second.mul_(two).addcmul_(gradient, gradient, value=1 - two)
        change = self.second.sqrt()
        change.div_((1 - two**count).sqrt()).add_(EPS)
        change = torch.div(self.first, change, out=change).mul_(rate / (1 - one**count))
        if adjust is not None:
            adjust(change)
        if self.decay is not None and self.decayed is not None:
            change.add_(flat * self.decayed * self.decay.index_select(1, now))
        self.moved.copy_(torch.linalg.vector_norm(change, dim=1))
        flat.sub_(change)

    def keep(self, runs: Tensor) -> None:
        """Keep only these runs, given by index; the parameters have been reduced to them already."""
        for name in ("rates", "first", "second", "norm", "moved", "decay"):
            held = getattr(self, name)
            setattr(self, name, None if held is None else held[runs].clone())


class StackedSGD:
    """Plain gradient descent, for what does not divide by the gradient's size; ``rates`` as in :class:`StackedAdam`."""

    def __init__(self, parameters: StackedParameters, rates: Tensor) -> None:
        self.parameters, self.rates = parameters, rates
        self.step = torch.zeros(1, dtype=torch.int64, device=rates.device)

    @torch.no_grad()
    def update(self, gradient: Tensor, adjust: Callable[[Tensor], None] | None = None) -> None:
        """One step; ``adjust`` may change the update in place before it is applied."""
        change = gradient * self.rates.index_select(1, self.step.clamp(max=self.rates.shape[1] - 1))
        self.step += 1
        if adjust is not None:
            adjust(change)
        self.parameters.flat.sub_(change)

    def keep(self, runs: Tensor) -> None:
        """Keep only these runs, given by index; the parameters have been reduced to them already."""
        self.rates = self.rates[runs].clone()
