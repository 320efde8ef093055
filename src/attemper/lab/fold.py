"""fold: the scale folded into W_q is the same function at step 0; does it train the same? Recall, per optimizer."""

from __future__ import annotations

import statistics

from . import recall
from .experiment import Cell, Expectation, Experiment, Parameter, Row, Rows, pick
from .training import runs

HOWS = ("scaled", "folded", "none")
OPTIMIZERS = ("adam", "sgd", "adafactor")


def measure(cell: Cell) -> list[Row]:
    how = str(cell["how"])
    return recall.train(cell, "sqrt_dk" if how == "scaled" else "none", how == "folded", str(cell["optimizer"]))


def table(rows: Rows) -> list[Row]:
    """Per optimizer, way and learning rate: the last accuracy over seeds, and the largest logit."""
    found = []
    for (optimizer, how, lr), part in runs(rows, "optimizer", "how", "lr").items():
        last = [run[-1]["accuracy"] for run in runs(part, "seed").values()]
        found.append(
            {
                "optimizer": optimizer,
                "how": how,
                "lr": lr,
                "accuracy": statistics.median(last),
                "accuracy_low": min(last),
                "accuracy_high": max(last),
                "peak": max(row["peak"] for row in part),
            }
        )
    return found


def expect(rows: Rows) -> list[Expectation]:
    """The same function at step 0: the first loss must not differ."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        first = {row["how"]: row["loss"] for row in pick(rows, seed=seed, step=0)}
        if {"scaled", "folded"} <= set(first):
            found.append(
                Expectation(
                    f"loss at step 0, folded less scaled, seed {seed}",
                    0.0,
                    first["folded"] - first["scaled"],
                    1e-4,
                    "Raffel et al. 2020 (T5)",
                    "float32 rounding",
                )
            )
    return found


def finding(rows: Rows) -> str:
    parts = []
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        of_how: dict[str, list[float]] = {}
        for row in pick(table(rows), optimizer=optimizer):
            of_how.setdefault(row["how"], []).extend([row["lr"]] if row["accuracy"] >= recall.LEARNED else [])
        said = ", ".join(f"{how} {_range(rates)}" for how, rates in of_how.items())
        parts.append(f"{optimizer}: {said}")
    return f"The same function at step 0, another training; learning rates that reach 90 %: {'; '.join(parts)}"


def _range(rates: list[float]) -> str:
    """The learning rates from the least to the most; those between are in the table."""
    return "never" if not rates else " to ".join(f"{lr:g}" for lr in dict.fromkeys((min(rates), max(rates))))


EXPERIMENT = Experiment(
    name="fold",
    question="The scale folded into W_q is the same function at step 0; does it train the same?",
    claims=(),
    parameters=(
        Parameter("optimizer", ("adam",), "which", choices=OPTIMIZERS),
        Parameter("how", HOWS, "divide by √d_k, fold it into W_q, or do neither", choices=HOWS),
        Parameter("lr", (3e-4, 1e-3, 3e-3), "the learning rate", above=0),
        Parameter("d", (256,), "the head dim, d_k", least=1),
        *(one if one.name != "seed" else Parameter("seed", (0, 1), one.says, least=0) for one in recall.TASK),
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="fold",
    presets={
        "full": {"optimizer": OPTIMIZERS, "lr": (3e-4, 1e-3, 3e-3, 1e-2, 0.1, 1.0), "steps": (400,), "seed": (0, 1, 2)}
    },
    trains=True,
)
