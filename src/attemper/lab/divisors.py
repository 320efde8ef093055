"""divisors: what does each divisor — none, √d_k, d_k, √d_model — do to attention before any training?"""

from __future__ import annotations

import math

import torch

from ..attention import measure as vitals_of
from ..scale import rule
from .experiment import DEVICE, SEED, Cell, Expectation, Experiment, Parameter, Row, Rows, generator, pick
from .stats import over_batches, reach

RULES = ("none", "sqrt_dk", "dk", "sqrt_dmodel")
WORDS = {"none": "without a divisor", "sqrt_dk": "with √d_k", "dk": "with d_k", "sqrt_dmodel": "with √d_model"}
NUMBERS = 12_000_000  # entries of keys drawn per cell, at most
QUERIES = 32


def measure(cell: Cell) -> list[Row]:
    d, heads, n, name = int(cell["d"]), int(cell["heads"]), int(cell["n"]), str(cell["rule"])
    # the same queries and keys for every rule and number of heads
    stream = generator(cell["device"], "divisors", d, n, cell["batches"], cell["seed"])
    batches = max(8, min(int(cell["batches"]), NUMBERS // (n * d)))
    scale = rule(name).scale(head_dim=d, heads=heads)
    query = torch.randn(batches, QUERIES, d, generator=stream, device=stream.device)
    key = torch.randn(batches, n, d, generator=stream, device=stream.device)
    signs = vitals_of(query, key, scale=scale, signs=("variance", "effective_keys", "evenness", "top_weight"))
    # a key that the query has learned to look for, as µP assumes: the query itself
    aligned = scale * query.square().sum(-1)
    return [
        {
            "scale": scale,
            "temperature": 1 / (scale * math.sqrt(d)),
            "logit_std": over_batches(signs.variance).mean ** 0.5,
            **over_batches(signs.effective_keys).columns("effective_keys"),
            **over_batches(signs.evenness).columns("evenness"),
            **over_batches(signs.top_weight).columns("top_weight"),
            **over_batches(aligned).columns("aligned_logit"),
        }
    ]


def expect(rows: Rows) -> list[Expectation]:
    found = []
    for row in rows:
        label = f"rule {row['rule']}, d_k = {row['d']}, heads = {row['heads']}"
        expected = row["scale"] * math.sqrt(row["d"])
        found.append(
            Expectation(
                f"logit std, {label}",
                expected,
                row["logit_std"],
                0.05 * expected,
                "closed form: scale × √d_k",
                "5 %: the keys of a batch are shared by its queries",
            )
        )
        if row["rule"] == "dk":
            found.append(
                Expectation(
                    f"logit of an aligned key, {label}",
                    1.0,
                    row["aligned_logit"],
                    reach(row["aligned_logit_low"], row["aligned_logit_high"]),
                    "Yang et al. 2022 (µP): q·k = |q|² ≈ d_k",
                    "4 standard errors",
                )
            )
    for row in pick(rows, rule="sqrt_dmodel", heads=96):
        found.append(
            Expectation(
                f"temperature of √d_model over √d_k, 96 heads, d_k = {row['d']}",
                math.sqrt(96),
                pick(rows, rule="sqrt_dk", heads=96, d=row["d"], n=row["n"])[0]["logit_std"] / row["logit_std"],
                1e-3,
                "Brown et al. 2020 (GPT-3): 96 heads of 128; √96 = 9.80",
                "rounding: both use the same draws",
            )
        )
    return found


def finding(rows: Rows) -> str:
    n, d = max(row["n"] for row in rows), max(row["d"] for row in rows)
    parts = []
    for name in dict.fromkeys(row["rule"] for row in rows):
        row = max(pick(rows, rule=name, d=d, n=n), key=lambda one: one["heads"])
        parts.append(f"{row['effective_keys']:.{0 if row['effective_keys'] > 100 else 1}f} {WORDS[name]}")
    return f"Of {n} keys, a query at d_k = {d} looks at " + ", ".join(parts)


EXPERIMENT = Experiment(
    name="divisors",
    question="What does each divisor do to attention before any training?",
    claims=("C10", "C11", "C16"),
    parameters=(
        Parameter("rule", RULES, "the divisor", choices=RULES),
        Parameter("d", (16, 64, 128, 512), "the head dim, d_k", least=1),
        Parameter("heads", (12, 96), "how many heads; only √d_model asks", least=1),
        Parameter("n", (1024,), "how many keys", least=2, hint="one key always has all the weight"),
        Parameter(
            "batches", (24,), "independent sets of keys per cell, at most", least=8, hint="fewer give no interval"
        ),
        SEED,
        DEVICE,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="divisors",
)
