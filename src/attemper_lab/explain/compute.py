"""The arithmetic: words → embeddings → Q, K, V → logits → weights → context (→ concat → output), in two lanes.

A lane is one way of scoring, computed by attemper's own functions; an explanation compares two. Memory grows with the number of
words, not with its square. The same functions give the corners that are shown: a query on a single key has that logit as its
peak, and with unit vectors as values the output is the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from attemper import Attended, Rule, Vitals, additive_attention, attention, cosine_attention, rule
from attemper.extension.calls import Signs

from .settings import CORNER, SCORES, ExplainSettings

FAR = 20
"""A cap this many standard deviations away takes half a percent off the variance, which is less than its standard error."""

SIGNS = ("variance", "peak", "top_weight", "entropy", "evenness", "effective_keys", "jacobian_trace")
"""The signs of each head: means over its rows, except for the variance of all its logits and the largest logit."""

MOST_FLOAT64 = 1024
"""Longer texts are compared in float32, which takes half the time and still has more digits than are shown."""


@dataclass(frozen=True)
class LaneInfo:
    """One way to turn q and k into logits: its name, formula and factor, and the most a logit can be (None: no bound)."""

    label: str
    score: str
    rule: str | None
    formula: str
    scale: float
    bound: float | None


@dataclass(frozen=True)
class Lane:
    """One way of scoring: its name, how to compute it on ``(H, L, E)``, and the variance of its logits in theory."""

    info: LaneInfo
    attend: Callable[[Tensor, Tensor, Tensor, Signs], Attended]
    variance: float | None
    std: float | None
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


class ComputedLane(NamedTuple):
    """The tensors and numbers of one lane."""

    lane: Lane
    logits: Tensor  # the corner of the first head's
    weights: Tensor  # the same
    heads: list[dict[str, float]]
    means: dict[str, float]
    context: Tensor  # (H, n, d_k)
    output: Tensor | None  # (n, d_model); with several heads only

    @property
    def info(self) -> LaneInfo:
        return self.lane.info


class Computed(NamedTuple):
    """The tensors and numbers of one explanation."""

    lanes: tuple[ComputedLane, ComputedLane]  # the chosen one first
    embedded: Tensor  # (n, d_model)
    query: Tensor  # (H, n, d_k), as are key and value
    key: Tensor
    value: Tensor
    projections: dict[str, Tensor]  # the corner of each matrix


def compute(settings: ExplainSettings) -> Computed:
    """Every number of the explanation."""
    embedded = embeddings(settings.words, settings.d_model, settings.seed)
    corners: dict[str, Tensor] = {}
    dtype = torch.float64 if settings.count <= MOST_FLOAT64 else torch.float32
    query, key, value = (_project(settings, name, embedded, corners).to(dtype) for name in ("W_Q", "W_K", "W_V"))

    def computed(lane: Lane) -> ComputedLane:
        attended = lane.attend(query, key, value, "all")
        context, heads = attended.output, signs_by_head(attended.vitals)
        output = None if settings.heads is None else _concat_and_project(settings, context, corners)
        logits, weights = lane.logits(query, key), lane.weights(query, key)
        return ComputedLane(lane, logits, weights, heads, _mean(heads), context, output)

    chosen, other = lanes(settings)
    return Computed((computed(chosen), computed(other)), embedded, query, key, value, corners)


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


def _project(settings: ExplainSettings, name: str, embedded: Tensor, corners: dict[str, Tensor]) -> Tensor:
    """Project by one head's matrix at a time, so that GPT-3's 12288 × 12288 never exist at once."""
    heads = []
    for head in range(settings.heads or 1):
        matrix = projection(name, head, settings.d_model, settings.d_k, settings.seed, fan_in=settings.d_model)
        corners.setdefault(name, matrix[:1, :CORNER].clone())
        heads.append(embedded @ matrix)
    return torch.stack(heads)


def _concat_and_project(settings: ExplainSettings, context: Tensor, corners: dict[str, Tensor]) -> Tensor:
    """concat(heads) W_O, as the sum of each head times its own rows of W_O."""
    united = torch.zeros(settings.count, settings.d_model, dtype=torch.float64, device="cpu")
    for head, part in enumerate(context):
        rows = projection("W_O", head, settings.d_k, settings.d_model, settings.seed, fan_in=settings.d_model)
        corners.setdefault("W_O", rows[:1, :CORNER].clone())
        united += part.double() @ rows
    return united


def embeddings(words: Sequence[str], width: int, seed: int) -> Tensor:
    """One row per word, N(0, 1): ``(words, width)``. The same word has the same row wherever it stands."""
    distinct = {word: index for index, word in enumerate(dict.fromkeys(words))}
    table = torch.stack([normal(f"word {word}", (width,), seed) for word in distinct])
    return table[torch.tensor([distinct[word] for word in words], device="cpu")]


def projection(name: str, head: int, rows: int, columns: int, seed: int, fan_in: int) -> Tensor:
    """One head's share of a matrix, N(0, 1/fan_in): unit variance in gives unit variance out.

    Each head is drawn on its own, so the one head of a plain call is the first of many.
    """
    return normal(f"matrix {name} {head}", (rows, columns), seed) * fan_in**-0.5


def normal(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Draw N(0, 1) in float64 from the name and the seed alone (Python's own hash differs from process to process)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def lanes(settings: ExplainSettings) -> tuple[Lane, Lane]:
    """The chosen lane, and the one that it is compared with."""
    chosen = settings.rule
    if settings.score == "additive":
        return _additive(settings), _dot(settings, rule("none"), label="dot none")
    beside = rule("none") if chosen.name != "none" else rule(SCORES[settings.score])
    if settings.score == "cosine":
        return _cosine(settings, chosen), _cosine(settings, beside)
    return _dot(settings, chosen), _dot(settings, beside)


def _dot(settings: ExplainSettings, chosen: Rule, label: str | None = None) -> Lane:
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


def _cosine(settings: ExplainSettings, chosen: Rule) -> Lane:
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


def _additive(settings: ExplainSettings) -> Lane:
    heads, width = _heads(settings), settings.d_k
    weight = torch.stack([normal(f"vector w {head}", (width,), settings.seed) * width**-0.5 for head in range(heads)])
    bound = weight.abs().sum(-1).max().item()
    info = LaneInfo("additive", "additive", None, "wᵀ tanh(q + k)", 1.0, bound)

    def attend(query: Tensor, key: Tensor, value: Tensor, signs: Signs) -> Attended:
        return additive_attention(query, key, value, weight, signs=signs)

    return Lane(info, attend, None, None)


def _expected(
    settings: ExplainSettings, variance: float, relative: float, cap: float | None
) -> tuple[float | None, float | None]:
    """The expected variance and its standard error; (None, None) for a single word, which has a single score.

    A cap takes about 2 variance / cap² off it, which does not show when the cap is far away. Otherwise nothing is predicted.
    """
    capped = cap is not None and cap < FAR * variance**0.5
    return (variance, variance * relative) if _distinct(settings) > 1 and not capped else (None, None)


def _factor(settings: ExplainSettings, chosen: Rule) -> float:
    heads, keys = settings.model_heads, settings.count
    return float(chosen.scale(head_dim=settings.d_k, heads=heads, layer=settings.layer, keys=keys))


def _distinct(settings: ExplainSettings) -> int:
    return len(set(settings.words))


def _heads(settings: ExplainSettings) -> int:
    return settings.heads or 1
