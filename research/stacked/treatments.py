"""treatments: what a run gets besides its rule and from which step on, and the faults that are planted in it.

    clip100, clip30   QK-clip: after a step, W_q and W_k of a head whose largest logit exceeded τ are made smaller
    floor             a penalty where attention has too little entropy
    quack             rates of W_q and W_k that fall as the other's norm grows (QuacK)
    third             a third of the learning rate

A fault is `temperature` (logits ten times as large, or ``factor`` times), `rate` (so many times the learning rate) or
`bfloat16` (scores and weights of attention are stored in bfloat16).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attemper import rule as rule_named

from .parameters import StackedParameters

if TYPE_CHECKING:
    from .language import Dimensions

TREATMENTS = ("", "clip100", "clip30", "floor", "quack", "third")
FAULTS = ("", "temperature", "rate", "bfloat16")
FLOOR, WEIGHT = 0.1, 0.1  # of evenness, and of the penalty in the loss
FAULT = 10.0
LAST_RATE = 1e-5
COLUMNS = ("rate", "schedule", "scale", "tau", "floor", "rounded")


@dataclass(frozen=True)
class Tables:
    """One number per run and step, (runs, steps): the rate, the schedule it follows (1 at its peak), the scale of the logits,
    τ of QK-clip (infinite for none), the weight of the entropy's floor, 1 where scores are stored in bfloat16; and whether a run
    has QuacK, (runs,)."""

    rate: Tensor
    schedule: Tensor
    scale: Tensor
    tau: Tensor
    floor: Tensor
    rounded: Tensor
    quack: Tensor
    any_quack: bool
    names: tuple[str, ...]  # of the treatments, by run
    faults: tuple[str, ...]  # by run

    def runs_with(self, treatment: str) -> Tensor | None:
        """The indices of runs whose treatment begins with a name; None if there are none."""
        return self._places([name.startswith(treatment) for name in self.names])

    def runs_rounded(self) -> Tensor | None:
        """The indices of runs whose scores are stored in bfloat16 from some step on; None if there are none."""
        return self._places([name == "bfloat16" for name in self.faults])

    def _places(self, chosen: Sequence[bool]) -> Tensor | None:
        places = [run for run, one in enumerate(chosen) if one]
        return torch.tensor(places, device=self.rate.device) if places else None


def tables(
    cells: Sequence[Mapping[str, Any]], head_dim: int, steps: int, warm_up: int, device: str, dtype: torch.dtype
) -> Tables:
    """The tables of these runs."""
    made: dict[str, list[list[float]]] = {name: [] for name in COLUMNS}
    for cell in cells:
        for name, values in _run(cell, head_dim, steps, int(cell.get("warm_up", warm_up))).items():
            made[name].append(values)
    found = {name: torch.tensor(values, device=device, dtype=dtype) for name, values in made.items()}
    names = tuple(str(cell.get("treatment", "")) for cell in cells)
    quacks = [name == "quack" for name in names]
    faults = tuple(str(cell.get("fault", "")) for cell in cells)
    quacked = torch.tensor(quacks, device=device)
    return Tables(**found, quack=quacked, any_quack=any(quacks), names=names, faults=faults)


def _run(cell: Mapping[str, Any], head_dim: int, steps: int, warm_up: int) -> dict[str, list[float]]:
    lr, treatment, start = float(cell["lr"]), str(cell.get("treatment", "")), int(cell.get("start", 0))
    fault, begins, factor = str(cell.get("fault", "")), int(cell.get("fault_step", 0)), float(cell.get("factor", FAULT))
    scale = float(rule_named(str(cell["rule"])).scale(head_dim=head_dim, gain=1.0))
    rule = rule_named(str(cell["rule"]))
    if rule.unit:  # normed entries have a mean square of 1, not a sum of 1
        scale = head_dim**-0.5
    found: dict[str, list[float]] = {name: [] for name in COLUMNS}
    for step in range(steps):
        part = _schedule(step, steps, warm_up)
        rate = max(lr * part, min(lr, LAST_RATE)) if step >= warm_up else lr * part
        rate *= factor if fault == "rate" and step >= begins else 1.0
        on = treatment if step >= start else ""
        found["rate"].append(rate / 3 if on == "third" else rate)
        found["schedule"].append(part)
        found["scale"].append(scale * (factor if fault == "temperature" and step >= begins else 1.0))
        found["tau"].append(float(on.removeprefix("clip")) if on.startswith("clip") else math.inf)
        found["floor"].append(WEIGHT if on == "floor" else 0.0)
        found["rounded"].append(float(fault == "bfloat16" and step >= begins))
    return found


def _schedule(step: int, steps: int, warm_up: int) -> float:
    """A linear warm-up, then half a cosine."""
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


@torch.no_grad()
def clip(parameters: StackedParameters, size: Dimensions, peaks: Tensor, tau: Tensor) -> None:
    """Make W_q and W_k smaller, by √(τ/S) each, where a head's largest logit S exceeded τ; peaks (layers, runs, heads), tau
    (runs,).

    A logit that is not a number clips nothing.
    """
    limit = tau[:, None]
    for layer, found in enumerate(peaks.to(parameters.flat.dtype)):
        factor = torch.where(found > limit, limit / found, torch.ones_like(found)).sqrt()
        factor = torch.where(factor.isfinite(), factor, torch.ones_like(factor))
        weight = parameters.views[f"qkv{layer}"]
        parts = weight.view(len(weight), size.width, 3, size.heads, size.head_dim)
        parts[:, :, :2].mul_(factor[:, None, None, :, None])


@torch.no_grad()
def quack(change: Tensor, weight: Tensor, first: Tensor, on: Tensor) -> None:
    """Multiply the update of W_q by ‖W_k‖ at the start over ‖W_k‖ now, and that of W_k likewise, for the runs that are ``on``.

    change and weight are (runs, width, 2, width), first (runs, 2).
    """
    ratio = first / weight.square().sum((1, 3)).sqrt()
    factor = torch.where(on[:, None], ratio.flip(1), torch.ones_like(ratio))
    change.mul_(factor[:, None, :, None])
