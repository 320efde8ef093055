"""gradient: what reaches a query through the softmax — on average, and for the typical query?

The upstream gradient has length 1 and the values unit variance, so dL/dp is N(0, 1) per key and the mean of |dL/dq|² is
scale² · d_k · E‖J‖_F².
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...attention import attention, weights
from ...scale import rule
from ..engine.experiment import Cell, Expectation, Parameter, Row, Rows, define, generator, pick
from ..maths.stats import expect_column, over_batches

SMALL = 0.01  # a share of the RMS


def measure(cell: Cell) -> Row:
    d, n, name = int(cell["d"]), int(cell["n"]), str(cell["rule"])
    stream = generator(cell["device"], "gradient", d, n, cell["batches"], cell["seed"])  # the same draws for every rule
    scale = rule(name).scale(head_dim=d)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, device=stream.device)

    to_query, jacobians = [], []
    for _ in range(int(cell["batches"])):
        query, key, value, upstream = draw(4, n, d)
        query.requires_grad_()
        output = attention(query, key, value, scale=scale, signs=()).output
        (found,) = torch.autograd.grad(output, query, torch.nn.functional.normalize(upstream, dim=-1))
        to_query.append(found.norm(dim=-1))
        p = weights(query.detach(), key, scale=scale).double()
        p2 = p.square().sum(-1)
        jacobians.append(p2 - 2 * p.pow(3).sum(-1) + p2.square())
    lengths = torch.stack(to_query).double()  # (batches, n)
    square = over_batches(lengths.square())
    rms = square.root("rms")
    # the median of all queries, and its error from the medians of the batches
    median = over_batches(lengths.median(dim=1).values)._replace(mean=float(lengths.median()))
    return {
        **rms,
        "rms_theory": scale * (d * float(torch.stack(jacobians).mean().clamp(min=0))) ** 0.5,
        **median.columns("median"),
        "small_share": float((lengths < SMALL * rms["rms"]).double().mean()),
        "quantile_10": float(lengths.quantile(0.1)),
        "quantile_90": float(lengths.quantile(0.9)),
        **_projections(d, n, scale, int(cell["projected"]), draw),
    }


def _projections(d: int, n: int, scale: float, draws: int, draw: Callable[..., Tensor]) -> Row:
    """The same for the weights W_q and W_k, and for the values, whose path does not go through the softmax."""
    small: dict[str, list[Tensor]] = {"w_q_small": [], "w_k_small": []}
    to_value = []
    if not draws:
        return {"value_rms": None, **dict.fromkeys(small)}
    for _ in range(draws):
        tokens, value, upstream = draw(3, n, d)
        value.requires_grad_()
        w_q, w_k = (one.requires_grad_() for one in draw(2, d, d) / d**0.5)
        output = attention(tokens @ w_q, tokens @ w_k, value, scale=scale, signs=()).output
        found = torch.autograd.grad(output, (value, w_q, w_k), torch.nn.functional.normalize(upstream, dim=-1))
        to_value.append(found[0].double().square().sum(-1))
        small["w_q_small"].append(_small(found[1]))
        small["w_k_small"].append(_small(found[2]))
    return {
        "value_rms": float(torch.stack(to_value).mean().sqrt()),
        **{name: float(torch.stack(shares).mean()) for name, shares in small.items()},
    }


def _small(gradient: Tensor) -> Tensor:
    """The share of a matrix's entries whose gradient is under 1 % of the RMS; 0.8 % of a normal law's are."""
    rms = gradient.square().mean().sqrt()
    return (gradient.abs() < SMALL * rms).double().mean()


def expect(rows: Rows) -> list[Expectation]:
    names = [f"RMS of |dL/dq|, rule {row['rule']}, d_k = {row['d']}, n = {row['n']}" for row in rows]
    source = "closed form: scale √(d_k E‖J‖_F²)"
    return [expect_column(row, "rms", name, row["rms_theory"], source) for row, name in zip(rows, names, strict=True)]


def without_over_with(rows: Rows, column: str, n: int) -> dict[int, float]:
    """d_k → a statistic of the gradient without a scale, over the same with 1/√d_k; both saw the same draws."""
    found = {}
    for d in sorted({row["d"] for row in pick(rows, n=n)}):
        bare, scaled = (pick(rows, n=n, d=d, rule=name) for name in ("none", "sqrt_dk"))
        if bare and scaled:
            found[d] = bare[0][column] / scaled[0][column]
    return found


def crossing(rows: Rows, n: int) -> float:
    """The d_k from which on the median query's gradient is smaller without the scale than with it, between the measured ones.

    0 when it is smaller at all of them, infinite when it is larger at the last.
    """
    ratios = list(without_over_with(rows, "median", n).items())
    if not ratios or ratios[-1][1] >= 1:
        return math.inf
    for (low, above), (high, below) in reversed(list(itertools.pairwise(ratios))):
        if above >= 1:
            share = math.log(above) / (math.log(above) - math.log(max(below, 1e-30)))
            return float(low * (high / low) ** share)
    return 0.0


def finding(rows: Rows) -> str:
    n = max(row["n"] for row in rows)
    mean, typical = (without_over_with(rows, column, n) for column in ("rms", "median"))
    if not mean:
        row = max(pick(rows, n=n), key=lambda one: one["d"])
        return (
            f"At d_k = {row['d']} under rule {row['rule']} the RMS of |dL/dq| is {row['rms']:.3g}, the median "
            f"{row['median']:.2g}"
        )
    last, common = max(mean), min(mean, key=lambda d: abs(math.log(d / 64)))
    crossed = crossing(rows, n)
    two = last != common
    return (
        f"Without the scale the RMS of |dL/dq| is {mean[common]:.3g} times the scaled one at d_k = {common}"
        + (f" and {mean[last]:.3g} times at {last}" if two else "")
        + f"; the median query gets {typical[common]:.2g} times"
        + (f" and {typical[last]:.2g} times" if two else "")
        + (f": less than with it from d_k ≈ {crossed:.0f} on" if 0 < crossed < math.inf else "")
    )


FLOOR = 1e-5  # a median of zero has no place on a logarithmic axis


def draw(rows: Rows, finding: str) -> Any:
    """RMS and median of the gradient that reaches a query, against d_k, under each rule."""
    import altair as alt

    from ..figures import marks, theme

    shown = theme.labelled([{**row, "median": max(row["median"], FLOOR)} for row in rows])
    colour = theme.by_rule(shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    mean = marks.theory(shown, x, "rms_theory", colour) + marks.measured(shown, x, "rms", "|dL/dq|", colour, log=True)
    median = marks.curve(shown, x, "median", "|dL/dq|", colour, log=True)
    half = theme.WIDTH // 2 - 20
    panels = [
        panel.properties(width=half, height=300, title=alt.TitleParams(title, fontSize=13, fontWeight="normal"))
        for panel, title in ((mean, "root mean square over queries"), (median, "median query"))
    ]
    chart = alt.hconcat(*panels).resolve_scale(y="shared")
    n = max(row["n"] for row in rows)
    note = f"n = {n}, unit-variance q, k, v, upstream gradient of length 1. Left, lines: scale √(d_k E‖J‖_F²)."
    return theme.finish(chart, finding, note)


EXPERIMENT = define(
    __name__,
    question="What gradient reaches a query through the softmax, on average and typically?",
    claims=("C6", "C7", "C22"),
    parameters=(
        Parameter("d", (16, 64, 128, 256, 512, 1024), "the head dim, d_k", least=1),
        Parameter("n", (128,), "number of keys, and of queries", least=2, hint="one key gets no gradient"),
        Parameter("rule", ("none", "sqrt_dk", "dk"), "the scale's rule", choices=("none", "sqrt_dk", "dk")),
        Parameter("batches", (48,), "independent draws of queries, keys and values", least=2, hint="one has no error"),
        Parameter("projected", (6,), "draws with W_q and W_k, whose d×d products take most of the time", least=0),
    ),
)
