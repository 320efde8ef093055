"""variance: how far do the dot products q·k spread as d_k grows, for ideal entries and for the ways models are initialised?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from attemper import measure as vitals_of
from attemper import rule

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import marks, theme
from ..maths import theory
from ..maths.stats import CHANCE, WIDEST, expect_column, over_batches

BATCHES = 32
NUMBERS = 30_000_000  # drawn per cell at most, which bounds the time at large d
TOKENS = 64
RANGE_OF = 1000
UNDIVIDED = ("t5",)  # initialisations of models that divide by nothing

# d_model, and the variance that each entry of q and of k gets from a layer-normed input: std² · fan-in
INITS = {
    "unit": (0, 1.0, 1.0),
    "fan_in": (512, 1.0, 1.0),
    "linear": (512, 1 / 3, 1 / 3),
    "xavier": (512, 1 / 2, 1 / 2),
    "gpt2": (768, 768 * 0.02**2, 768 * 0.02**2),
    "gpt3_width": (12288, 12288 * 0.02**2, 12288 * 0.02**2),
    "t5": (512, 0.0, 1.0),  # q: 1/d_k, so that no divisor is needed
}
"""unit: independent normal entries; fan_in: LeCun's N(0, 1/d_model), as Wortsman et al. 2023; linear: torch.nn.Linear's own;
xavier: torch.nn.MultiheadAttention; gpt2: N(0, 0.02²); gpt3_width: the same at width 12288; t5: Mesh TensorFlow's, with the
divisor folded into W_q."""

FORMS = {
    "fan_in": "√d_k (LeCun et al. 1998: variance 1/fan-in)",
    "linear": "√d_k / 3 (torch.nn.Linear)",
    "xavier": "√d_k / 2 (torch.nn.MultiheadAttention)",
    "gpt2": "768 · 0.02² √d_k (GPT-2)",
    "gpt3_width": "12288 · 0.02² √d_k (GPT-2's 0.02 at GPT-3's width)",
    "t5": "1 (Raffel et al. 2020, Mesh TensorFlow)",
}


def measure(cell: Cell) -> Row:
    d, init, a = int(cell["d"]), str(cell["init"]), float(cell["a"])
    stream = generator(cell["device"], "variance", d, init, a, cell["samples"], cell["seed"])
    drawn = [_draw(d, init, a, int(cell["samples"]), stream) for _ in range(BATCHES)]
    batches = [_dots(query, key, init) for query, key in drawn]
    scale = rule("none" if init in UNDIVIDED else "sqrt_dk").scale(head_dim=d)
    second = over_batches(torch.stack([batch.square().mean() for batch in batches]))
    fourth = over_batches(torch.stack([batch.pow(4).mean() for batch in batches]))
    mean = over_batches(torch.stack([batch.mean() for batch in batches]))
    kurtosis = fourth.mean / second.mean**2
    # the batches' own kurtoses differ by noise that the ratio of means does not have; their spread still is its error
    each = over_batches(torch.stack([batch.pow(4).mean() / batch.square().mean() ** 2 for batch in batches]))
    first = [batch.flatten()[:RANGE_OF] for batch in batches]
    expected = d * a * _entry(init, d, 0) * _entry(init, d, 1)
    scaled = over_batches(torch.stack([_scaled(query, key, scale) for query, key in drawn]))
    return {
        **mean.columns("mean"),
        **second.columns("variance"),
        "std": math.sqrt(second.mean),
        "variance_theory": expected,
        "scale": scale,
        **scaled.columns("scaled_variance"),
        **each._replace(mean=kurtosis).columns("kurtosis"),
        "kurtosis_theory": theory.kurtosis(d) if init == "unit" else None,
        **over_batches(torch.stack([batch.max() - batch.min() for batch in first])).columns("range"),
        "range_of": len(first[0]),
    }


def _entry(init: str, d: int, which: int) -> float:
    """The variance of an entry of q (0) or k (1)."""
    variance = INITS[init][1 + which]
    return 1 / d if init == "t5" and which == 0 else variance


def _draw(d: int, init: str, a: float, samples: int, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    """One batch of queries and keys, (tokens, d) each. `a` multiplies the variance of q's entries."""
    width = INITS[init][0]

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream, device=stream.device)

    if not width:
        count = max(64, min(samples, NUMBERS // (2 * d)) // BATCHES)
        return draw(count, d) * math.sqrt(a), draw(count, d)
    tokens = torch.nn.functional.layer_norm(draw(TOKENS, width), (width,))
    projections = []
    for which in (0, 1):
        std = math.sqrt(_entry(init, d, which) / width)
        if init in ("linear", "xavier"):  # torch draws both uniformly
            weight = (torch.rand(d, width, generator=stream, device=stream.device) * 2 - 1) * math.sqrt(3) * std
        else:
            weight = draw(d, width) * std
        projections.append(tokens @ weight.T)
    return projections[0] * math.sqrt(a), projections[1]


def _dots(query: Tensor, key: Tensor, init: str) -> Tensor:
    """Their dot products: pair by pair where entries are independent, every query with every key where tokens are shared."""
    return ((query * key).sum(-1) if init == "unit" else query @ key.T).double()


def _scaled(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """The mean square of the logits that the operation itself makes of them, in blocks of queries and keys."""
    whole = len(query) // TOKENS * TOKENS
    query, key = (part[:whole].reshape(-1, TOKENS, part.shape[-1]) for part in (query, key))
    signs = vitals_of(query, key, scale=scale, signs=("mean", "variance"))
    return (signs.variance + signs.mean.square()).double().mean()


def expect(rows: Rows) -> list[Expectation]:
    return [number for row in rows for number in (_of_entries(row) if row["init"] == "unit" else [_of_an_init(row)])]


def _of_entries(row: Mapping[str, Any]) -> list[Expectation]:
    """The variance, and how far the kurtosis is above that of a normal law, where so few draws can tell."""
    d, above = row["d"], row["kurtosis_theory"] - 3
    quantity, source = f"Var(q·k), entries of variance {row['a']:g} and 1", "Vaswani et al. 2017, footnote 4: d_k"
    numbers = [expect_column(row, "variance", f"{quantity}, d_k = {d}", row["variance_theory"], source)]
    if row["kurtosis_reach"] <= WIDEST * above:
        quantity, source = f"kurtosis of q·k, above 3, d_k = {d}", "closed form: 6/d_k for normal entries"
        numbers.append(Expectation(quantity, above, row["kurtosis"] - 3, row["kurtosis_reach"], source, CHANCE))
    return numbers


def _of_an_init(row: Mapping[str, Any]) -> Expectation:
    quantity = f"std of q·k before the scale, initialisation {NAMES[row['init']]}, d_k = {row['d']}"
    expected, within = math.sqrt(row["variance_theory"]), row["variance_reach"] / (2 * row["std"])
    return Expectation(quantity, expected, row["std"], within, f"closed form: {FORMS[row['init']]}", CHANCE)


def finding(rows: Rows) -> str:
    unit = pick(rows, init="unit", a=1.0) or rows
    low, high = min(unit, key=lambda row: row["d"]), max(unit, key=lambda row: row["d"])
    scaled = [row["scaled_variance"] for row in unit]
    return (
        f"Var(q·k) grows from {low['variance']:.3g} at d_k = {low['d']} to {high['variance']:.4g} at {high['d']}; divided by "
        f"√d_k it stays between {min(scaled):.3f} and {max(scaled):.3f}"
    )


SCALED = "unit entries, ÷ √d_k"
NAMES = {"unit": "unit entries", "fan_in": "1/fan-in", "xavier": "xavier", "linear": "nn.Linear", "gpt2": "GPT-2 (0.02)",
         "t5": "T5 (folded)", "gpt3_width": "0.02 at width 12288"}  # fmt: skip


def draw(rows: Rows, finding: str) -> Any:
    """The variance of q·k against d_k, for ideal entries and for real initialisations."""
    a = 1 if any(row["a"] == 1 for row in rows) else rows[0]["a"]
    shown = [{**row, "name": NAMES[str(row["init"])]} for row in rows if row["a"] == a]
    ends = {f"variance{end}": f"scaled_variance{end}" for end in ("", "_low", "_high")}
    divided = [
        {**row, "name": SCALED, "variance_theory": a, **{name: row[column] for name, column in ends.items()}}
        for row in shown
        if row["init"] == "unit"
    ]
    shown = [*divided, *shown]  # as it should be, then what it is without
    present = [name for name in (SCALED, *NAMES.values()) if any(row["name"] == name for row in shown)]
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    colour = theme.series("name", "initialisation", present)
    chart = marks.theory(shown, x, "variance_theory", colour, nested=True) + marks.measured(
        shown, x, "variance", "variance of q·k", colour, log=True, nested=True
    )
    note = "Unscaled, except for the first. Lines: d_k × the variances of the entries. Points: measured, with 95 % intervals."
    note += f" q's entries × √{a:g}." if a != 1 else ""
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
