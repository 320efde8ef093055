"""What leaving the scale out costs, against the number of layers; and the shallowest and deepest model while they train."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, panels, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    shown, series = [], {}
    for layers in sorted({row["layers"] for row in rows}):
        part = [row for row in rows if row["layers"] == layers]
        best = theme.best_rates(part, "rule", "held_out", larger=False)
        series[layers] = theme.labelled([row for row in part if row["lr"] == best[row["rule"]]])
        last = max(row["step"] for row in part)
        for name in best:
            values = [row["held_out"] for row in series[layers] if row["rule"] == name and row["step"] == last]
            shown.append({"layers": layers, "rule": name, **theme.spread("loss", values)})
    shown = theme.labelled(shown)
    colour = theme.by_rule(shown)
    x = theme.powers("layers", "layers", [row["layers"] for row in shown])
    points = marks.joined(shown, x, "loss", colour) + marks.measured(
        shown, x, "loss", "held-out loss, nats", colour, zero=False
    )
    ends = {f"depth {layers}": series[layers] for layers in dict.fromkeys((min(series), max(series)))}
    below = panels.draw(ends, colour, "rule_label", panels.LANGUAGE)
    note = (
        "Language model on Python's standard library, unit-variance q and k; each rule at its best learning rate. "
        f"Top: median and range over seeds. {panels.NOTE}"
    )
    return theme.finish(
        alt.vconcat(alt.layer(points).properties(width=theme.WIDTH, height=200), below, spacing=24), finding, note
    )
