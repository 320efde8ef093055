"""training: what the experiments that train share: a loop that logs through `watch`, and summaries of runs.

Data and initialisation depend on the seed alone, so every rule and learning rate sees the same of both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .experiment import Row, Rows, pick
from .seen import Heads, folded, looking

LOGGED = 15  # rows per run


def fit(
    model: nn.Module,
    lr: float,
    steps: int,
    loss_of: Callable[[int], Tensor],
    evaluate: Callable[[], dict[str, float]],
    watched: Mapping[str, nn.Parameter],
    optimizer: str = "adam",
) -> list[Row]:
    """Train, and give one row per logged step: loss, evaluation, the vital signs that `watch` sees, gradients of `watched`."""
    optim = optimizers(optimizer)(model.parameters(), lr)
    logged = sorted({round(step * steps / LOGGED) for step in range(LOGGED + 1)})
    rows: list[Row] = []
    for step in range(steps + 1):
        block: AbstractContextManager[Heads] = looking(model) if step in logged else nullcontext([])
        with block as heads:
            loss = loss_of(step)
            optim.zero_grad(set_to_none=True)
            loss.backward()
        if step in logged:
            rows.append(
                {"step": step, "loss": float(loss.detach()), **folded(heads), **gradients(watched), **evaluate()}
            )
            if not math.isfinite(rows[-1]["loss"]):
                break
        optim.step()
    return rows


def optimizers(name: str) -> Callable[[Any, float], torch.optim.Optimizer]:
    makers: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
        "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
        "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        "adafactor": lambda parameters, lr: torch.optim.Adafactor(parameters, lr=lr),
    }
    return makers[name]


def gradients(watched: Mapping[str, nn.Parameter]) -> Row:
    return {
        f"{name}_grad": float(parameter.grad.norm()) if parameter.grad is not None else 0.0
        for name, parameter in watched.items()
    }


def runs(rows: Rows, *names: str) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    """The rows of each run by the values of these parameters, in the order of their steps."""
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return {which: sorted(part, key=lambda row: row["step"]) for which, part in found.items()}


def first_step(run: Rows, column: str, level: float) -> float:
    """The first logged step at which a column reached a level; infinite when it never did."""
    return next((float(row["step"]) for row in run if row[column] >= level), math.inf)


def best_lr(rows: Rows, column: str, larger: bool, **wanted: object) -> float:
    """The learning rate with the best median of a column's last value over seeds; each rule has its own.

    Where two are equally good in the end, the one that was better on the way.
    """
    worst = -math.inf if larger else math.inf
    found: dict[float, list[tuple[float, float]]] = {}
    for (lr, _), run in runs(pick(rows, **wanted), "lr", "seed").items():
        diverged = not math.isfinite(run[-1]["loss"])
        ends = (worst, worst) if diverged else (run[-1][column], statistics.fmean(row[column] for row in run))
        found.setdefault(lr, []).append(ends)
    order = max if larger else min
    return order(found, key=lambda lr: tuple(statistics.median(ends) for ends in zip(*found[lr], strict=True)))
