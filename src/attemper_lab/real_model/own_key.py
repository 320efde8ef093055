"""own_key: are the keys those of all other tokens, or is a token's own key among them?"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from ..engine.experiment import Cell, Row, Rows, define
from ..figures import alt, marks, theme
from .sentences import batch, chosen, loaded
from .subspaces import patterns


def measure(cell: Cell) -> list[Row]:
    """What a word gives itself in every head; special tokens are not words."""
    model, _ = loaded(str(cell["device"]))
    own, even = [], []
    for pair in chosen(cell):
        weights = torch.stack(patterns(model, batch(pair, str(cell["device"]))))  # [layers, sentences, heads, n, n]
        words = slice(1, weights.shape[-1] - 1)
        own.append(weights.diagonal(dim1=-2, dim2=-1)[..., words].mean((1, 3)))
        even.append(1 / weights.shape[-1])
    mean = torch.stack(own).mean(0)  # [layers, heads]
    return [
        {"layer": layer, "head": head, "own_weight": weight, "even": statistics.fmean(even)}
        for layer, heads in enumerate(mean.tolist())
        for head, weight in enumerate(heads)
    ]


def finding(rows: Rows) -> str:
    some = sum(row["own_weight"] > 0 for row in rows)
    mean, most = sum(row["own_weight"] for row in rows) / len(rows), max(row["own_weight"] for row in rows)
    return (
        f"In {some} of MiniLM's {len(rows)} heads a word gives itself some weight: {mean:.3f} on average, {most:.2f} at most; "
        f"1/n is {rows[0]['even']:.3f}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """The weight that a word gives itself, head by head, layer by layer."""
    x = alt.X("layer:O", title="layer, from 0", axis=alt.Axis(labelAngle=0))
    points = alt.Chart(theme.data(rows)).mark_point(filled=True, opacity=0.7, size=60, color=theme.SERIES[0]).encode(
        x=x, y=alt.Y("own_weight:Q", title="weight of a word on itself")
    )  # fmt: skip
    chart = marks.labelled_line(rows[0]["even"], "1/n", at=40) + points
    note = "MiniLM-L6, one point per head: means over the words of sentences, special tokens left out."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
