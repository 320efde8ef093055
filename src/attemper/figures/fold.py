"""Accuracy on recall against the learning rate: the scale divided, folded into W_q, or left out; one panel per optimizer."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme

NAMES = {"scaled": "divide by √d_k", "folded": "fold into W_q", "none": "neither"}


def draw(rows: theme.Rows, finding: str) -> Any:
    last = {
        (row["optimizer"], row["how"], row["lr"], row["seed"]): row for row in rows
    }  # rows come in the order of steps
    grouped: dict[tuple[str, str, float], list[float]] = {}
    for (optimizer, how, lr, _), row in last.items():
        grouped.setdefault((optimizer, how, lr), []).append(row["accuracy"])
    shown = [
        {"optimizer": optimizer, "name": NAMES[how], "lr": lr, **theme.spread("accuracy", values)}
        for (optimizer, how, lr), values in grouped.items()
    ]
    colour = theme.series("name", "the scale", list(NAMES.values()))
    panels = []
    rates = sorted({float(row["lr"]) for row in rows})
    names = list(dict.fromkeys(row["optimizer"] for row in shown))
    for optimizer in names:
        part = [row for row in shown if row["optimizer"] == optimizer]
        x = theme.powers("lr", "learning rate", rates)
        panel = marks.joined(part, x, "accuracy", colour) + marks.measured(part, x, "accuracy", "accuracy", colour)
        panels.append(
            panel.properties(width=(theme.WIDTH - 40 * len(names)) // len(names), height=280, title=optimizer)
        )
    note = f"Recall, d = {max(row['d'] for row in rows)}; median and range over seeds."
    return theme.finish(alt.hconcat(*panels), finding, note)
