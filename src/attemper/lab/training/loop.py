"""training: what the experiments that train share: a loop that logs through `watch`, and how runs are chosen and counted.

Data and initialisation depend on the seed alone, so every rule and learning rate sees the same of both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.experiment import Row, Rows, pick
from .seen import Heads, folded, looking

LOGGED = 15  # rows per run
Run = list[Mapping[str, Any]]  # the rows of one run, in the order of their steps


def fit(
    model: nn.Module,
    lr: float,
    steps: int,
    loss_of: Callable[[int], Tensor],
    evaluate: Callable[[bool], dict[str, float]],
    watched: Mapping[str, nn.Parameter],
    optimizer: str = "adam",
) -> list[Row]:
    """Train, and give one row per logged step: loss, evaluation, the vital signs that `watch` sees, gradients of `watched`.

    ``evaluate`` is told whether this is the end. A run whose loss is no longer a number ends there: it diverged.
    """
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
            signs, ended = {**folded(heads), **gradients(watched)}, evaluate(step == steps)
            rows.append({"step": step, "loss": float(loss.detach()), **signs, **ended})
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


def runs(rows: Rows, *names: str) -> dict[tuple[Any, ...], Run]:
    """The rows of each run by the values of these parameters, in the order of their steps."""
    found: dict[tuple[Any, ...], Run] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return {which: sorted(part, key=lambda row: row["step"]) for which, part in found.items()}


def diverged(run: Rows) -> bool:
    """Whether a run's loss stopped being a number."""
    return not math.isfinite(run[-1]["loss"])


def end(run: Rows, column: str, larger: bool = False) -> float:
    """A column's last value; of a run that diverged the worst there is, so that a median counts it and is never NaN."""
    value = float(run[-1][column])
    worst = -math.inf if larger else math.inf
    return worst if diverged(run) or math.isnan(value) else value


def spread(name: str, values: Sequence[float]) -> Row:
    """The median over seeds, the least and the most."""
    return {name: statistics.median(values), f"{name}_low": min(values), f"{name}_high": max(values)}


def largest(rows: Rows, column: str) -> float:
    """The largest finite value of a column; NaN where there is none."""
    return max((row[column] for row in rows if math.isfinite(row[column])), default=math.nan)


def survived(rows: Rows, *names: str) -> str:
    """How many runs diverged, in words, by the names that tell runs apart; nothing where none did."""
    all_runs = runs(rows, *names).values()
    lost = sum(diverged(run) for run in all_runs)
    return f"; {lost} of {len(all_runs)} runs diverged" if lost else ""


def first_step(run: Rows, column: str, level: float) -> float:
    """The first logged step at which a column reached a level; infinite when it never did."""
    return next((float(row["step"]) for row in run if row[column] >= level), math.inf)


def chosen_by(rows: Rows, column: str) -> str:
    """What a learning rate is chosen by: the validation set where rows have one, so that what is reported did not choose."""
    return "validation" if rows and "validation" in rows[0] else column


def best_lr(rows: Rows, column: str, larger: bool, **wanted: object) -> float:
    """The learning rate with the best median over seeds of the last value on the validation set; each rule has its own.

    Where two are equally good in the end, the one that was better on the way.
    """
    column = chosen_by(rows, column)
    found: dict[float, list[tuple[float, float]]] = {}
    for (lr, _), run in runs(pick(rows, **wanted), "lr", "seed").items():
        last = end(run, column, larger)
        on_the_way = statistics.fmean(row[column] for row in run) if math.isfinite(last) else last
        found.setdefault(lr, []).append((last, on_the_way))
    order = max if larger else min
    return order(found, key=lambda lr: tuple(statistics.median(ends) for ends in zip(*found[lr], strict=True)))


def fastest_lr(rows: Rows, column: str, level: float) -> float:
    """The learning rate whose median run reaches a level first on the validation set; of equals, the best in the end."""
    column = chosen_by(rows, column)
    found: dict[float, list[tuple[float, float]]] = {}
    for (lr, _), run in runs(rows, "lr", "seed").items():
        found.setdefault(lr, []).append((first_step(run, column, level), -end(run, column, larger=True)))
    return min(found, key=lambda lr: tuple(statistics.median(ends) for ends in zip(*found[lr], strict=True)))


def at_edge(rows: Rows, lr: float) -> bool:
    """Whether a learning rate is the least or the most that was tried: a better one may lie beyond."""
    tried = [row["lr"] for row in rows]
    return lr in (min(tried), max(tried))
