"""worked: two softmaxes that the notes work out (docs/notes.md), computed, and the shapes of one pass."""

from __future__ import annotations

from typing import Any

import torch

from attemper import MultiHeadAttention, attention

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, heads_divide, pick
from ..figures import alt, theme

SOFTMAXES = {"7, 3": ((7.0, 3.0), (0.98, 0.02)), "25, 2, -3": ((25.0, 2.0, -3.0), (1.0, 0.0, 0.0))}
"""Logits, and the weights that are given for them, to two decimals."""
SOURCES = {"7, 3": "docs/notes.md, note 003", "25, 2, -3": "docs/notes.md, note 004"}
"""Who gives them."""


def measure(cell: Cell) -> list[Row]:
    rows: list[Row] = []
    for name, (logits, claimed) in SOFTMAXES.items():
        weights = torch.softmax(torch.tensor(logits, dtype=torch.float64, device=str(cell["device"])), 0).tolist()
        for index, (weight, said) in enumerate(zip(weights, claimed, strict=True)):
            rows.append({"quantity": "softmax", "example": name, "place": index, "value": weight, "said": said})
    return rows + _shapes(int(cell["d_model"]), int(cell["heads"]), cell)


def _shapes(width: int, heads: int, cell: Cell) -> list[Row]:
    """ "Love Apple phones": [3 × 512] · [512 × 64] → [3 × 64] → [3 × 3] → [3 × 64], and the heads joined → [3 × 512]."""
    stream = generator(cell["device"], "worked", width, heads, cell["seed"])
    tokens = torch.randn(1, 3, width, generator=stream, device=stream.device)
    block = MultiHeadAttention(width, heads, batch_first=True, device=stream.device)
    with torch.no_grad():
        output, weights = block(tokens, tokens, tokens, average_attn_weights=False)
    single_head = tokens @ torch.randn(3, width, width // heads, generator=stream, device=stream.device) / width**0.5
    alone = attention(*(part.unsqueeze(0) for part in single_head)).output  # query, key and value of one head
    widths = {"input": tokens.shape[-1], "one head": alone.shape[-1], "heads joined": output.shape[-1]}
    assert weights is not None
    rows: list[Row] = [
        {"quantity": "width", "example": name, "place": 0, "value": float(size), "said": None}
        for name, size in widths.items()
    ]
    rows.append(
        {"quantity": "weights", "example": "per head", "place": 0, "value": float(weights.shape[-1]), "said": 3.0}
    )
    return rows


def expect(rows: Rows) -> list[Expectation]:
    shown = pick(rows, quantity="softmax")
    names = [f"softmax([{row['example']}]), weight {row['place'] + 1}" for row in shown]
    return [
        Expectation(name, row["said"], row["value"], 0.005, SOURCES[row["example"]], "two decimals")
        for row, name in zip(shown, names, strict=True)
    ]


def finding(rows: Rows) -> str:
    top, rest = (row["value"] for row in pick(rows, quantity="softmax", example="7, 3"))
    widths = {row["example"]: int(row["value"]) for row in pick(rows, quantity="width")}
    return (
        f"The worked examples come out as written: softmax([7, 3]) = [{top:.3f}, {rest:.3f}], and {rows[0]['heads']} heads of "
        f"{widths['one head']} numbers join to {widths['heads joined']}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """The two softmaxes, and the shapes of one pass over three tokens, as bars."""
    softmaxes = [(str(row["example"]), row["place"], row["value"]) for row in pick(rows, quantity="softmax")]
    shown = [
        {"softmax": f"softmax([{example}])", "logit": example.split(", ")[place], "weight": weight}
        for example, place, weight in softmaxes
    ]
    base = alt.Chart(theme.data(shown)).encode(
        x=alt.X("logit:N", title="logit", sort=None, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("weight:Q", title="weight", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(values=[0, 0.5, 1])),
    )
    bars = base.mark_bar(color=theme.SERIES[0], width=60) + base.mark_text(dy=-9, fontSize=13).encode(
        text=alt.Text("weight:Q", format=".3~g")
    )
    softmax = (
        bars.properties(width=170, height=200)
        .facet(column=alt.Column("softmax:N", title=None, sort=[row["softmax"] for row in shown]))
        .resolve_scale(x="independent")
    )
    note = "Left: computed in float64. Right: the shapes of one pass over three tokens."
    return theme.finish(alt.hconcat(softmax, _drawn_shapes(rows), spacing=30), finding, note)


def _drawn_shapes(rows: Rows) -> Any:
    """Numbers per token, step by step: tokens, q, k and v of a head, its weights, its output, the heads joined."""
    widths = {row["example"]: int(row["value"]) for row in pick(rows, quantity="width")}
    single_head, heads = widths["one head"], rows[0]["heads"]
    keys = int(pick(rows, quantity="weights")[0]["value"])
    steps = (
        ("tokens", widths["input"]), ("q, k, v of a head", single_head), ("its weights", keys), ("its output", single_head),
        (f"{heads} heads joined", widths["heads joined"]),
    )  # fmt: skip
    shown = [{"step": name, "numbers": size, "shape": f"{keys} × {size}"} for name, size in steps]
    base = alt.Chart(theme.data(shown)).encode(
        y=alt.Y("step:N", title=None, sort=None), x=alt.X("numbers:Q", title="numbers per token")
    )
    text = base.mark_text(align="left", dx=5, fontSize=13).encode(text="shape:N")
    return (base.mark_bar(color=theme.SERIES[0], height=22) + text).properties(width=200, height=200)


EXPERIMENT = define(globals(), check=heads_divide)
