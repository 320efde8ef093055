"""Held-out loss against the forced scale κ of the logits; and some of them while they train."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from . import marks, panels, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    kappas = sorted({row["kappa"] for row in rows})
    shown = []
    for kappa in kappas:
        last = theme.last_losses([row for row in rows if row["kappa"] == kappa])
        shown.append({"kappa": kappa, "name": "measured", **theme.spread("loss", list(last.values()))})
    x = theme.powers("kappa", "κ, the forced scale of the logits", kappas)
    colour = theme.series("name", "", ["measured"]).legend(None)
    top = (
        marks.labelled_line(1e3, "Wortsman", axis="x", at=185)
        + marks.labelled_line(rows[0]["bigram"], "counting pairs of characters")
        + marks.joined(shown, x, "loss", colour)
        + marks.measured(shown, x, "loss", "held-out loss, nats", colour, zero=False)
    )
    decades = [kappa for kappa in kappas if kappa >= 1 and math.log10(kappa).is_integer()][-5:] or kappas[:5]
    series = [{**row, "name": f"{row['kappa']:g}"} for row in rows if row["kappa"] in decades]
    below = panels.draw(
        {"": series}, theme.series("name", "κ", [f"{kappa:g}" for kappa in decades]), "name", panels.LANGUAGE
    )
    note = (
        "Language model on Python's standard library; q and k at an RMS of √κ each, divided by √d_k, so that logits reach κ√d_k. "
        f"Dashed, at 1000: where Wortsman et al. 2023 saw the loss deteriorate. {panels.ON_THE_WAY}"
    )
    chart = alt.vconcat(alt.layer(top).properties(width=theme.WIDTH, height=200), below, spacing=24)
    return theme.finish(chart.resolve_scale(color="independent"), finding, note)
