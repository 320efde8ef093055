"""The top weight of a real model's heads, from the least to the most, under each scale."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    shown = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        heads = sorted((row for row in rows if row["rule"] == rule), key=lambda row: row["top_weight"])
        shown += [{**row, "rank": place} for place, row in enumerate(heads, start=1)]
    shown = theme.labelled(shown)
    colour = theme.by_rule(shown)
    last = max(row["rank"] for row in shown)
    x = alt.X("rank:Q", title="heads, sorted", scale=alt.Scale(domain=[0, last + 1]), axis=alt.Axis(grid=False))
    chart = marks.labelled_line(0.9, "almost all: 0.9") + marks.joined(shown, x, "top_weight", colour) + marks.measured(
        shown, x, "top_weight", "largest weight of a query, mean over queries", colour
    )  # fmt: skip
    note = (
        f"MiniLM-L6, {last} heads, d_k = {rows[0]['d']}, trained with 1/√d_k; "
        "the scale of every layer is replaced while it reads sentences."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
