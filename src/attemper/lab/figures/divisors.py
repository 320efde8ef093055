"""How many keys share a query's weight, and what a key equal to the query gets, against d_k, under each divisor."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    heads = max(row["heads"] for row in rows)
    shown = theme.labelled([row for row in rows if row["heads"] == heads])
    colour = theme.by_rule(shown)
    n = max(row["n"] for row in shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    many = (
        marks.labelled_line(n, f"all {n} keys alike", at=40)
        + marks.joined(shown, x, "effective_keys", colour, nested=True)
        + marks.measured(shown, x, "effective_keys", "effective keys, exp(entropy)", colour, log=True, nested=True)
    )
    found = marks.joined(shown, x, "aligned_weight", colour, nested=True) + marks.measured(
        shown, x, "aligned_weight", f"weight of a key equal to q, beside {n} others", colour, log=True, nested=True
    )
    half = theme.WIDTH // 2 - 20
    chart = alt.hconcat(many.properties(width=half, height=300), found.properties(width=half, height=300))
    note = f"n = {n}, {heads} heads (d_model = {heads} d_k), unit-variance q and k, before training; 95 % intervals."
    return theme.finish(chart, finding, note)
