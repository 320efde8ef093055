"""Held-out loss against the forced scale κ of the logits."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    last = {(row["kappa"], row["seed"]): row["held_out"] for row in rows}  # rows come in the order of steps
    shown = []
    for kappa in sorted({row["kappa"] for row in rows}):
        values = [value for (one, _), value in last.items() if one == kappa]
        shown.append({"kappa": kappa, "name": "measured", **theme.spread("loss", values)})
    x = theme.powers("kappa", "κ, the forced scale of the logits", [row["kappa"] for row in shown])
    colour = theme.series("name", "", ["measured"]).legend(None)
    chart = (
        marks.labelled_line(1e3, "Wortsman", axis="x")
        + marks.labelled_line(rows[0]["bigram"], "counting pairs of characters")
        + marks.joined(shown, x, "loss", colour)
        + marks.measured(shown, x, "loss", "held-out loss, nats", colour, zero=False)
    )
    note = (
        "Language model on Python's standard library; q and k at an RMS of √κ each, divided by √d_k; range over seeds. "
        "Dashed, at 1000: where Wortsman et al. 2023 saw the loss deteriorate."
    )
    return theme.finish(alt.layer(chart).properties(width=theme.WIDTH, height=300), finding, note)
