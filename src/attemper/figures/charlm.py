"""A small language model: held-out loss, entropy and the largest logit while it trains, per initialisation."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import theme

WORDS = {"small": "projections of std 0.02", "unit": "unit-variance q and k"}
PANELS = (
    ("held_out", "held-out loss, nats", False),
    ("entropy", "entropy of the weights, nats", False),
    ("peak", "largest |logit|", True),
)


def draw(rows: theme.Rows, finding: str) -> Any:
    lines = []
    for init in [name for name in WORDS if any(row["init"] == name for row in rows)]:
        part = [row for row in rows if row["init"] == init]
        best = theme.best_rates(part, "rule", "held_out", larger=False)
        shown = theme.labelled([row for row in part if row["lr"] == best[row["rule"]] and row["step"] > 0])
        panels = []
        for column, title, log in PANELS:
            scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
            base = alt.Chart(theme.data(shown)).encode(
                x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=5)),
                y=alt.Y(f"{column}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=5)),
                color=theme.by_rule(shown),
                detail="seed:N",
            )
            panels.append(base.mark_line(strokeWidth=1.6).properties(width=180, height=190))
        heading = alt.TitleParams(WORDS[init], fontSize=13, fontWeight="normal", anchor="start")
        lines.append(alt.hconcat(*panels, title=heading))
    first = rows[0]
    note = (
        f"{first['layers']} layers, width {first['d_model']}, d_k = {first['d_model'] // first['heads']}, on Python's source; "
        "each rule at its own best learning rate; one line per seed."
    )
    return theme.finish(alt.vconcat(*lines), finding, note)
