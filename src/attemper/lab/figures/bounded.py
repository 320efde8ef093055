"""The largest weight that bounded logits can give, against the bound."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from . import marks, theme

POINTS = 120  # of a theory line, however far it goes


def draw(rows: theme.Rows, finding: str) -> Any:
    shown = [{**row, "keys": f"{row['n']} keys"} for row in rows]
    names = [f"{n} keys" for n in sorted({row["n"] for row in rows})]
    colour = theme.series("keys", "keys", names)
    x = alt.X("bound:Q", title="bound on the logit: cosine's scale, the softcap, or Σ|w|", axis=alt.Axis(tickCount=10))
    last = max(row["bound"] for row in rows)
    grid = [
        {"bound": last * i / POINTS, "keys": f"{n} keys", "form": 1 / (1 + (n - 1) * math.exp(-2 * last * i / POINTS))}
        for n in sorted({row["n"] for row in rows})
        for i in range(POINTS + 1)
    ]
    shape = alt.Shape("score:N", title="score")
    points = alt.Chart(theme.data(shown)).mark_point(size=90, strokeWidth=2).encode(
        x=x, y=alt.Y("top_weight:Q", title="largest weight of one key", axis=alt.Axis(format=".0%")), color=colour, shape=shape
    )  # fmt: skip
    chart = marks.theory(grid, x, "form", colour) + points
    note = "Lines: 1/(1 + (n−1)e^(−2·bound)). Points: the best case, measured through each score; the three scores coincide."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
