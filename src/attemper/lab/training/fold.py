"""fold: the scale folded into W_q is the same function at step 0; does it train the same? Recall, per optimizer."""

from __future__ import annotations

from typing import Any

from ..engine.experiment import Cell, Expectation, Parameter, Row, Rows, define, pick
from ..maths.stats import over_seeds
from . import recall
from .runs import at_best, diverged, largest, runs, survived

HOWS = ("scaled", "folded", "none")
OPTIMIZERS = ("adam", "sgd", "adafactor")


def measure(cell: Cell) -> list[Row]:
    how = str(cell["how"])
    return recall.train(cell, "sqrt_dk" if how == "scaled" else "none", how == "folded", str(cell["optimizer"]))


def summary(rows: Rows) -> list[Row]:
    """Per optimizer, way and learning rate: the last accuracy over seeds, and the largest logit."""
    found = []
    for (optimizer, how, lr), part in runs(rows, "optimizer", "how", "lr").items():
        of_seed = list(runs(part, "seed").values())
        found.append(
            {
                "optimizer": optimizer,
                "how": how,
                "lr": lr,
                **over_seeds("accuracy", [run[-1]["accuracy"] for run in of_seed]),
                "diverged": sum(map(diverged, of_seed)),
                "peak": largest(part, "peak"),
            }
        )
    return found


def expect(rows: Rows) -> list[Expectation]:
    """The same function at step 0: the first loss must not differ."""
    found = []
    for seed in sorted({row["seed"] for row in rows}):
        first = {row["how"]: row["loss"] for row in pick(rows, seed=seed, step=0)}
        if {"scaled", "folded"} <= set(first):
            quantity, apart = f"loss at step 0, folded minus scaled, seed {seed}", first["folded"] - first["scaled"]
            found.append(Expectation(quantity, 0.0, apart, 1e-4, "Raffel et al. 2020 (T5)", "float32 rounding"))
    return found


NAMES = {"adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor"}
APART = 0.1  # of accuracy: medians that differ by more, at any learning rate, are of two trainings


def finding(rows: Rows) -> str:
    """Under which optimizers folding is another training."""
    other: list[str] = []
    same: list[str] = []
    neither: list[str] = []  # two runs that learn nothing are no sign of one training
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        found = pick(summary(rows), optimizer=optimizer)
        divided, folded = ({row["lr"]: row["accuracy"] for row in pick(found, how=how)} for how in ("scaled", "folded"))
        if max((*divided.values(), *folded.values()), default=0.0) < recall.LEARNED:
            neither.append(NAMES[optimizer])
        elif divided and folded:
            apart = any(abs(divided[lr] - folded[lr]) > APART for lr in divided if lr in folded)
            (other if apart else same).append(NAMES[optimizer])
    words = "Folding the scale into W_q gives the same function at step 0"
    words += f"; training then differs under {' and '.join(other)}" if other else ""
    words += f"{', and' if other else '; training'} is the same under {' and '.join(same)}" if same else ""
    words += f"; under {' and '.join(neither)} neither way learns" if neither else ""
    return words + survived(rows, "optimizer", "how", "lr", "seed")


def rates(rows: Rows) -> str:
    """The learning rates at which each way learns recall, by optimizer, in a sentence."""
    parts = []
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        found = pick(summary(rows), optimizer=optimizer)
        said = (
            _range([row["lr"] for row in pick(found, how=how) if row["accuracy"] >= recall.LEARNED]) for how in HOWS
        )
        parts.append(f"{NAMES[optimizer]} {' / '.join(said)}")
    return f"Rates that learn recall, divided / folded / neither: {'; '.join(parts)}"


LABELS = {"scaled": "divide by √d_k", "folded": "fold into W_q", "none": "neither"}


def draw(rows: Rows, finding: str) -> Any:
    """Recall against the learning rate with the scale divided, folded into W_q, or left out; and the same while it trains."""
    import altair as alt

    from ..figures import marks, panels, theme

    named, shown = ([{**row, "name": LABELS[row["how"]]} for row in some] for some in (rows, summary(rows)))
    colour = theme.series("name", "the scale", list(LABELS.values()))
    optimizers = list(dict.fromkeys(row["optimizer"] for row in rows))
    tops, series = [], {}
    for optimizer in optimizers:
        part = pick(shown, optimizer=optimizer)
        x = theme.powers("lr", "learning rate", [row["lr"] for row in part], ".0e")
        title = "accuracy" if optimizer == optimizers[0] else ""
        panel = marks.curve(part, x, "accuracy", title, colour, nested=True, most=1.0)
        width = (theme.WIDTH - panels.GAP * (len(optimizers) - 1)) // len(optimizers)
        tops.append(panel.properties(width=width, height=180, title=panels.heading(optimizer)))
        series[optimizer] = at_best(pick(named, optimizer=optimizer), "name", "accuracy", True)
    chart = alt.vconcat(
        alt.hconcat(*tops, spacing=18), panels.draw(series, colour, "name", panels.TRAINING), spacing=24
    )
    note = (
        f"Recall among {rows[0]['pairs']} keys, d = {max(row['d'] for row in rows)}. {rates(rows)}. "
        "Top: median and range over seeds. "
        f"Below: each way at its best learning rate. {panels.NOTE}"
    )
    return theme.finish(chart, finding, note)


def _range(rates: list[float]) -> str:
    """The learning rates from the least to the most; those between are in the table."""
    return "–".join(f"{lr:g}" for lr in dict.fromkeys((min(rates), max(rates)))) if rates else "none"


EXPERIMENT = define(
    __name__,
    question="The scale folded into W_q is the same function at step 0; does it train the same?",
    claims=(),
    parameters=(
        Parameter("optimizer", OPTIMIZERS, "the optimizer", choices=OPTIMIZERS),
        Parameter("how", HOWS, "divide by √d_k, fold it into W_q, or do neither", choices=HOWS),
        Parameter("lr", (3e-4, 1e-3, 1e-2, 0.1), "the learning rate", above=0),
        Parameter("d", (256,), "the head dim, d_k", least=1, single=True),
        *recall.TASK,
    ),
    presets={"full": {"lr": (3e-4, 1e-3, 3e-3, 1e-2, 0.1, 1.0), "steps": (400,)}},
    trains=True,
)
