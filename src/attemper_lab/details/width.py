"""width: with 1/√d_k, do the logits depend on the width of the embeddings?

The scale knows d_k and not the width. What the width does to q and k is the initialisation's matter: weights of variance
1/d_model keep their entries at variance 1, weights of a fixed std do not.
"""

from __future__ import annotations

from typing import Any

import torch

from attemper import measure as vitals_of

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import marks, theme
from ..maths.stats import columns, expect_column

TOKENS = 48
FIXED = 0.02  # GPT-2's
INITS = ("fan_in", "fixed")
WEIGHTS = {"fan_in": "variance 1/d_model", "fixed": f"std {FIXED:g}"}


def measure(cell: Cell) -> Row:
    width, d, init = int(cell["d_model"]), int(cell["d"]), str(cell["init"])
    stream = generator(cell["device"], "width", width, d, cell["seed"])  # the same draws for both initialisations
    std = width**-0.5 if init == "fan_in" else FIXED
    variances = []
    for _ in range(int(cell["batches"])):
        tokens = torch.randn(2, TOKENS, width, generator=stream, device=stream.device)
        tokens = torch.nn.functional.layer_norm(tokens, (width,))
        matrices = torch.randn(2, width, d, generator=stream, device=stream.device) * std
        query, key = tokens @ matrices
        signs = vitals_of(query, key, signs=("variance", "mean"))
        variances.append((signs.variance + signs.mean.square()).double().mean())  # the mean logit is 0
    return {"std": std, **columns(logit_variance=torch.stack(variances)), "theory": (width * std * std) ** 2}


def expect(rows: Rows) -> list[Expectation]:
    source = "closed form: (d_model · std²)², by which fan-in gives 1"
    names = [
        f"variance of the logits, W_Q and W_K of {WEIGHTS[row['init']]}, d_model = {row['d_model']}" for row in rows
    ]
    return [
        expect_column(row, "logit_variance", name, row["theory"], source) for row, name in zip(rows, names, strict=True)
    ]


def growth(rows: Rows, init: str) -> tuple[float, int, int]:
    """How many times the variance of the logits grows from the narrowest to the widest model, and their widths."""
    some = sorted(pick(rows, init=init), key=lambda row: int(row["d_model"]))
    times = some[-1]["logit_variance"] / some[0]["logit_variance"]
    return times, int(some[0]["d_model"]), int(some[-1]["d_model"])


def finding(rows: Rows) -> str:
    parts = []
    for init in dict.fromkeys(row["init"] for row in rows):
        times, narrow, wide = growth(rows, init)
        parts.append(f"{times:.3g} times with weights of {WEIGHTS[init]}")
    return f"From width {narrow} to {wide}, at one d_k and with 1/√d_k, the variance of the logits grows {', '.join(parts)}"


def draw(rows: Rows, finding: str) -> Any:
    """The variance of the logits against the width, for both initialisations."""
    shown = [{**row, "weights": WEIGHTS[row["init"]]} for row in rows]
    colour = theme.series("weights", "W_q, W_k", [WEIGHTS[init] for init in dict.fromkeys(row["init"] for row in rows)])
    x = theme.powers("d_model", "width of the embeddings, d_model", [row["d_model"] for row in rows])
    lines = marks.theory(shown, x, "theory", colour)
    points = marks.measured(shown, x, "logit_variance", "Var(logits) after 1/√d_k", colour, log=True)
    note = f"Layer-normed tokens, d_k = {rows[0]['d']}; lines: closed form; 95 % intervals."
    return theme.finish((lines + points).properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
