"""The notes' two softmaxes, as bars."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import theme


def draw(rows: theme.Rows, finding: str) -> Any:
    shown = [
        {
            "softmax": f"softmax([{row['example']}])",
            "logit": str(row["example"]).split(", ")[row["place"]],
            "weight": row["value"],
        }
        for row in rows
        if row["kind"] == "softmax"
    ]
    base = alt.Chart(theme.data(shown)).encode(
        x=alt.X("logit:N", title="logit", sort=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("weight:Q", title="weight", scale=alt.Scale(domain=[0, 1.08]), axis=alt.Axis(values=[0, 0.5, 1])),
    )
    bars = base.mark_bar(color=theme.SERIES[0], width=60) + base.mark_text(dy=-9, fontSize=13).encode(
        text=alt.Text("weight:Q", format=".3~g")
    )
    chart = (
        bars.properties(width=260, height=240)
        .facet(column=alt.Column("softmax:N", title=None, sort=[row["softmax"] for row in shown]))
        .resolve_scale(x="independent")
    )
    return theme.finish(chart, finding, "Computed in float64; the notes round to two decimals.")
