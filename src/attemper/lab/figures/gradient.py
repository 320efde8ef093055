"""RMS and median of the gradient that reaches a query, against d_k, under each rule."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme

FLOOR = 1e-5  # a median of zero has no place on a logarithmic axis


def draw(rows: theme.Rows, finding: str) -> Any:
    shown = theme.labelled([{**row, "median": max(row["median"], FLOOR)} for row in rows])
    colour = theme.by_rule(shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    mean = marks.theory(shown, x, "rms_theory", colour) + marks.measured(shown, x, "rms", "|dL/dq|", colour, log=True)
    median = marks.joined(shown, x, "median", colour) + marks.measured(shown, x, "median", "|dL/dq|", colour, log=True)
    half = theme.WIDTH // 2 - 20
    panels = [
        panel.properties(width=half, height=300, title=alt.TitleParams(title, fontSize=13, fontWeight="normal"))
        for panel, title in ((mean, "root mean square over queries"), (median, "median query"))
    ]
    chart = alt.hconcat(*panels).resolve_scale(y="shared")
    n = max(row["n"] for row in rows)
    note = f"n = {n}, unit-variance q, k, v, upstream gradient of length 1. Left, lines: scale √(d_k E‖J‖_F²)."
    return theme.finish(chart, finding, note)
