"""Recall while it trains: accuracy, entropy, the largest logit and the gradient of W_q, each rule at its best learning rate."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import theme

PANELS = (
    ("accuracy", "accuracy on unseen sequences", False),
    ("entropy", "entropy of the weights, nats", False),
    ("peak", "largest |logit|", True),
    ("w_q_grad", "|dL/dW_q|", True),
)


def draw(rows: theme.Rows, finding: str) -> Any:
    d = max(row["d"] for row in rows)
    best = theme.best_rates([row for row in rows if row["d"] == d], "rule", "accuracy")
    shown = theme.labelled([row for row in rows if row["d"] == d and row["lr"] == best[row["rule"]]])
    colour = theme.by_rule(shown)
    panels = []
    for column, title, log in PANELS:
        values = [max(row[column], 1e-4) for row in shown]
        y = alt.Y(f"{column}:Q", title=title, scale=alt.Scale(type="log" if log else "linear"))
        if log:
            y = y.axis(theme.decades(min(values), max(values)))
        base = alt.Chart(theme.data([{**row, column: max(row[column], 1e-4)} for row in shown])).encode(
            x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False)), y=y, color=colour, detail="seed:N"
        )
        panels.append(
            (base.mark_line(strokeWidth=1.6) + base.mark_point(filled=True, size=22)).properties(width=290, height=190)
        )
    chart = alt.vconcat(alt.hconcat(*panels[:2]), alt.hconcat(*panels[2:]))
    seeds = len({row["seed"] for row in shown})
    note = f"One layer, one head, d = {d}, Adam, unit-variance entries; one line per seed ({seeds})."
    return theme.finish(chart, finding, note)
