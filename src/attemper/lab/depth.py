"""depth: does leaving the scale out cost more in a deeper model? The language model of charlm.py at several depths."""

from __future__ import annotations

import statistics
from dataclasses import replace

from . import charlm
from .experiment import Cell, Expectation, Experiment, Parameter, Row, Rows, heads_divide, pick
from .training import best_lr, runs


def measure(cell: Cell) -> list[Row]:
    return charlm.train(cell, str(cell["rule"]))


def costs(rows: Rows) -> dict[int, tuple[float, float, float]]:
    """layers → the held-out loss of none less that of 1/√d_k, each at its best learning rate: median, least, most over seeds."""
    found = {}
    for layers in sorted({row["layers"] for row in rows}):
        last = {}
        for name in ("sqrt_dk", "none"):
            part = pick(rows, layers=layers, rule=name)
            lr = best_lr(part, "held_out", False)
            last[name] = {seed: run[-1]["held_out"] for (seed,), run in runs(pick(part, lr=lr), "seed").items()}
        apart = [last["none"][seed] - last["sqrt_dk"][seed] for seed in last["none"]]
        found[layers] = (statistics.median(apart), min(apart), max(apart))
    return found


def expect(rows: Rows) -> list[Expectation]:
    return []


def finding(rows: Rows) -> str:
    if not {"sqrt_dk", "none"} <= {row["rule"] for row in rows}:
        return f"Held-out loss {min(row['held_out'] for row in rows):.3f} nats at best"
    found = costs(rows)
    parts = ", ".join(f"{median:+.3f} nats at depth {layers}" for layers, (median, _, _) in found.items())
    return f"Leaving the scale out costs {parts}"


# eight layers in seconds: the width and the windows of charlm's model, halved
_HALVED: dict[str, tuple[int, ...]] = {"steps": (100,), "length": (32,), "d_model": (32,), "heads": (1,)}
SMALLER = tuple(replace(one, default=_HALVED.get(one.name, one.default)) for one in charlm.TASK)

EXPERIMENT = Experiment(
    name="depth",
    question="Does leaving the scale out cost more in a deeper model?",
    claims=("C20",),
    parameters=(
        Parameter("rule", ("sqrt_dk", "none"), "the scale's rule", choices=charlm.RULES),
        Parameter("layers", (1, 2, 4, 8), "how many", least=1),
        Parameter(
            "init", ("unit",), "projections: std 0.02 (small), or unit-variance q and k (unit)", choices=charlm.INITS
        ),
        Parameter("lr", (1e-3,), "Adam's learning rate", above=0),
        *SMALLER,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="depth",
    check=heads_divide,
    presets={
        "full": {
            "lr": (1e-3, 3e-3),
            "steps": (600,),
            "batch": (32,),
            "length": (128,),
            "d_model": (256,),
            "heads": (4,),
        }
    },
    trains=True,
)
