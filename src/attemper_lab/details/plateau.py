"""plateau: do small gradients make learning unstable, or slow?

A query learns to look at two of n keys alike, by SGD or Adam on ½|p − target|². It starts with a wrong key ahead of all
others by a gap: the larger the gap, the more saturated the softmax and the smaller the first gradient. Noise is added to the
target at every step, as a minibatch does, so that it reaches the query through the same softmax; the loss that is measured has
none. Learning is unstable where the loss rises far above its lowest, and slow where it takes many steps. Steps of SGD are too
large where the learning rate exceeds 2 over the curvature, 8 here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import marks, theme
from ..maths.stats import over_batches

QUERIES, KEYS, WIDTH = 64, 8, 16
LEARNED = 0.05  # of the loss; it starts near 0.75
NAMES = {"sgd": "SGD", "adam": "Adam"}
TARGET = torch.tensor([0.5, 0.0, 0.5] + [0.0] * (KEYS - 3), dtype=torch.float64, device="cpu")


def measure(cell: Cell) -> Row:
    gap, lr, steps, noise = float(cell["gap"]), float(cell["lr"]), int(cell["steps"]), float(cell["noise"])
    stream = generator(cell["device"], "plateau", cell["seed"])  # the same keys whatever the gap and the learning rate
    drawn = torch.randn(QUERIES, WIDTH, KEYS, generator=stream, device=stream.device).double()
    keys = torch.linalg.qr(drawn)[0].mT  # orthonormal: a logit can be set without the others
    query = gap * keys[:, 1]
    target = TARGET.to(stream.device)
    loss = torch.full((QUERIES,), torch.inf, dtype=torch.float64, device=stream.device)
    first = _loss(query, keys, target)[1].norm(dim=-1)
    learned = torch.full((QUERIES,), torch.inf, dtype=torch.float64, device=stream.device)
    rises = torch.zeros(QUERIES, dtype=torch.float64, device=stream.device)
    start, lowest, worst = loss, loss, torch.zeros_like(rises)
    mean, square = torch.zeros_like(query), torch.zeros_like(query)
    for step in range(steps):
        now, slope = _loss(query, keys, target)
        start = now if step == 0 else start
        rises += now > loss
        lowest = torch.minimum(lowest, now)
        worst = torch.maximum(worst, (now - lowest) / start)
        learned = torch.where((now < LEARNED) & learned.isinf(), float(step), learned)
        if noise:
            drawn = noise * torch.randn(QUERIES, KEYS, generator=stream, device=stream.device).double()
            slope = _loss(query, keys, target + drawn)[1]
        if cell["optimizer"] == "adam":
            mean, square = 0.9 * mean + 0.1 * slope, 0.999 * square + 0.001 * slope.square()
            count = step + 1
            slope = (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)).sqrt() + 1e-8)
        loss, query = now, query - lr * slope
    return {
        **over_batches(first).columns("first_gradient"),
        "steps_to_learn": float(learned.median()),
        "learned": float(learned.isfinite().double().mean()),
        "rises": float(rises.mean() / (steps - 1)),
        "worst_rise": float(worst.mean()),
    }


def _loss(query: Tensor, keys: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """½|p − target|² of each query, and its gradient."""
    p = torch.softmax((keys @ query.unsqueeze(-1)).squeeze(-1), -1)
    error = p - target
    slope = p * (error - (p * error).sum(-1, keepdim=True))  # J · dL/dp
    return error.square().sum(-1) / 2, (slope.unsqueeze(1) @ keys).squeeze(1)


def expect(rows: Rows) -> list[Expectation]:
    """The first gradient: J·(p − target) for the logits that were set."""
    expectations = []
    for row in rows:
        logits = torch.zeros(KEYS, dtype=torch.float64, device="cpu")
        logits[1] = row["gap"]
        p = torch.softmax(logits, 0)
        error = p - TARGET
        expected = float((p * (error - (p * error).sum())).norm())
        quantity = f"first gradient of q, gap {row['gap']:g}, lr {row['lr']:g}, {NAMES[row['optimizer']]}"
        source, within = "closed form: |J (p − target)|", 1e-9 * expected
        expectations.append(Expectation(quantity, expected, row["first_gradient"], within, source, "float64 rounding"))
    return expectations


def finding(rows: Rows) -> str:
    lr = min(row["lr"] for row in rows)
    some = sorted(pick(rows, lr=lr), key=lambda row: float(row["gap"]))
    small, large = some[-1], some[0]
    return (
        f"With a first gradient {large['first_gradient'] / small['first_gradient']:.0f} times smaller a query learns in "
        f"{small['steps_to_learn']:.0f} steps instead of {large['steps_to_learn']:.0f}; its loss rises by "
        f"{small['worst_rise']:.0%} of the first loss at most, and by {large['worst_rise']:.0%}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """Steps until it is learned, and how far the loss rises above its lowest, against the first gradient."""
    shown = [{**row, "rate": f"{NAMES[row['optimizer']]}, lr {row['lr']:g}"} for row in rows]
    names = list(dict.fromkeys(row["rate"] for row in shown))
    colour = theme.series("rate", "", names)
    x = theme.powers("gap", "lead of the wrong key, in logits", [max(row["gap"], 1e-9) for row in shown])
    most_learned = [row for row in shown if row["learned"] > 0.5]
    slow = marks.curve(most_learned, x, "steps_to_learn", "steps to learn", colour, log=True)
    bad = marks.curve(shown, x, "worst_rise", "largest rise of the loss, in first losses", colour)
    chart = theme.side_by_side(slow, bad, theme.WIDTH // 2 - 30)
    note = f"{QUERIES} queries learn to look at two of {KEYS} keys; medians. The larger the lead, the smaller the first gradient."
    return theme.finish(chart, finding, note)


EXPERIMENT = define(globals())
