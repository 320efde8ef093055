"""divisors: what does each divisor — none, √d_k, d_k, √d_model — do to attention before any training?"""

from __future__ import annotations

import math
from typing import Any

import torch

from attemper import measure as vitals_of
from attemper import rule

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import marks, theme
from ..maths.stats import columns, expect_column, over_batches
from ..maths.theory import SCALES

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
    aligned_weight = torch.sigmoid((aligned - signs.lse).double())
    return {
        "scale": scale,
        "temperature": 1 / (scale * math.sqrt(d)),
        **over_batches(signs.variance).root("logit_std"),
        **columns(effective_keys=signs.effective_keys, evenness=signs.evenness, top_weight=signs.top_weight),
        **columns(aligned_weight=aligned_weight),
    }


def expect(rows: Rows) -> list[Expectation]:
    expectations = []
    for row in rows:
        label = f"{SCALES[row['rule']]}, d_k = {row['d']}, {row['heads']} heads"
        expected = row["scale"] * math.sqrt(row["d"])
        expectations.append(
            expect_column(row, "logit_std", f"std of the logits {label}", expected, "closed form: scale × √d_k")
        )
    for row in pick(rows, rule="sqrt_dmodel", heads=96):
        scaled = pick(rows, rule="sqrt_dk", heads=96, **{name: row[name] for name in ("d", "n", "batches", "seed")})
        quantity = f"temperature of √d_model over √d_k, 96 heads, d_k = {row['d']}"
        source, why = "Brown et al. 2020 (GPT-3): 96 heads of 128; √96 = 9.80", "rounding: both use the same draws"
        ratios = [other["logit_std"] / row["logit_std"] for other in scaled[:1]]
        expectations += [Expectation(quantity, math.sqrt(96), ratio, 1e-3, source, why) for ratio in ratios]
    return expectations


def finding(rows: Rows) -> str:
    n, d = max(row["n"] for row in rows), max(row["d"] for row in rows)
    names = list(dict.fromkeys(row["rule"] for row in rows))
    shown = [max(pick(rows, rule=name, d=d, n=n), key=lambda row: row["heads"]) for name in names]
    keys = [
        f"{row['effective_keys']:.{0 if row['effective_keys'] > 100 else 1}f} {WORDS[row['rule']]}" for row in shown
    ]
    return f"Effective keys of {n} at d_k = {d}: {', '.join(keys)}"


def draw(rows: Rows, finding: str) -> Any:
    """How many keys share a query's weight, and what a key equal to the query gets, against d_k, under each divisor."""
    heads = max(row["heads"] for row in rows)
    shown = theme.labelled([row for row in rows if row["heads"] == heads])
    colour = theme.by_rule(shown)
    n = max(row["n"] for row in shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    keys, title = "effective keys, exp(entropy)", f"weight of a key equal to q, beside {n} others"
    many = marks.curve(shown, x, "effective_keys", keys, colour, nested=True, log=True, most=float(n))
    aligned = marks.curve(shown, x, "aligned_weight", title, colour, nested=True, log=True, most=1.0)
    line = marks.labelled_line(n, f"all {n} keys alike", at=40)
    chart = theme.side_by_side(line + many, aligned, theme.WIDTH // 2 - 20)
    note = f"n = {n}, {heads} heads (d_model = {heads} d_k), unit-variance q and k, before training; 95 % intervals."
    return theme.finish(chart, finding, note)


EXPERIMENT = define(globals())
