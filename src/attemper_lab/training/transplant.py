"""transplant: with the logits' scale forced to κ, from which κ on does training suffer? After Wortsman et al. 2023, figure 10."""

from __future__ import annotations

import math
from typing import Any

from ..engine.experiment import Cell, Expectation, Row, Rows, define, heads_divide
from ..figures import alt, marks, panels, theme
from ..maths.stats import over_seeds
from .language import train
from .runs import last_loss, runs, survived

WORSE = 0.1  # nats above the best


def measure(cell: Cell) -> list[Row]:
    return train(cell, "kappa", float(cell["kappa"]))


def losses(rows: Rows) -> dict[float, dict[str, float]]:
    """κ → the last held-out loss, median, least and most over seeds; infinite for a run that diverged."""
    loss_of = {}
    for (kappa,), part in runs(rows, "kappa").items():
        last = [last_loss(run) for run in runs(part, "seed").values()]
        loss_of[kappa] = over_seeds("loss", last)
    return dict(sorted(loss_of.items()))


def knee(rows: Rows) -> float:
    """The first κ, from the best on, at which the median loss is a tenth of a nat above the best; NaN when there is none."""
    loss_of = losses(rows)
    best = min(loss_of, key=lambda kappa: loss_of[kappa]["loss"])
    worse = (kappa for kappa in loss_of if kappa > best and loss_of[kappa]["loss"] > loss_of[best]["loss"] + WORSE)
    return min(worse, default=math.nan)


def expect(rows: Rows) -> list[Expectation]:
    quantity = "log₁₀ of the κ at which held-out loss is 0.1 nats above its best"
    source = "Wortsman et al. 2023, arXiv:2309.14322, fig. 10: near 1e3, with 10 M parameters"
    return [Expectation(quantity, 3.0, math.log10(knee(rows)), 0.5, source, "half a decade")]


def finding(rows: Rows) -> str:
    lost = survived(rows, "kappa", "seed")
    loss_of, pairs, limit = losses(rows), rows[0]["bigram"], knee(rows)
    best, last = min(loss_of, key=lambda kappa: loss_of[kappa]["loss"]), max(loss_of)
    if not math.isfinite(loss_of[best]["loss"]):
        return f"At no κ is there a held-out loss to speak of{lost}"
    words = f"Held-out loss is lowest at κ = {best:g} ({loss_of[best]['loss']:.2f} nats)"
    words += f", 0.1 nats higher from κ = {limit:g} on" if math.isfinite(limit) else ", and nowhere 0.1 nats higher"
    if last != best and math.isfinite(loss_of[last]["loss"]):
        compared = "worse" if loss_of[last]["loss"] > pairs else "better"
        words += f"; at {last:g} it is {loss_of[last]['loss']:.2f}, {compared} than counting pairs of characters ({pairs:.2f})"
    return words + lost


def draw(rows: Rows, finding: str) -> Any:
    """Held-out loss against the forced scale κ of the logits; and some of them while they train."""
    shown: list[Row] = [{"kappa": kappa, "name": "measured", **loss} for kappa, loss in losses(rows).items()]
    kappas = [row["kappa"] for row in shown]
    x = theme.powers("kappa", "κ, the forced scale of the logits", kappas)
    colour = theme.series("name", "", ["measured"]).legend(None)
    top = (
        marks.labelled_line(1e3, "Wortsman", axis="x", at=185)
        + marks.labelled_line(rows[0]["bigram"], "counting pairs of characters")
        + marks.curve(shown, x, "loss", "held-out loss, nats", colour, zero=False)
    )
    decades = [kappa for kappa in kappas if kappa >= 1 and math.log10(kappa).is_integer()][-5:] or kappas[:5]
    series = [{**row, "name": f"{row['kappa']:g}"} for row in rows if row["kappa"] in decades]
    shades = theme.series("name", "κ", [f"{kappa:g}" for kappa in decades])
    below = panels.draw({"": series}, shades, "name", panels.LANGUAGE)
    note = (
        f"Language model, {rows[0]['length']} characters of Python's source at a time; q and k at an RMS of √κ each, divided by "
        "√d_k, so that logits reach κ√d_k. "
        f"Dashed, at 1000: where Wortsman et al. 2023 saw the loss deteriorate. {panels.ON_THE_WAY}"
    )
    chart = alt.vconcat(alt.layer(top).properties(width=theme.WIDTH, height=200), below, spacing=24)
    return theme.finish(chart.resolve_scale(color="independent"), finding, note)


EXPERIMENT = define(globals(), check=heads_divide)
