"""init: is folding 1/√d_k into W_q's initialisation, as T5 does, the same function before training?"""

from __future__ import annotations

import math
from typing import Any

import torch

from attemper import attention

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator
from ..figures import alt, marks, theme

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def measure(cell: Cell) -> Row:
    d, width, dtype = int(cell["d"]), int(cell["d_model"]), DTYPES[str(cell["dtype"])]
    stream = generator(cell["device"], "init", d, width, cell["seed"])

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=stream, device=stream.device, dtype=torch.float64).to(dtype)

    tokens = draw(32, width)
    w_q, w_k, w_v = (draw(width, d) / math.sqrt(width) for _ in range(3))
    key, value = tokens @ w_k, tokens @ w_v
    scaled = attention(tokens @ w_q, key, value, scale=1 / math.sqrt(d))
    folded = attention(tokens @ (w_q / math.sqrt(d)), key, value, scale=1.0)
    largest = float(scaled.output.abs().max())
    return {
        "difference": float((scaled.output - folded.output).abs().max()) / largest,
        "identical": bool(torch.equal(scaled.output, folded.output)),
        "logit_std_scaled": float(scaled.vitals.variance.mean().sqrt()),
        "logit_std_folded": float(folded.vitals.variance.mean().sqrt()),
        "rounding": torch.finfo(dtype).eps,
    }


def expect(rows: Rows) -> list[Expectation]:
    names = [f"folded output against scaled, d_k = {row['d']}, {row['dtype']}" for row in rows]
    source, why = "Raffel et al. 2020 (T5): W_q drawn with std 1/√(d_model d_k), no divisor", "64 units of rounding"
    return [
        Expectation(name, 0.0, row["difference"], 64 * row["rounding"], source, why)
        for row, name in zip(rows, names, strict=True)
    ]


def finding(rows: Rows) -> str:
    exact = sorted({row["d"] for row in rows if row["identical"]})
    worst = max(row["difference"] / row["rounding"] for row in rows)
    words = f"; bit for bit at d_k = {', '.join(map(str, exact))}, where √d_k is a power of two" if exact else ""
    return f"Folding the scale into W_q gives the same function at step 0, to {worst:.0f} units of rounding{words}"


def draw(rows: Rows, finding: str) -> Any:
    """The difference between a folded and an explicit scale at step 0, in units of rounding."""
    shown = [{**row, "units": row["difference"] / row["rounding"]} for row in rows]
    x = theme.powers("d", "head dim d_k", [row["d"] for row in rows])
    names = [name for name in ("float32", "float64") if any(row["dtype"] == name for row in rows)]
    colour = theme.series("dtype", "dtype", names)
    y = alt.Y("units:Q", title="largest difference ÷ rounding unit")
    points = (
        alt.Chart(theme.data(shown))
        .mark_point(size=90, strokeWidth=2)
        .encode(x=x, y=y, color=colour, shape=alt.Shape("dtype:N", title="dtype", scale=alt.Scale(domain=names)))
    )
    chart = marks.labelled_line(0.0, "identical bits", at=330) + points
    note = "Output of attention with W_q/√d_k and no divisor, against W_q and the divisor √d_k; relative to the largest output."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
