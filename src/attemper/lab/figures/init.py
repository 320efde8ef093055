"""The difference between a folded and an explicit scale at step 0, in units of rounding."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    shown = [{**row, "units": row["difference"] / row["rounding"]} for row in rows]
    x = theme.powers("d", "head dim d_k", [row["d"] for row in rows])
    names = [name for name in ("float32", "float64") if any(row["dtype"] == name for row in rows)]
    colour = theme.series("dtype", "dtype", names)
    y = alt.Y("units:Q", title="largest difference ÷ rounding unit")
    points = (
        alt.Chart(theme.data(shown))
        .mark_point(size=90, strokeWidth=2)
        .encode(x=x, y=y, color=colour, shape=alt.Shape("dtype:N", title="dtype", scale=alt.Scale(domain=names)))
    )
    chart = marks.labelled_line(0.0, "identical bits", at=330) + points
    note = "Output of attention with W_q/√d_k and no divisor, against W_q and the divisor √d_k; relative to the largest output."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
