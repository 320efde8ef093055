"""Recall against the learning rate with the scale divided, folded into W_q, or left out; and the same while it trains."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, panels, theme

NAMES = {"scaled": "divide by √d_k", "folded": "fold into W_q", "none": "neither"}


def draw(rows: theme.Rows, finding: str) -> Any:
    named = [{**row, "name": NAMES[row["how"]]} for row in rows]
    last = {
        (row["optimizer"], row["name"], row["lr"], row["seed"]): row for row in named
    }  # rows come in order of steps
    grouped: dict[tuple[str, str, float], list[float]] = {}
    for (optimizer, name, lr, _), row in last.items():
        grouped.setdefault((optimizer, name, lr), []).append(row["accuracy"])
    shown: theme.Rows = [
        {"optimizer": optimizer, "name": name, "lr": lr, **theme.spread("accuracy", values)}
        for (optimizer, name, lr), values in grouped.items()
    ]
    colour = theme.series("name", "the scale", list(NAMES.values()))
    optimizers = list(dict.fromkeys(row["optimizer"] for row in named))
    tops, series = [], {}
    for optimizer in optimizers:
        part = [row for row in shown if row["optimizer"] == optimizer]
        x = theme.powers("lr", "learning rate", [row["lr"] for row in part], ".0e")
        title = "accuracy" if optimizer == optimizers[0] else ""
        panel = marks.joined(part, x, "accuracy", colour, nested=True) + marks.measured(
            part, x, "accuracy", title, colour, nested=True
        )
        width = (theme.WIDTH - panels.GAP * (len(optimizers) - 1)) // len(optimizers)
        tops.append(panel.properties(width=width, height=180, title=panels.heading(optimizer)))
        runs = [row for row in named if row["optimizer"] == optimizer]
        best = theme.best_rates(runs, "name", "accuracy")
        series[optimizer] = [row for row in runs if row["lr"] == best[row["name"]]]
    chart = alt.vconcat(
        alt.hconcat(*tops, spacing=18), panels.draw(series, colour, "name", panels.TRAINING), spacing=24
    )
    note = (
        f"Recall, d = {max(row['d'] for row in rows)}. Top: median and range over seeds. "
        f"Below: each way at its best learning rate. {panels.NOTE}"
    )
    return theme.finish(chart, finding, note)
