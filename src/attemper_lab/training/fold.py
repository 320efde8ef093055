"""fold: the scale folded into W_q is the same function at step 0; does it train the same? Recall, per optimizer."""

from __future__ import annotations

from typing import Any

from ..engine.experiment import Cell, Expectation, Row, Rows, define, pick
from ..figures import alt, marks, panels, theme
from ..maths.stats import over_seeds
from . import recall
from .runs import at_best, diverged, largest, runs, survived

HOWS = ("scaled", "folded", "none")


def measure(cell: Cell) -> list[Row]:
    how = str(cell["how"])
    return recall.train(cell, "sqrt_dk" if how == "scaled" else "none", how == "folded", str(cell["optimizer"]))


def summary(rows: Rows) -> list[Row]:
    """Per optimizer, way and learning rate: the last accuracy over seeds, and the largest logit."""
    summaries = []
    for (optimizer, how, lr), part in runs(rows, "optimizer", "how", "lr").items():
        of_seed = list(runs(part, "seed").values())
        summaries.append(
            {
                "optimizer": optimizer,
                "how": how,
                "lr": lr,
                **over_seeds("accuracy", [run[-1]["accuracy"] for run in of_seed]),
                "diverged": sum(map(diverged, of_seed)),
                "peak": largest(part, "peak"),
            }
        )
    return summaries


def expect(rows: Rows) -> list[Expectation]:
    """The same function at step 0: the first loss must not differ."""
    expectations = []
    for seed in sorted({row["seed"] for row in rows}):
        first = {row["how"]: row["loss"] for row in pick(rows, seed=seed, step=0)}
        if {"scaled", "folded"} <= set(first):
            quantity, apart = f"loss at step 0, folded minus scaled, seed {seed}", first["folded"] - first["scaled"]
            expectations.append(Expectation(quantity, 0.0, apart, 1e-4, "Raffel et al. 2020 (T5)", "float32 rounding"))
    return expectations


NAMES = {"adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor"}
APART = 0.1  # of accuracy: where medians differ by more at some learning rate, folding trains differently


def finding(rows: Rows) -> str:
    """Names the optimizers under which folding trains differently."""
    differ: list[str] = []
    same: list[str] = []
    neither: list[str] = []  # two ways that learn nothing may still train differently
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        summaries = pick(summary(rows), optimizer=optimizer)
        divided, folded = (
            {row["lr"]: row["accuracy"] for row in pick(summaries, how=how)} for how in ("scaled", "folded")
        )
        if max((*divided.values(), *folded.values()), default=0.0) < recall.LEARNED:
            neither.append(NAMES[optimizer])
        elif divided and folded:
            apart = any(abs(divided[lr] - folded[lr]) > APART for lr in divided if lr in folded)
            (differ if apart else same).append(NAMES[optimizer])
    words = "Folding the scale into W_q gives the same function at step 0"
    words += f"; training then differs under {' and '.join(differ)}" if differ else ""
    words += f"{', and' if differ else '; training'} is the same under {' and '.join(same)}" if same else ""
    words += f"; under {' and '.join(neither)} neither way learns" if neither else ""
    return words + survived(rows, "optimizer", "how", "lr", "seed")


def rates(rows: Rows) -> str:
    """The learning rates at which each way learns recall, by optimizer, in a sentence."""
    parts = []
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        summaries = pick(summary(rows), optimizer=optimizer)
        good = [row for row in summaries if row["accuracy"] >= recall.LEARNED]
        said = (_range([row["lr"] for row in pick(good, how=how)]) for how in HOWS)
        parts.append(f"{NAMES[optimizer]} {' / '.join(said)}")
    return f"Rates that learn recall, divided / folded / neither: {'; '.join(parts)}"


LABELS = {"scaled": "divide by √d_k", "folded": "fold into W_q", "none": "neither"}


def draw(rows: Rows, finding: str) -> Any:
    """Recall against the learning rate with the scale divided, folded into W_q, or left out; and the same while it trains."""
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
    below = panels.draw(series, colour, "name", panels.TRAINING)
    chart = alt.vconcat(alt.hconcat(*tops, spacing=18), below, spacing=24)
    note = (
        f"Recall among {rows[0]['pairs']} keys, d = {max(row['d'] for row in rows)}. {rates(rows)}. "
        "Top: median and range over seeds. "
        f"Below: each way at its best learning rate. {panels.NOTE}"
    )
    return theme.finish(chart, finding, note)


def _range(rates: list[float]) -> str:
    """The learning rates from the least to the most; those between are in the table."""
    return "–".join(f"{lr:g}" for lr in dict.fromkeys((min(rates), max(rates)))) if rates else "none"


EXPERIMENT = define(globals())
