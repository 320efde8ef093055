"""By how much a weight moves when its logit is stored in 16 bits, against the size of the logit."""

from __future__ import annotations

from typing import Any

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    shown = [row for row in rows if row["weight_moves_theory"] < 1e4 and row["stored_finite"]] or rows[:1]
    names = [name for name in ("float32", "float16", "bfloat16") if any(row["dtype"] == name for row in shown)]
    colour = theme.series("dtype", "scores stored in", names)
    sizes = [row["size"] for row in shown]
    x = theme.powers("size", "size of the logit", sizes)
    if min(sizes) >= 1:
        x = x.axis(values=sorted(set(sizes)), format="~s", labelOverlap="greedy", grid=False)
    chart = (
        marks.labelled_line(1.0, "the weight doubles")
        + marks.theory(shown, x, "weight_moves_theory", colour)
        + marks.measured(shown, x, "weight_moves", "largest relative change of a weight", colour, log=True)
    )
    note = (
        "Lines: e^(half a unit in the last place) − 1. Points: measured by rounding. Fused kernels keep float32 scores."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
