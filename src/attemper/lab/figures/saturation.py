"""The top weight and tr J against the spread of the logits, in units of the threshold √(2 ln n)."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    shown = [{**row, "keys": f"{row['n']} keys"} for row in rows]
    names = [f"{n} keys" for n in sorted({row["n"] for row in rows})]
    colour = theme.series("keys", "keys", names)
    x = alt.X(
        "ratio:Q",
        title="logit std ÷ √(2 ln n)",
        scale=alt.Scale(type="log", nice=False, padding=12),
        axis=alt.Axis(values=[0.1, 0.3, 1, 3, 10]),
    )
    frozen = [{"ratio": 1.1**i, "form": 1.1**-i} for i in range(24)]
    threshold = marks.labelled_line(1.0, "threshold", axis="x")
    top = (
        threshold
        + marks.joined(shown, x, "top_weight", colour)
        + marks.measured(shown, x, "top_weight", "mean top weight", colour)
    )
    trace = (
        threshold
        + marks.theory(frozen, x, "form", dash=(5, 3))
        + marks.theory(shown, x, "jacobian_trace_theory", colour, smooth=True)
        + marks.measured(shown, x, "jacobian_trace", "tr J = 1 − Σp²", colour)
    )
    half = theme.WIDTH // 2 - 30
    chart = alt.hconcat(top.properties(width=half, height=300), trace.properties(width=half, height=300))
    note = (
        "Points: measured, with 95 % intervals. Right, coloured lines: exact means; grey line: their limit for many keys, "
        "√(2 ln n)/s (random energy model)."
    )
    return theme.finish(chart, finding, note)
