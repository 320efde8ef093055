"""The softmax's slope with two keys, against d_k."""

from __future__ import annotations

from typing import Any

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    parts = [
        {
            "d": row["d"],
            "rule": rule,
            "slope": row[name],
            "slope_low": row[f"{name}_low"],
            "slope_high": row[f"{name}_high"],
        }
        for row in rows
        for rule, name in (("none", "slope"), ("sqrt_dk", "scaled_slope"))
    ]
    shown = theme.labelled(parts)
    colour = theme.by_rule(shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in rows])
    chart = marks.theory(rows, x, "slope_theory") + marks.measured(
        shown, x, "slope", "mean p(1−p)", colour, log=True, nested=True
    )
    note = "Grey line: 1/(2√(π d_k)), for large d_k. Points: measured, with 95 % intervals. The median soon leaves the axis."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
