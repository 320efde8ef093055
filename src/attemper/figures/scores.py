"""Accuracy on recall against d, for each score."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme

NAMES = {"scaled": "dot / √d", "dot": "dot", "additive": "additive", "cosine": "cosine"}


def draw(rows: theme.Rows, finding: str) -> Any:
    last = {(row["score"], row["d"], row["lr"], row["seed"]): row for row in rows}  # rows come in the order of steps
    shown = []
    for d in sorted({row["d"] for row in rows}):
        for name in dict.fromkeys(row["score"] for row in rows):
            part = [row for (score, one, _, _), row in last.items() if score == name and one == d]
            rate = theme.best_rates(part, "score", "accuracy")[name]
            values = [row["accuracy"] for row in part if row["lr"] == rate]
            shown.append({"d": d, "name": NAMES[name], **theme.spread("accuracy", values)})
    colour = theme.series(
        "name", "score", [name for name in NAMES.values() if any(row["name"] == name for row in shown)]
    )
    x = theme.powers("d", "head dim d", [row["d"] for row in shown])
    chart = marks.joined(shown, x, "accuracy", colour) + marks.measured(shown, x, "accuracy", "accuracy", colour)
    note = "Recall; median and range over seeds. Britz et al. 2017, table 5 (BLEU): dot 22.0, 22.3, 21.8, 18.2 at 128 to 1024."
    return theme.finish(alt.layer(chart).properties(width=theme.WIDTH, height=300), finding, note)
