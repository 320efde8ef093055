"""gradient: what reaches a query through the softmax — on average, and for the typical query?

Two units: |J dL/dp|, the gradient at the softmax's input, which textbooks speak of; and |dL/dq|, which has the scale as a further
factor. Closed forms of both are in attemper_lab/maths/gradients.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attemper import attention, rule, weights

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import alt, marks, panels, theme
from ..maths import gradients
from ..maths.gradients import UNITS
from ..maths.stats import CHANCE, WIDEST, expect_column, median_over_batches, over_batches
from ..maths.theory import SCALES


def measure(cell: Cell) -> Row:
    d, n, name = int(cell["d"]), int(cell["n"]), str(cell["rule"])
    stream = generator(cell["device"], "gradient", d, n, cell["batches"], cell["seed"])  # the same draws for every rule
    scale = rule(name).scale(head_dim=d)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, device=stream.device)

    lengths_of: dict[str, list[Tensor]] = {unit: [] for unit in UNITS}
    for _ in range(int(cell["batches"])):
        query, key, value, upstream = draw(4, n, d)
        query.requires_grad_()
        output = attention(query, key, value, scale=scale, signs=()).output
        upstream = torch.nn.functional.normalize(upstream, dim=-1)
        (to_query,) = torch.autograd.grad(output, query, upstream)
        p, to_weights = weights(query.detach(), key, scale=scale).double(), (upstream @ value.T).double()
        to_logits = p * (to_weights - (p * to_weights).sum(-1, keepdim=True))  # J dL/dp
        lengths_of["query"].append(to_query.double().norm(dim=-1))
        lengths_of["logits"].append(to_logits.norm(dim=-1))
    exact = gradients.rms(d, n, scale)
    row: Row = {}
    for unit, batches in lengths_of.items():
        lengths = torch.stack(batches)  # (batches, n)
        row |= over_batches(lengths.square()).root(f"{unit}_rms")
        row[f"{unit}_rms_theory"] = exact[unit] if exact else None
        row |= median_over_batches(lengths).columns(f"{unit}_median")
    lengths = torch.stack(lengths_of["query"])
    return {
        **row,
        "query_half": float(torch.stack([_half(length) for length in lengths]).mean()),
        "quantile_10": float(lengths.quantile(0.1)),
        "quantile_90": float(lengths.quantile(0.9)),
        **_projections(d, n, scale, int(cell["projected"]), draw),
    }


def _projections(d: int, n: int, scale: float, draws: int, draw: Callable[..., Tensor]) -> Row:
    """The gradients' sizes at the weights W_q and W_k, at a key, and at a value, whose path does not go through the softmax."""
    half: dict[str, list[Tensor]] = {"w_q_half": [], "w_k_half": []}
    sizes: dict[str, list[Tensor]] = {"value": [], "key": []}
    if not draws:
        return dict.fromkeys([*half, *(f"{name}_{what}" for name in sizes for what in ("median", "rms"))])
    for _ in range(draws):
        tokens, value, upstream = draw(3, n, d)
        value.requires_grad_()
        w_q, w_k = (weight.requires_grad_() for weight in draw(2, d, d) / d**0.5)
        key = tokens @ w_k
        output = attention(tokens @ w_q, key, value, scale=scale, signs=()).output
        wanted = (value, key, w_q, w_k)
        gradients = torch.autograd.grad(output, wanted, torch.nn.functional.normalize(upstream, dim=-1))
        for lengths, gradient in zip(sizes.values(), gradients[:2], strict=True):
            lengths.append(gradient.double().norm(dim=-1))
        for shares, gradient in zip(half.values(), gradients[2:], strict=True):
            shares.append(_half(gradient))
    columns = {name: float(torch.stack(shares).mean()) for name, shares in half.items()}
    for name, lengths in sizes.items():
        every = torch.stack(lengths)
        columns |= {f"{name}_median": float(every.median()), f"{name}_rms": float(every.square().mean().sqrt())}
    return columns


def _half(gradient: Tensor) -> Tensor:
    """The smallest share of the numbers that holds half of the sum of squares."""
    squares = gradient.double().flatten().square().sort(descending=True).values.cumsum(0)
    return ((squares < squares[-1] / 2).sum() + 1) / len(squares)


FORMS = {
    "logits": "closed form: √E‖J‖_F²",
    "query": "closed form: scale √((d_k − 1) E‖J‖_F² + E‖J·Kq/|q|‖²)",
}


