"""plateau: do small gradients make learning unstable, or slow?

A query learns to look at two of n keys alike, by gradient descent on ½|p − target|². It starts with a wrong key ahead of
all others by a gap: the larger the gap, the more saturated the softmax and the smaller the first gradient. Learning is
unstable where steps raise the loss, and slow where it takes many of them. Steps are too large where the learning rate
exceeds 2 over the curvature, 8 here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.experiment import Cell, Expectation, Parameter, Row, Rows, define, generator, pick
from ..maths.stats import over_batches

QUERIES, KEYS, WIDTH = 64, 8, 16
LEARNED = 0.05  # of the loss; it starts near 0.75
TARGET = torch.tensor([0.5, 0.0, 0.5] + [0.0] * (KEYS - 3), dtype=torch.float64, device="cpu")


def measure(cell: Cell) -> Row:
    gap, lr, steps = float(cell["gap"]), float(cell["lr"]), int(cell["steps"])
    stream = generator(cell["device"], "plateau", cell["seed"])  # the same keys whatever the gap and the learning rate
    drawn = torch.randn(QUERIES, WIDTH, KEYS, generator=stream, device=stream.device).double()
    keys = torch.linalg.qr(drawn)[0].mT  # orthonormal: a logit can be set without the others
    query = gap * keys[:, 1]
    target = TARGET.to(stream.device)
    loss = torch.full((QUERIES,), torch.inf, dtype=torch.float64, device=stream.device)
    first = _loss(query, keys, target)[1].norm(dim=-1)
    learned = torch.full((QUERIES,), torch.inf, dtype=torch.float64, device=stream.device)
    rises = torch.zeros(QUERIES, dtype=torch.float64, device=stream.device)
    for step in range(steps):
        now, slope = _loss(query, keys, target)
        rises += now > loss
        learned = torch.where((now < LEARNED) & learned.isinf(), float(step), learned)
        loss, query = now, query - lr * slope
    return {
        **over_batches(first).columns("first_gradient"),
        "steps_to_learn": float(learned.median()),
        "learned": float(learned.isfinite().double().mean()),
        "rises": float(rises.mean() / (steps - 1)),
    }


def _loss(query: Tensor, keys: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """½|p − target|² of each query, and its gradient."""
    p = torch.softmax((keys @ query.unsqueeze(-1)).squeeze(-1), -1)
    error = p - target
    slope = p * (error - (p * error).sum(-1, keepdim=True))  # J · dL/dp
    return error.square().sum(-1) / 2, (slope.unsqueeze(1) @ keys).squeeze(1)


def expect(rows: Rows) -> list[Expectation]:
    """The first gradient: J·(p − target) for the logits that were set."""
    found = []
    for row in rows:
        logits = torch.zeros(KEYS, dtype=torch.float64, device="cpu")
        logits[1] = row["gap"]
        p = torch.softmax(logits, 0)
        error = p - TARGET
        expected = float((p * (error - (p * error).sum())).norm())
        quantity = f"first gradient of q, gap {row['gap']:g}, lr {row['lr']:g}"
        found.append(
            Expectation(
                quantity,
                expected,
                row["first_gradient"],
                1e-9 * expected,
                "closed form: |J (p − target)|",
                "float64 rounding",
            )
        )
    return found


def finding(rows: Rows) -> str:
    lr = min(row["lr"] for row in rows)
    some = sorted(pick(rows, lr=lr), key=lambda row: float(row["gap"]))
    small, large = some[-1], some[0]
    return (
        f"With a first gradient {large['first_gradient'] / small['first_gradient']:.0f} times smaller a query learns in "
        f"{small['steps_to_learn']:.0f} steps instead of {large['steps_to_learn']:.0f}; {small['rises']:.0%} of "
        "the steps raise the loss"
    )


def draw(rows: Rows, finding: str) -> Any:
    """Steps until it is learned, and the share of steps that raise the loss, against the first gradient."""
    from ..figures import marks, theme

    shown = [{**row, "rate": f"lr {row['lr']:g}"} for row in rows]
    names = list(dict.fromkeys(row["rate"] for row in shown))
    colour = theme.series("rate", "learning rate", names)
    x = theme.powers("gap", "lead of the wrong key, in logits", [max(row["gap"], 1e-9) for row in shown])
    slow = marks.curve(
        [row for row in shown if row["learned"] > 0.5], x, "steps_to_learn", "steps to learn", colour, log=True
    )
    bad = marks.curve(shown, x, "rises", "share of steps that raise the loss", colour)
    chart = theme.side_by_side(slow, bad, theme.WIDTH // 2 - 30)
    note = f"{QUERIES} queries learn to look at two of {KEYS} keys; medians. The larger the lead, the smaller the first gradient."
    return theme.finish(chart, finding, note)


EXPERIMENT = define(
    __name__,
    question="Do small gradients make learning unstable, or slow?",
    claims=("C34",),
    parameters=(
        Parameter(
            "gap", (2.0, 4.0, 6.0, 8.0), "how far a wrong key is ahead at the start, in logits", above=0, most=30
        ),
        Parameter("lr", (1.0, 30.0), "the learning rate", above=0, most=1e6),
        Parameter("steps", (800,), "steps of gradient descent", least=2, most=10**6),
    ),
)
