"""transplant: with the logits' scale forced to κ, from which κ on does training suffer? After Wortsman et al. 2023, figure 10."""

from __future__ import annotations

import math
import statistics

from . import charlm
from .experiment import Cell, Expectation, Experiment, Parameter, Row, Rows, heads_divide
from .training import runs


def measure(cell: Cell) -> list[Row]:
    rows = charlm.train(cell, "kappa", float(cell["kappa"]))
    return [{**row, "bigram": charlm.bigram(int(cell["length"]))} for row in rows]


def losses(rows: Rows) -> dict[float, tuple[float, float, float]]:
    """κ → the last held-out loss: median, least, most over seeds."""
    found = {}
    for (kappa,), part in runs(rows, "kappa").items():
        last = [run[-1]["held_out"] for run in runs(part, "seed").values()]
        found[kappa] = (statistics.median(last), min(last), max(last))
    return dict(sorted(found.items()))


def knee(rows: Rows) -> float:
    """The first κ, from the best on, at which the median loss is a tenth of a nat above the best; NaN when there is none."""
    found = losses(rows)
    best = min(found, key=lambda kappa: found[kappa][0])
    return min((kappa for kappa in found if kappa > best and found[kappa][0] > found[best][0] + 0.1), default=math.nan)


def expect(rows: Rows) -> list[Expectation]:
    return [
        Expectation(
            "log₁₀ of the κ at which held-out loss is 0.1 nats above its best",
            3.0,
            math.log10(knee(rows)),
            0.5,
            "Wortsman et al. 2023, arXiv:2309.14322, fig. 10: near 1e3, with 10 M parameters",
            "half a decade",
        )
    ]


def finding(rows: Rows) -> str:
    found = losses(rows)
    best, last = min(found, key=lambda kappa: found[kappa][0]), max(found)
    worse = "worse" if found[last][0] > rows[0]["bigram"] else "better"
    return (
        f"Held-out loss is lowest at κ = {best:g} ({found[best][0]:.2f} nats), 0.1 nats higher from κ = {knee(rows):g} on; "
        f"at {last:g} it is {found[last][0]:.2f}, {worse} than counting pairs of characters ({rows[0]['bigram']:.2f})"
    )


EXPERIMENT = Experiment(
    name="transplant",
    question="With the logits' scale forced to κ, from which κ on does a language model train worse?",
    claims=("C9",),
    parameters=(
        Parameter("kappa", (0.1, 1.0, 10.0, 100.0, 1e3, 1e4), "the RMS of q times that of k", above=0),
        Parameter("init", ("unit",), "of the projections", choices=charlm.INITS),
        Parameter("lr", (3e-3,), "Adam's learning rate", above=0),
        Parameter("layers", (2,), "how many", least=1),
        *(one if one.name != "seed" else Parameter("seed", (0, 1), one.says, least=0) for one in charlm.TASK),
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="transplant",
    check=heads_divide,
    presets={
        "full": {
            "kappa": (0.1, 1.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4),
            "steps": (1200,),
            "batch": (32,),
            "length": (128,),
            "d_model": (256,),
            "heads": (4,),
            "layers": (4,),
            "lr": (1e-3,),
            "seed": (0, 1, 2),
        }
    },
    trains=True,
)