def expect(rows: Rows) -> list[Expectation]:
    """The RMS against its closed form, and the median against maths/gradients.py; neither uses these draws.

    A median is left out if its interval is wider than a quarter of it: it would agree with anything.
    """
    expectations = []
    for row in rows:
        scale = float(rule(str(row["rule"])).scale(head_dim=row["d"]))
        law = gradients.median(row["d"], row["n"], scale)
        for unit, words in UNITS.items():
            where = f"{words} {SCALES[row['rule']]}, d_k = {row['d']}, {row['n']} keys"
            if row[f"{unit}_rms_theory"] is not None:
                source = f"{FORMS[unit]}, by quadrature"
                expected = row[f"{unit}_rms_theory"]
                expectations.append(expect_column(row, f"{unit}_rms", f"RMS gradient {where}", expected, source))
            drawn = law[unit].columns("median")
            within = row[f"{unit}_median_reach"] + drawn["median_reach"]
            source, why = "the law without vectors, other draws (attemper_lab/maths/gradients.py)", f"{CHANCE}, of both"
            quantity, measured = f"median gradient {where}", row[f"{unit}_median"]
            if within <= WIDEST * drawn["median"]:
                expectations.append(Expectation(quantity, drawn["median"], measured, within, source, why))
    return expectations


def without_over_with(rows: Rows, column: str, n: int) -> dict[int, float]:
    """d_k → a statistic of the gradient without a scale, over the same with 1/√d_k; both saw the same draws."""
    ratios = {}
    for d in sorted({row["d"] for row in pick(rows, n=n)}):
        bare, scaled = (pick(rows, n=n, d=d, rule=name) for name in ("none", "sqrt_dk"))
        if bare and scaled:
            ratios[d] = bare[0][column] / scaled[0][column]
    return ratios


def finding(rows: Rows) -> str:
    n = max(row["n"] for row in rows)
    typical = without_over_with(rows, "logits_median", n)
    if not typical:
        row = max(pick(rows, n=n), key=lambda row: row["d"])
        return (
            f"At d_k = {row['d']} {SCALES[row['rule']]} the RMS gradient at the softmax's input is "
            f"{row['logits_rms']:.3g}, the median {row['logits_median']:.2g}"
        )
    d = min(typical, key=lambda d: abs(math.log(d / 128)))
    at_query = without_over_with(rows, "query_median", n)[d]
    return (
        f"With {n} keys and d_k = {d} the median gradient at the softmax's input is {typical[d]:.2g} times as large "
        f"without the scale as with it; at q, {at_query:.2g} times"
    )


TITLES = {
    "logits_rms": "at the softmax's input, RMS",
    "logits_median": "at the softmax's input, median query",
    "query_rms": "at q, RMS",
    "query_median": "at q, median query",
}


def draw(rows: Rows, finding: str) -> Any:
    """RMS and median of the gradient at the softmax's input and at q, against d_k, under each rule."""
    n = max(row["n"] for row in rows)
    shown = theme.labelled([{**row, **_theories(row)} for row in rows if row["n"] == n])
    colour = theme.by_rule(shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    half, charts = theme.WIDTH // 2 - 20, {}
    for column, title in TITLES.items():
        points = marks.measured(shown, x, column, "length of the gradient", colour, log=True)
        panel = marks.theory(shown, x, f"{column}_theory", colour, smooth=True) + points
        charts[column] = panel.properties(width=half, height=210, title=panels.heading(title))
    upper = alt.hconcat(charts["logits_rms"], charts["logits_median"]).resolve_scale(y="shared")
    lower = alt.hconcat(charts["query_rms"], charts["query_median"]).resolve_scale(y="shared")
    chart = alt.vconcat(upper, lower)
    note = (
        f"{n} keys, unit-variance q, k, v, upstream gradient of length 1, before training. Points: measured, 95 % intervals. "
        "Lines: closed forms of the RMS, and the median of the law without vectors (attemper_lab/maths/gradients.py)."
    )
    return theme.finish(chart, finding, note)


def _theories(row: Any) -> Row:
    scale = float(rule(str(row["rule"])).scale(head_dim=row["d"]))
    return {f"{unit}_median_theory": law.mean for unit, law in gradients.median(row["d"], row["n"], scale).items()}


EXPERIMENT = define(globals())
