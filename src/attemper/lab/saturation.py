"""saturation: at which spread of the logits does softmax put nearly all the weight on one key?

The logits are drawn as N(0, s²): given a query, its logits over normal keys are exactly that, with s = |q| × scale.
"""

from __future__ import annotations

import torch

from ..attention import measure as vitals_of
from . import theory
from .experiment import DEVICE, SEED, Cell, Expectation, Experiment, Parameter, Row, Rows, generator, pick
from .stats import over_batches, reach

SATURATED = 0.99
BATCHES = 16


def measure(cell: Cell) -> list[Row]:
    n, s = int(cell["n"]), float(cell["s"])
    stream = generator(cell["device"], "saturation", n, s, cell["rows"], cell["seed"])
    shape = (BATCHES, max(1, int(cell["rows"]) // BATCHES), n, 1)
    logits = s * torch.randn(shape, generator=stream, device=stream.device)
    # one query of one entry, 1, against keys of one entry each: the logits are the keys
    signs = vitals_of(torch.ones_like(logits[:, :, :1]), logits, scale=1.0)
    top = signs.top_weight
    return [
        {
            "critical": theory.critical_std(n),
            "ratio": s / theory.critical_std(n),
            **over_batches(top).columns("top_weight"),
            **over_batches(signs.entropy).columns("entropy"),
            **over_batches(signs.effective_keys).columns("effective_keys"),
            **over_batches(signs.jacobian_trace).columns("jacobian_trace"),
            "saturated": float((top > SATURATED).double().mean()),
            "entropy_theory": theory.entropy(s, n),
            "jacobian_trace_theory": theory.jacobian_trace(s, n),
        }
    ]


def expect(rows: Rows) -> list[Expectation]:
    found = []
    for row in rows:
        label = f"n = {row['n']}, s = {row['s']:g}"
        if row["ratio"] <= 0.4:
            found.append(
                Expectation(
                    f"entropy of the weights, {label}",
                    row["entropy_theory"],
                    row["entropy"],
                    reach(row["entropy_low"], row["entropy_high"]) + 0.05,
                    "random energy model, above freezing: ln n − s²/2",
                    "4 standard errors, and 0.05 nats for finite n",
                )
            )
        if row["ratio"] >= 2:
            theory_value = row["jacobian_trace_theory"]
            found.append(
                Expectation(
                    f"tr J = 1 − Σp², {label}",
                    theory_value,
                    row["jacobian_trace"],
                    reach(row["jacobian_trace_low"], row["jacobian_trace_high"]) + 0.30 * theory_value,
                    "random energy model, frozen: m = √(2 ln n)/s",
                    "4 standard errors, and 30 % for finite n",
                )
            )
    return found


def jump(rows: Rows, n: int) -> float:
    """How many times the top weight at twice the critical spread is that at half of it: grows with n at a threshold."""
    near = {goal: min(pick(rows, n=n), key=lambda row: abs(row["ratio"] - goal)) for goal in (0.5, 2.0)}
    return near[2.0]["top_weight"] / near[0.5]["top_weight"]


def finding(rows: Rows) -> str:
    sizes = sorted({row["n"] for row in rows})
    if len(sizes) < 2:
        return (
            f"With {sizes[0]} keys softmax freezes near a logit std of √(2 ln n) = {theory.critical_std(sizes[0]):.2f}"
        )
    return (
        f"Softmax freezes near a logit std of √(2 ln n): from half of that to twice it the top weight grows "
        f"{jump(rows, sizes[0]):.1f}-fold with {sizes[0]} keys and {jump(rows, sizes[-1]):.0f}-fold with {sizes[-1]}"
    )


EXPERIMENT = Experiment(
    name="saturation",
    question="At which spread of the logits does softmax put nearly all the weight on one key?",
    claims=("C5",),
    parameters=(
        Parameter("n", (16, 128, 1024, 8192), "how many keys", least=2, hint="one key always has all the weight"),
        Parameter(
            "s",
            (0.25, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 11.0, 16.0, 32.0),
            "the std of the logits",
            above=0,
        ),
        Parameter("rows", (800,), "queries per cell", least=32, hint="fewer give no interval"),
        SEED,
        DEVICE,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="saturation",
)
