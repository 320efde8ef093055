"""divisors: what does each divisor — none, √d_k, d_k, √d_model — do to attention before any training?"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ...attention import measure as vitals_of
from ...scale import rule
from ..engine.experiment import BATCHES, Cell, Expectation, Parameter, Row, Rows, define, generator, pick
from ..maths.stats import expect_column, over_batches

RULES = ("none", "sqrt_dk", "dk", "sqrt_dmodel")
WORDS = {"none": "without a divisor", "sqrt_dk": "with √d_k", "dk": "with d_k", "sqrt_dmodel": "with √d_model"}
NUMBERS = 12_000_000  # entries of keys drawn per cell, at most
QUERIES = 128


def measure(cell: Cell) -> Row:
    d, heads, n, name = int(cell["d"]), int(cell["heads"]), int(cell["n"]), str(cell["rule"])
    # the same queries and keys for every rule and number of heads
    stream = generator(cell["device"], "divisors", d, n, cell["batches"], cell["seed"])
    batches = max(8, min(int(cell["batches"]), NUMBERS // (n * d)))
    scale = rule(name).scale(head_dim=d, heads=heads)
    query = torch.randn(batches, QUERIES, d, generator=stream, device=stream.device)
    key = torch.randn(batches, n, d, generator=stream, device=stream.device)
    signs = vitals_of(query, key, scale=scale, signs=("variance", "effective_keys", "evenness", "top_weight", "lse"))
    # a key that the query has learned to look for: the query itself, beside the n others
    aligned = scale * query.square().sum(-1)
    found = torch.sigmoid((aligned - signs.lse).double())
    return {
        "scale": scale,
        "temperature": 1 / (scale * math.sqrt(d)),
        **over_batches(signs.variance).root("logit_std"),
        **over_batches(signs.effective_keys).columns("effective_keys"),
        **over_batches(signs.evenness).columns("evenness"),
        **over_batches(signs.top_weight).columns("top_weight"),
        **over_batches(found).columns("aligned_weight"),
    }


def expect(rows: Rows) -> list[Expectation]:
    found = []
    for row in rows:
        label = f"rule {row['rule']}, d_k = {row['d']}, heads = {row['heads']}"
        expected = row["scale"] * math.sqrt(row["d"])
        found.append(expect_column(row, "logit_std", f"logit std, {label}", expected, "closed form: scale × √d_k"))
    for row in pick(rows, rule="sqrt_dmodel", heads=96):
        scaled = pick(rows, rule="sqrt_dk", heads=96, **{name: row[name] for name in ("d", "n", "batches", "seed")})
        quantity = f"temperature of √d_model over √d_k, 96 heads, d_k = {row['d']}"
        source, why = "Brown et al. 2020 (GPT-3): 96 heads of 128; √96 = 9.80", "rounding: both use the same draws"
        ratios = [one["logit_std"] / row["logit_std"] for one in scaled[:1]]
        found += [Expectation(quantity, math.sqrt(96), ratio, 1e-3, source, why) for ratio in ratios]
    return found


def finding(rows: Rows) -> str:
    n, d = max(row["n"] for row in rows), max(row["d"] for row in rows)
    names = list(dict.fromkeys(row["rule"] for row in rows))
    shown = [max(pick(rows, rule=name, d=d, n=n), key=lambda one: one["heads"]) for name in names]
    keys = [
        f"{row['effective_keys']:.{0 if row['effective_keys'] > 100 else 1}f} {WORDS[row['rule']]}" for row in shown
    ]
    return f"Effective keys of {n} at d_k = {d}: {', '.join(keys)}"


def draw(rows: Rows, finding: str) -> Any:
    """How many keys share a query's weight, and what a key equal to the query gets, against d_k, under each divisor."""
    from ..figures import marks, theme

    heads = max(row["heads"] for row in rows)
    shown = theme.labelled([row for row in rows if row["heads"] == heads])
    colour = theme.by_rule(shown)
    n = max(row["n"] for row in shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    keys, title = "effective keys, exp(entropy)", f"weight of a key equal to q, beside {n} others"
    many = marks.curve(shown, x, "effective_keys", keys, colour, nested=True, log=True, most=float(n))
    found = marks.curve(shown, x, "aligned_weight", title, colour, nested=True, log=True, most=1.0)
    line = marks.labelled_line(n, f"all {n} keys alike", at=40)
    chart = theme.side_by_side(line + many, found, theme.WIDTH // 2 - 20)
    note = f"n = {n}, {heads} heads (d_model = {heads} d_k), unit-variance q and k, before training; 95 % intervals."
    return theme.finish(chart, finding, note)


EXPERIMENT = define(
    __name__,
    question="What does each divisor do to attention before any training?",
    claims=("C10", "C11", "C16"),
    parameters=(
        Parameter("rule", RULES, "the divisor", choices=RULES),
        Parameter("d", (16, 64, 128, 512), "the head dim, d_k", least=1),
        Parameter("heads", (12, 96), "number of heads; only √d_model uses it", least=1),
        Parameter("n", (1024,), "number of keys", least=2, hint="one key always has all the weight"),
        replace(BATCHES, default=(24,)),
    ),
)
