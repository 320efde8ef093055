"""How many keys share a query's weight, against d_k, under each divisor."""

from __future__ import annotations

from typing import Any

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    heads = max(row["heads"] for row in rows)
    shown = theme.labelled([row for row in rows if row["heads"] == heads])
    colour = theme.by_rule(shown)
    n = max(row["n"] for row in shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    chart = (
        marks.labelled_line(n, f"all {n} keys alike")
        + marks.joined(shown, x, "effective_keys", colour)
        + marks.measured(shown, x, "effective_keys", "effective keys, exp(entropy)", colour, log=True)
    )
    note = (
        f"n = {n}, {heads} heads (d_model = {heads} d_k), unit-variance q and k, before training. "
        "1/d_k and 1/√d_model lie on one another, at the top."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
