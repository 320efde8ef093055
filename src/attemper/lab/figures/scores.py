"""Accuracy on recall against d for each score; and the largest d while it trains."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, panels, theme

NAMES = {"scaled": "dot / √d", "dot": "dot", "additive": "additive", "cosine": "cosine"}


def draw(rows: theme.Rows, finding: str) -> Any:
    named = [{**row, "name": NAMES[row["score"]]} for row in rows]
    shown, series = [], []
    for d in sorted({row["d"] for row in named}):
        part = [row for row in named if row["d"] == d]
        best = theme.best_rates(part, "name", "accuracy")
        series = [row for row in part if row["lr"] == best[row["name"]]]
        for name in best:
            last = {
                row["seed"]: row["accuracy"] for row in series if row["name"] == name
            }  # rows come in order of steps
            shown.append({"d": d, "name": name, **theme.spread("accuracy", list(last.values()))})
    colour = theme.series(
        "name", "score", [name for name in NAMES.values() if any(row["name"] == name for row in shown)]
    )
    x = theme.powers("d", "head dim d", [row["d"] for row in shown])
    points = marks.joined(shown, x, "accuracy", colour, nested=True) + marks.measured(
        shown, x, "accuracy", "accuracy", colour, nested=True
    )
    below = panels.draw({f"d = {max(row['d'] for row in shown)}": series}, colour, "name")
    note = (
        "Recall, each score at its best learning rate. Top: median and range over seeds; Britz et al. 2017, table 5 (BLEU): "
        f"dot 22.0, 22.3, 21.8, 18.2 at 128 to 1024. {panels.NOTE}"
    )
    return theme.finish(
        alt.vconcat(alt.layer(points).properties(width=theme.WIDTH, height=180), below, spacing=24), finding, note
    )
