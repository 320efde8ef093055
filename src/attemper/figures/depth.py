"""What leaving the scale out costs, against the number of layers."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    last = max(row["step"] for row in rows)
    ends = [row for row in rows if row["step"] == last]
    shown = []
    for layers in sorted({row["layers"] for row in ends}):
        for name in dict.fromkeys(row["rule"] for row in ends):
            part = [row for row in ends if row["layers"] == layers and row["rule"] == name]
            rate = theme.best_rates(part, "rule", "held_out", larger=False)[name]
            values = [row["held_out"] for row in part if row["lr"] == rate]
            shown.append({"layers": layers, "rule": name, **theme.spread("loss", values)})
    shown = theme.labelled(shown)
    colour = theme.by_rule(shown)
    x = theme.powers("layers", "layers", [row["layers"] for row in shown])
    points = marks.joined(shown, x, "loss", colour) + marks.measured(
        shown, x, "loss", "held-out loss, nats", colour, zero=False
    )
    note = "Language model on Python's standard library, unit-variance q and k; median and range over seeds."
    return theme.finish(alt.layer(points).properties(width=theme.WIDTH, height=300), finding, note)
