"""A small language model while it trains: held-out loss at the lowest and highest learning rate, entropy, largest logit."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import theme

WORDS = {"small": "projections drawn with std 0.02", "unit": "unit-variance q and k"}
SIZE = {"width": 140, "height": 170}


def draw(rows: theme.Rows, finding: str) -> Any:
    rates = sorted({row["lr"] for row in rows})
    lines = []
    for init in [name for name in WORDS if any(row["init"] == name for row in rows)]:
        part = theme.labelled([row for row in rows if row["init"] == init and row["step"] > 0])
        ends = dict.fromkeys((rates[0], rates[-1]))
        panels = [_panel(part, rate, "held_out", f"held-out loss, lr {rate:g}") for rate in ends]
        panels += [_panel(part, rates[-1], "entropy", f"entropy, lr {rates[-1]:g}")]
        panels += [_panel(part, rates[-1], "peak", f"largest |logit|, lr {rates[-1]:g}", log=True)]
        heading = alt.TitleParams(WORDS[init], fontSize=13, fontWeight="normal", anchor="start")
        lines.append(alt.hconcat(*panels, title=heading, spacing=12))
    first = rows[0]
    note = (
        f"{first['layers']} layers, width {first['d_model']}, d_k = {first['d_model'] // first['heads']}, on Python's source; "
        "nats; one line per seed."
    )
    return theme.finish(alt.vconcat(*lines), finding, note)


def _panel(rows: theme.Rows, rate: float, column: str, title: str, log: bool = False) -> Any:
    shown = [row for row in rows if row["lr"] == rate]
    values = [row[column] for row in shown]
    axis = theme.decades(min(values), max(values)) if log else alt.Axis(tickCount=5)
    scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
    base = alt.Chart(theme.data(shown)).encode(
        x=alt.X("step:Q", title="step", scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=4)),
        y=alt.Y(f"{column}:Q", title=title, scale=scale, axis=axis),
        color=theme.by_rule(shown),
        detail="seed:N",
    )
    return base.mark_line(strokeWidth=1.6).properties(**SIZE)
