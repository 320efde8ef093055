"""gradient: what reaches a query through the softmax — on average, and for the typical query?

The upstream gradient has length 1 and the values unit variance, so dL/dp is N(0, 1) per key and the mean of |dL/dq|² is
scale² · d_k · E‖J‖_F².
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..attention import attention, weights
from ..scale import rule
from .experiment import DEVICE, SEED, Cell, Expectation, Experiment, Parameter, Row, Rows, generator, pick
from .stats import over_batches, reach

SMALL = 0.01  # a share of the RMS
PROJECTED = 6  # batches with projections: their d×d products take most of the time


def measure(cell: Cell) -> list[Row]:
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
    rms = square.mean**0.5
    return [
        {
            "rms": rms,
            "rms_low": max(0.0, square.mean - 1.96 * square.error) ** 0.5,
            "rms_high": (square.mean + 1.96 * square.error) ** 0.5,
            "rms_theory": scale * (d * float(torch.stack(jacobians).mean().clamp(min=0))) ** 0.5,
            "median": float(lengths.median()),
            "small_share": float((lengths < SMALL * rms).double().mean()),
            "quantile_10": float(lengths.quantile(0.1)),
            "quantile_90": float(lengths.quantile(0.9)),
            **_projections(d, n, scale, draw),
        }
    ]


def _projections(d: int, n: int, scale: float, draw: Callable[..., Tensor]) -> Row:
    """The same for the weights W_q and W_k, and for the values, whose path does not go through the softmax."""
    small: dict[str, list[Tensor]] = {"w_q_small": [], "w_k_small": []}
    to_value = []
    for _ in range(PROJECTED):
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
    return [
        Expectation(
            f"RMS of |dL/dq|, rule {row['rule']}, d_k = {row['d']}, n = {row['n']}",
            row["rms_theory"],
            row["rms"],
            reach(row["rms_low"], row["rms_high"]),
            "closed form: scale √(d_k E‖J‖_F²)",
            "4 standard errors",
        )
        for row in rows
    ]


def finding(rows: Rows) -> str:
    d = max(row["d"] for row in rows)
    by_rule = {row["rule"]: row for row in pick(rows, d=d)}
    if not {"none", "sqrt_dk"} <= set(by_rule):
        row = next(iter(by_rule.values()))
        return f"At d_k = {d} under rule {row['rule']} the RMS of |dL/dq| is {row['rms']:.3g}, the median {row['median']:.2g}"
    bare, scaled = by_rule["none"], by_rule["sqrt_dk"]
    return (
        f"Without the scale the mean gradient grows and the typical one vanishes: at d_k = {d} the RMS of |dL/dq| is "
        f"{bare['rms'] / scaled['rms']:.0f} times the scaled one, the median {bare['median'] / scaled['median']:.2g} times"
    )


EXPERIMENT = Experiment(
    name="gradient",
    question="What gradient reaches a query through the softmax, on average and typically?",
    claims=("C6", "C7", "C22"),
    parameters=(
        Parameter("d", (16, 64, 256, 1024), "the head dim, d_k", least=1),
        Parameter("n", (128,), "how many keys, and queries", least=2, hint="one key gets no gradient"),
        Parameter("rule", ("none", "sqrt_dk", "dk"), "the scale's rule", choices=("none", "sqrt_dk", "dk")),
        Parameter("batches", (48,), "independent draws of queries, keys and values", least=2, hint="one has no error"),
        SEED,
        DEVICE,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="gradient",
)
