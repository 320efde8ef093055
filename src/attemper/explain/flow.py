"""The arithmetic: words → embeddings → Q, K, V → logits → weights → context (→ concat → output), in two lanes.

Nothing here knows how it will be told. Memory grows with the number of words, not with its square.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..vitals import Vitals
from . import draw
from .lanes import Lane, lanes
from .settings import Settings
from .steps import CORNER

SIGNS = ("variance", "peak", "top_weight", "entropy", "evenness", "effective_keys", "jacobian_trace")
"""What is read of each head: means over its rows, but the variance of all its logits and the largest logit."""

MOST_FLOAT64 = 1024
"""Longer texts are compared in float32, which takes half the time and still has more digits than are shown."""


class Computed(NamedTuple):
    """The tensors and numbers of one explanation; pairs hold the chosen lane first."""

    lanes: tuple[Lane, Lane]
    embedded: Tensor  # (n, d_model)
    query: Tensor  # (H, n, d_k), and so are key and value
    key: Tensor
    value: Tensor
    projections: dict[str, Tensor]  # the corner of each matrix
    logits: tuple[Tensor, Tensor]  # the corner of head 1's, and so are the weights
    weights: tuple[Tensor, Tensor]
    heads: tuple[list[dict[str, float]], list[dict[str, float]]]
    means: tuple[dict[str, float], dict[str, float]]
    context: tuple[Tensor, Tensor]  # (H, n, d_k)
    output: tuple[Tensor, Tensor] | None  # (n, d_model); with several heads only


def compute(settings: Settings) -> Computed:
    """Every number of the explanation."""
    embedded = draw.embeddings(settings.words, settings.d_model, settings.seed)
    corners: dict[str, Tensor] = {}
    dtype = torch.float64 if settings.count <= MOST_FLOAT64 else torch.float32
    query, key, value = (_project(settings, name, embedded, corners).to(dtype) for name in ("W_Q", "W_K", "W_V"))
    pair = lanes(settings)
    first, second = (lane.attend(query, key, value, "all") for lane in pair)
    heads = (signs_by_head(first.vitals), signs_by_head(second.vitals))
    output = None
    if settings.heads is not None:
        output = (_unite(settings, first.output, corners), _unite(settings, second.output, corners))
    return Computed(
        lanes=pair,
        embedded=embedded,
        query=query,
        key=key,
        value=value,
        projections=corners,
        logits=(pair[0].logits(query, key), pair[1].logits(query, key)),
        weights=(pair[0].weights(query, key), pair[1].weights(query, key)),
        heads=heads,
        means=(_mean(heads[0]), _mean(heads[1])),
        context=(first.output, second.output),
        output=output,
    )


def signs_by_head(vitals: Vitals) -> list[dict[str, float]]:
    """One line per head, from vitals of shape ``(H, n)``."""
    lines = vitals.by_head().to_dicts()
    # the variance of all logits: within rows, and of the rows' means
    variance = vitals.variance.mean(-1) + vitals.mean.var(-1, correction=0)
    for line, whole in zip(lines, variance.tolist(), strict=True):
        line["variance"] = whole
    return [{name: line[name] for name in SIGNS} for line in lines]


def _mean(lines: list[dict[str, float]]) -> dict[str, float]:
    means = {name: math.fsum(line[name] for line in lines) / len(lines) for name in SIGNS}
    return {**means, "peak": max(line["peak"] for line in lines)}


def _project(settings: Settings, name: str, embedded: Tensor, corners: dict[str, Tensor]) -> Tensor:
    """One head's matrix at a time: GPT-3's 12288 × 12288 need not exist at once."""
    heads = []
    for head in range(settings.heads or 1):
        matrix = draw.projection(name, head, settings.d_model, settings.d_k, settings.seed, fan_in=settings.d_model)
        corners.setdefault(name, matrix[:1, :CORNER].clone())
        heads.append(embedded @ matrix)
    return torch.stack(heads)


def _unite(settings: Settings, context: Tensor, corners: dict[str, Tensor]) -> Tensor:
    """concat(heads) W_O, as the sum of each head times its own rows of W_O."""
    united = torch.zeros(settings.count, settings.d_model, dtype=torch.float64, device="cpu")
    for head, part in enumerate(context):
        rows = draw.projection("W_O", head, settings.d_k, settings.d_model, settings.seed, fan_in=settings.d_model)
        corners.setdefault("W_O", rows[:1, :CORNER].clone())
        united += part.double() @ rows
    return united
