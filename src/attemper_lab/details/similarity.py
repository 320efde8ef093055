"""similarity: does the largest dot product belong to the most similar key?

q·k = |q| |k| cos(q, k). For one query |q| is the same for every key, so what a dot product adds to the cosine is the
key's length.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn.functional import normalize

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator
from ..figures import marks, theme
from ..maths.stats import CHANCE, WIDEST, columns

QUERIES = 32


def measure(cell: Cell) -> Row:
    d, n, batches = int(cell["d"]), int(cell["n"]), int(cell["batches"])
    stream = generator(cell["device"], "similarity", d, n, batches, cell["seed"])
    query = torch.randn(batches, QUERIES, d, generator=stream, device=stream.device)
    key = torch.randn(batches, n, d, generator=stream, device=stream.device)
    scores = (query @ key.mT).double()
    cosines = (normalize(query, dim=-1) @ normalize(key, dim=-1).mT).double()
    longer = key.clone()
    longer[:, 0] *= 2  # one key twice as long: the same direction
    chosen, longer_wins = scores.argmax(-1), (query @ longer.mT).argmax(-1) == 0
    return {
        **columns(same_key=(chosen == cosines.argmax(-1)).double()),
        **columns(correlation=scores * cosines),  # E(q·k)² = d and E cos² = 1/d: nothing to divide by
        "theory": correlation(d),
        **columns(first_wins=(chosen == 0).double(), longer_wins=longer_wins.double()),
    }


def correlation(d: int) -> float:
    """corr(q·k, cos) = (E|k|)²/d for normal entries: the cosine does not depend on the lengths."""
    return 2 * math.exp(2 * (math.lgamma((d + 1) / 2) - math.lgamma(d / 2))) / d


def expect(rows: Rows) -> list[Expectation]:
    """How far the correlation is from 1, where so few draws can tell."""
    source = "closed form: 1 − 2 Γ((d+1)/2)² / (d Γ(d/2)²)"
    return [
        Expectation(
            f"1 − the correlation of q·k and cos, d_k = {row['d']}",
            1 - row["theory"], 1 - row["correlation"], row["correlation_reach"], source, CHANCE,
        )
        for row in rows
        if row["correlation_reach"] <= WIDEST * (1 - row["theory"])
    ]  # fmt: skip


def finding(rows: Rows) -> str:
    shown = [min(rows, key=lambda row: row["d"]), max(rows, key=lambda row: row["d"])]
    parts = [f"{row['same_key']:.0%} of queries at d_k = {row['d']}" for row in shown]
    long = shown[-1]
    return (
        f"The key with the largest dot product is the most similar one for {' and '.join(parts)}; a key twice as long wins "
        f"{long['longer_wins'] / max(long['first_wins'], 1e-12):.0f} times as often"
    )


def draw(rows: Rows, finding: str) -> Any:
    """How often the largest dot product is on the key with the largest cosine, against d_k."""
    names = {
        "same_key": "both choose the same key",
        "longer_wins": "a key of twice the length wins",
        "first_wins": "any one key wins",
    }
    shown = theme.unpivoted(rows, "d", "what", names, "share")
    colour = theme.series("what", "", list(names.values()))
    x = theme.powers("d", "head dim d_k", [row["d"] for row in rows])
    chart = marks.curve(shown, x, "share", "share of queries", colour)
    note = f"{rows[0]['n']} keys with independent normal entries; 95 % intervals."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
