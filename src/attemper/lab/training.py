"""training: what the experiments that train share: one layer of scores under any rule, a loop that logs, and summaries of runs.

Data and initialisation depend on the seed alone, so every rule and learning rate sees the same of both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import attention
from ..scale import rule as rule_named
from ..scores import additive_attention, cosine_attention
from ..vitals import Attended
from .experiment import Row, Rows, pick

OTHERS = ("additive", "cosine", "kappa")  # scores that are not a rule of the dot product
SIGNS = ("entropy", "peak", "top_weight", "variance")
KERNEL = "reference"  # many short sequences: one batched product beats tile after tile
LOGGED = 15  # rows per run


class Scores(nn.Module):
    """Attention over q, k, v of shape (B, H, L, d) by a score: a rule's name, ``additive``, ``cosine``, or ``kappa``.

    Learns the rule's gain, or the additive score's w, where there is one. ``cosine`` learns its scale from 10. ``kappa`` forces
    the logits' scale, as Wortsman et al. 2023 do in their figure 10: q and k are brought to an RMS of √kappa.
    """

    def __init__(self, name: str, heads: int, head_dim: int, layer: int = 0, kappa: float = 1.0) -> None:
        super().__init__()
        self.name, self.heads, self.head_dim, self.layer, self.kappa = name, heads, head_dim, layer, kappa
        self.rule = rule_named("none" if name in OTHERS else name)
        starts = {"additive": head_dim**-0.5, "cosine": 10.0}
        start = starts.get(name, self.rule.gain)
        shape = (heads, head_dim) if name == "additive" else (heads,)
        self.gain = None if start is None else nn.Parameter(torch.full(shape, float(start)))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Attended:
        if self.name == "additive":
            assert self.gain is not None
            return additive_attention(query, key, value, self.gain, causal=causal, signs=SIGNS)
        if self.name in ("cosine", "kappa"):
            by_angle = self.gain if self.name == "cosine" else self.kappa * math.sqrt(self.head_dim)
            return cosine_attention(query, key, value, scale=by_angle, causal=causal, signs=SIGNS, kernel=KERNEL)
        keys = key.shape[-2]
        scale = self.rule.scale(head_dim=self.head_dim, heads=self.heads, layer=self.layer, keys=keys, gain=self.gain)
        if self.rule.unit:
            return cosine_attention(query, key, value, scale=scale, causal=causal, signs=SIGNS, kernel=KERNEL)
        cap = self.rule.softcap
        return attention(query, key, value, scale=scale, softcap=cap, causal=causal, signs=SIGNS, kernel=KERNEL)


def fit(
    model: nn.Module,
    lr: float,
    steps: int,
    loss_of: Callable[[int], tuple[Tensor, Sequence[Attended]]],
    evaluate: Callable[[], dict[str, float]],
    watched: Mapping[str, nn.Parameter],
    optimizer: str = "adam",
) -> list[Row]:
    """Train, and give one row per logged step: loss, evaluation, the vital signs of all layers, gradients of `watched`."""
    optim = optimizers(optimizer)(model.parameters(), lr)
    logged = sorted({round(step * steps / LOGGED) for step in range(LOGGED + 1)})
    rows: list[Row] = []
    for step in range(steps + 1):
        loss, layers = loss_of(step)
        optim.zero_grad(set_to_none=True)
        loss.backward()
        if step in logged:
            rows.append(
                {"step": step, "loss": float(loss.detach()), **signs_of(layers), **gradients(watched), **evaluate()}
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


def signs_of(layers: Sequence[Attended]) -> Row:
    """Mean entropy, logit std and top weight, and the largest logit, over all layers, heads and rows."""
    vitals = [layer.vitals for layer in layers]
    return {
        "entropy": statistics.fmean(float(one.entropy.detach().mean()) for one in vitals),
        "logit_std": statistics.fmean(float(one.variance.detach().mean().sqrt()) for one in vitals),
        "top_weight": statistics.fmean(float(one.top_weight.detach().mean()) for one in vitals),
        "peak": max(float(one.peak.detach().abs().max()) for one in vitals),
    }


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
    """The learning rate with the best median of a column's last value over seeds; each rule has its own."""
    last: dict[float, list[float]] = {}
    for (lr, _), run in runs(pick(rows, **wanted), "lr", "seed").items():
        value = run[-1][column] if math.isfinite(run[-1]["loss"]) else (-math.inf if larger else math.inf)
        last.setdefault(lr, []).append(value)
    order = max if larger else min
    return order(last, key=lambda lr: statistics.median(last[lr]))
