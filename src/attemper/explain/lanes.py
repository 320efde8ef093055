"""Lanes: the two ways of scoring that are set side by side, each computed by attemper's own functions.

A lane keeps no n × n matrix. The corners that are shown come from the same calls: a query on a single key has that logit as its
peak, and values that are unit vectors bring the weights out as the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..attention import attention
from ..scale import Rule, rule
from ..scores import additive_attention, cosine_attention
from ..vitals import Attended
from .draw import normal
from .settings import SCORES, Settings
from .steps import CORNER, LaneInfo

Signs = str | Sequence[str]

FAR = 20
"""A cap this many standard deviations away takes half a percent off the variance, less than its give or take."""


@dataclass(frozen=True)
class Lane:
    """One way of scoring: what it is called, how it is computed on ``(H, L, E)``, and the variance theory gives its logits."""

    info: LaneInfo
    attend: Callable[[Tensor, Tensor, Tensor, Signs], Attended]
    variance: float | None
    give: float | None
    softcap: float | None = None

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """The corner of the first head's logits: one query on one key at a time."""
        first, second = query[:, :CORNER].transpose(0, 1), key[:, :CORNER].transpose(0, 1)  # (corner, H, E)
        first, second = first[:, None, :, None], second[None, :, :, None]
        pairs = self.attend(first, second, torch.zeros_like(second), ("peak",))
        return pairs.vitals.peak[:, :, 0, 0]

    def weights(self, query: Tensor, key: Tensor) -> Tensor:
        """The corner of the first head's weights, each row normalised over all keys."""
        heads, keys, _ = key.shape
        unit = torch.eye(keys, min(keys, CORNER), dtype=key.dtype, device=key.device).expand(heads, -1, -1)
        return self.attend(query[:, :CORNER], key, unit, ()).output[0]


def lanes(settings: Settings) -> tuple[Lane, Lane]:
    """The lane that was asked for, and the one to see it beside."""
    chosen = settings.rule
    if settings.score == "additive":
        return _additive(settings), _dot(settings, rule("none"), label="dot none")
    beside = rule("none") if chosen.name != "none" else rule(SCORES[settings.score])
    if settings.score == "cosine":
        return _cosine(settings, chosen), _cosine(settings, beside)
    return _dot(settings, chosen), _dot(settings, beside)


def _dot(settings: Settings, chosen: Rule, label: str | None = None) -> Lane:
    if chosen.unit:
        return _cosine(settings, chosen)
    factor, width = _factor(settings, chosen), settings.d_k
    info = LaneInfo(label or chosen.name, "dot", chosen.name, chosen.formula, factor, chosen.softcap)

    def attend(query: Tensor, key: Tensor, value: Tensor, signs: Signs) -> Attended:
        return attention(query, key, value, scale=factor, softcap=chosen.softcap, signs=signs)

    # scores share their words' lengths and all of them share the two matrices, so they vary together
    words, model = _distinct(settings), settings.d_model
    own, shared = (2 + 2 / width) / words**2 + 4 / (words * width), 4 / (width * model) + 2 / model**2
    relative = ((own + shared) / _heads(settings) + 4 / (words * model)) ** 0.5
    return Lane(info, attend, *_expected(settings, factor**2 * width, relative, chosen.softcap), chosen.softcap)


def _cosine(settings: Settings, chosen: Rule) -> Lane:
    factor, width = _factor(settings, chosen), settings.d_k
    formula = chosen.formula if chosen.unit else "cos(q, k)"
    cap = chosen.softcap
    bound = abs(factor) if cap is None else cap * math.tanh(abs(factor) / cap)
    info = LaneInfo(chosen.name, "cosine", chosen.name, formula, factor, bound)

    def attend(query: Tensor, key: Tensor, value: Tensor, signs: Signs) -> Attended:
        if cap is None:
            return cosine_attention(query, key, value, scale=factor, signs=signs)
        return attention(
            normalize(query, dim=-1), normalize(key, dim=-1), value, scale=factor, softcap=cap, signs=signs
        )

    # a random cosine has mean 0, variance 1/d_k and kurtosis 3 d_k / (d_k + 2)
    own, shared = (2 - 6 / (width + 2)) / _distinct(settings) ** 2, 2 / settings.d_model**2
    relative = ((own + shared) / _heads(settings)) ** 0.5
    return Lane(info, attend, *_expected(settings, factor**2 / width, relative, cap), cap)


def _additive(settings: Settings) -> Lane:
    heads, width = _heads(settings), settings.d_k
    weight = torch.stack([normal(f"vector w {head}", (width,), settings.seed) * width**-0.5 for head in range(heads)])
    bound = weight.abs().sum(-1).max().item()
    info = LaneInfo("additive", "additive", None, "wᵀ tanh(q + k)", 1.0, bound)

    def attend(query: Tensor, key: Tensor, value: Tensor, signs: Signs) -> Attended:
        return additive_attention(query, key, value, weight, signs=signs)

    return Lane(info, attend, None, None)


def _expected(
    settings: Settings, variance: float, relative: float, cap: float | None
) -> tuple[float | None, float | None]:
    """The variance to expect, and its standard error; one word has one score, which has none.

    A cap takes about 2 variance / cap² off it: nothing that shows where the cap is far away, and else nothing is foretold.
    """
    capped = cap is not None and cap < FAR * variance**0.5
    return (variance, variance * relative) if _distinct(settings) > 1 and not capped else (None, None)


def _factor(settings: Settings, chosen: Rule) -> float:
    facts: dict[str, Any] = {
        "head_dim": settings.d_k,
        "heads": settings.model_heads,
        "layer": settings.layer,
        "keys": settings.count,
    }
    return float(chosen.scale(**facts))


def _distinct(settings: Settings) -> int:
    return len(set(settings.words))


def _heads(settings: Settings) -> int:
    return settings.heads or 1
