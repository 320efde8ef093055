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
        scaled, bare = (
            theme.last_losses([row for row in series[layers] if row["rule"] == name]) for name in ("sqrt_dk", "none")
        )
        apart = [bare[seed] - scaled[seed] for seed in scaled if seed in bare]
        shown.append({"layers": layers, "name": "none less 1/√d_k", **theme.spread("cost", apart)})
    x = theme.powers("layers", "layers", list(series))
    one = theme.series("name", "", ["none less 1/√d_k"]).legend(None)
    points = (
        marks.labelled_line(0.0, "no cost")
        + marks.joined(shown, x, "cost", one)
        + marks.measured(shown, x, "cost", "none less 1/√d_k, nats", one)
    )
    ends = {f"depth {layers}": series[layers] for layers in dict.fromkeys((min(series), max(series)))}
    colour = theme.by_rule([row for part in ends.values() for row in part])
    below = panels.draw(ends, colour, "rule_label", panels.LANGUAGE)
    note = (
        "Language model on Python's standard library, unit-variance q and k; each rule at its best learning rate. "
        f"Top: the difference of held-out losses, median and range over seeds. {panels.ON_THE_WAY}"
    )
    chart = alt.vconcat(alt.layer(points).properties(width=theme.WIDTH, height=200), below, spacing=24)
    return theme.finish(chart.resolve_scale(color="independent"), finding, note)
