"""bounded: when logits cannot exceed a bound, how much weight can one of n keys get at most?

The measurement makes the best case: one key that scores highest, all others lowest, through the score itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper import Vitals, additive_attention, attention, cosine_attention

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import alt, marks, theme
from ..maths import theory

WIDTH = 8
HUGE = 1e4  # far beyond the bound: tanh is 1, the softcap is at its cap


def measure(cell: Cell) -> Row:
    score, bound, n = str(cell["score"]), float(cell["bound"]), int(cell["n"])
    stream = generator(cell["device"], "bounded", score, bound, n, cell["seed"])
    direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=stream, device=stream.device), dim=0)
    weight = torch.randn(WIDTH, generator=stream, device=stream.device)
    weight = weight * bound / weight.abs().sum()
    keys = _one_against_all(score, direction, weight, n)
    best, others = (_signs(score, bound, direction, weight, some) for some in (keys, keys[1:]))
    return {
        "largest_score": float(best.peak),
        "smallest_score": float(others.peak),
        "top_weight": float(best.top_weight),
        "top_weight_theory": theory.top_weight_cap(bound, n),
        "bound_for_90": theory.bound_for(0.9, n),
    }


def _one_against_all(score: str, direction: Tensor, weight: Tensor, n: int) -> Tensor:
    """Keys of which the first scores highest and the others lowest."""
    toward = HUGE * (weight.sign() if score == "additive" else direction)
    return torch.cat([toward.unsqueeze(0), -toward.expand(n - 1, WIDTH)])


def _signs(score: str, bound: float, query: Tensor, weight: Tensor, key: Tensor) -> Vitals:
    query = query.unsqueeze(0)
    value = key[:, :1]  # attention wants values; the signs do not depend on them
    if score == "cosine":
        return cosine_attention(query, key, value, scale=bound).vitals
    if score == "softcap":
        return attention(query, key, value, scale=1.0, softcap=bound).vitals
    return additive_attention(query, key, value, weight).vitals


def expect(rows: Rows) -> list[Expectation]:
    expectations = []
    for row in rows:
        label = f"{row['score']}, bound {row['bound']:.4g}, n = {row['n']}"
        form, source, why = row["top_weight_theory"], "closed form: 1/(1 + (n−1)e^(−2·bound))", "float32 rounding"
        expectations.append(Expectation(f"largest weight, {label}", form, row["top_weight"], 1e-4 * form, source, why))
        added = row["score"] == "additive"
        name, source = ("‖w‖₁", "closed form: Σ|w| · 1") if added else ("the bound", "definition")
        for which, end in (("largest", row["bound"]), ("smallest", -row["bound"])):
            quantity, within = f"{which} score against {name}, {label}", 1e-5 * row["bound"]
            expectations.append(Expectation(quantity, end, row[f"{which}_score"], within, source, why))
    return expectations


def finding(rows: Rows) -> str:
    n = min((row["n"] for row in rows), key=lambda size: abs(size - 1024))
    cosine = pick(rows, score="cosine", bound=1.0, n=n)
    largest = max((row["largest_score"] for row in pick(rows, score="additive")), default=0.0)
    if cosine:
        return f"Logits within ±1, as pure cosines are, give one of {n} keys at most {cosine[0]['top_weight']:.2%} of the weight"
    if largest:
        return f"An additive score reached {largest:.3g}: its bound is not 1 but Σ|w|"
    return f"With {n} keys a top weight of 90 % needs a bound of {pick(rows, n=n)[0]['bound_for_90']:.2f}"


POINTS = 120  # of a theory line, however far it goes


def draw(rows: Rows, finding: str) -> Any:
    """The largest weight that bounded logits can give, against the bound."""
    shown, colour = theme.by_keys(rows)
    x = alt.X("bound:Q", title="bound on the logit: cosine's scale, the softcap, or Σ|w|", axis=alt.Axis(tickCount=10))
    last = max(row["bound"] for row in rows)
    grid = [
        {"bound": bound, "keys": f"{n} keys", "form": theory.top_weight_cap(bound, n)}
        for n in sorted({row["n"] for row in rows})
        for bound in (last * i / POINTS for i in range(POINTS + 1))
    ]
    shape = alt.Shape("score:N", title="score")
    weight = alt.Y("top_weight:Q", title="largest weight of one key", axis=alt.Axis(format=".0%"))
    points = alt.Chart(theme.data(shown)).mark_point(size=90, strokeWidth=2).encode(
        x=x, y=weight.scale(domain=[0, 1]), color=colour, shape=shape
    )  # fmt: skip
    chart = marks.theory(grid, x, "form", colour) + points
    note = "Lines: 1/(1 + (n−1)e^(−2·bound)). Points: the best case, measured through each score; the three scores coincide."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
