"""The lesson: what was computed, told step by step. One line of words, the formula, the numbers."""

from __future__ import annotations

import math

from torch import Tensor

from . import phrases
from .flow import Computed
from .settings import Settings
from .steps import CORNER, HeadLine, Matrix, Reading, Step, short


def lesson(settings: Settings, found: Computed) -> tuple[Step, ...]:
    """The steps, in order."""
    steps = [_embeddings(settings, found), _projections(settings, found), _queries(settings, found)]
    if settings.score != "additive":
        steps.append(_scores(settings, found))
    steps += [_logits(settings, found), _weights(settings, found), _signs(settings, found)]
    if settings.heads:
        steps.append(_heads(settings, found))
    steps.append(_context(settings, found))
    if found.output is not None:
        steps += [_concat(settings, found), _output(settings, found)]
    return tuple(steps)


def _embeddings(settings: Settings, found: Computed) -> Step:
    return Step(
        "embeddings",
        "Embeddings",
        f"Each word becomes {settings.d_model} numbers. Here they are drawn from N(0,1) by its spelling and the seed (same "
        "word, same vector); a model learns them.",
        "X: one row per word",
        matrices=(_rows("X", found.embedded, settings),),
    )


def _projections(settings: Settings, found: Computed) -> Step:
    width = settings.d_k * (settings.heads or 1)
    share = f" Head h owns {settings.d_k} of the {width} columns: d_k = d_model / heads." if settings.heads else ""
    return Step(
        "projections",
        "Projections",
        "Three matrices, the same for every word: what it looks for, what it offers, what it hands over. Drawn from "
        f"N(0,1/{settings.d_model}), so that q and k have entries of variance 1.{share}",
        "W_Q, W_K, W_V",
        matrices=tuple(
            _first_row(name, found.projections[name], (settings.d_model, width)) for name in ("W_Q", "W_K", "W_V")
        ),
    )


def _queries(settings: Settings, found: Computed) -> Step:
    of_head = f" One cut per head, {settings.heads} in all; this is head 1's." if settings.heads else ""
    entries = tuple(part.var(correction=0).item() for part in (found.query, found.key))
    return Step(
        "queries",
        "Queries, keys, values",
        f"Each word's vector, seen three ways, in d_k = {settings.d_k} numbers each.{of_head}",
        "Q = X W_Q,  K = X W_K,  V = X W_V",
        matrices=tuple(
            _rows(name, part[0], settings) for name, part in (("Q", found.query), ("K", found.key), ("V", found.value))
        ),
        note=f"Variance of the entries: q {entries[0]:.2f}, k {entries[1]:.2f}; drawn to be 1.",
    )


def _scores(settings: Settings, found: Computed) -> Step:
    plain = next(place for place, lane in enumerate(found.lanes) if lane.info.rule == "none")
    scores = found.logits[plain]
    asks, offers = settings.shown[min(1, settings.count - 1)], settings.shown[0]
    value = scores[min(1, settings.count - 1), 0].item()
    if settings.score == "dot":
        formula, example = "S = Q Kᵀ", f"a sum of {settings.d_k} products"
    else:
        formula, example = "S[i, j] = qᵢ·kⱼ / (|qᵢ| |kⱼ|)", "the cosine of their angle"
    return Step(
        "scores",
        "Scores",
        f"Every query meets every key: row i says how well each word answers word i.{_one_head(settings)}",
        formula,
        matrices=(_square("S", scores, settings),),
        note=f"S[{offers if settings.count == 1 else asks}, {offers}] = {value:.2f}, {example}.",
    )


def _logits(settings: Settings, found: Computed) -> Step:
    first, second = found.lanes
    several = f", mean of {settings.heads} heads" if settings.heads and settings.heads > 1 else ""
    if settings.score == "additive":
        title, formula = "Scores", "Z[i, j] = wᵀ tanh(qᵢ + kⱼ)"
        words = (
            "Every query meets every key. Additive: add the two, squash every entry with tanh, weigh with w; there is "
            f"nothing to divide, for no score passes ‖w‖₁ = {first.info.bound:.2f} (not 1)."
        )
    else:
        title, formula = (
            "Scale",
            ",  ".join(f"{lane.info.label}: {phrases.scaled(lane, settings)}" for lane in found.lanes),
        )
        words = "One number in front of the scores, chosen two ways, on the same q and k."
    return Step(
        "logits",
        title,
        words,
        formula,
        lanes=tuple(
            _square(lane.info.label, part, settings) for lane, part in zip(found.lanes, found.logits, strict=True)
        ),
        readings=(
            Reading(
                "variance",
                "variance",
                f"of all {settings.count**2:,} logits{several}" if settings.count > 1 else "one logit has none",
                _pair(found, "variance"),
                expected=(first.variance, second.variance),
                give=(first.give, second.give),
                theory=phrases.theory(settings, found),
            ),
            Reading("peak", "largest logit", phrases.bounds(found), _pair(found, "peak")),
        ),
        note=phrases.rule(settings),
    )


def _weights(settings: Settings, found: Computed) -> Step:
    return Step(
        "weights",
        "Softmax",
        f"Each row becomes weights that sum to 1: what word i takes from every word.{_one_head(settings)}",
        "P[i, j] = exp Z[i, j] / Σⱼ exp Z[i, j]",
        lanes=tuple(
            _square(lane.info.label, part, settings, weights=True)
            for lane, part in zip(found.lanes, found.weights, strict=True)
        ),
    )


def _signs(settings: Settings, found: Computed) -> Step:
    count = settings.count
    scales = " and ".join(short(lane.info.scale) for lane in found.lanes)
    slope = (
        "k"
        if all(lane.info.score == "dot" and lane.softcap is None for lane in found.lanes)
        else "the slope of the score"
    )
    return Step(
        "signs",
        "Vital signs",
        f"What the weights look like, as means over the {count:,} {'rows' if count > 1 else 'row'}{_over_heads(settings)}.",
        "H = −Σ p ln p,  effective keys = exp H,  trace = 1 − Σ p²",
        readings=(
            Reading(
                "top_weight", "top weight", f"{short(1 / count)} is even, 1 is one-hot", _pair(found, "top_weight")
            ),
            Reading(
                "entropy",
                "entropy",
                f"ln {count:,} = {short(math.log(count))} is even, 0 is one-hot",
                _pair(found, "entropy"),
            ),
            Reading(
                "effective_keys", "effective keys", f"of {count:,} share the weight", _pair(found, "effective_keys")
            ),
            Reading(
                "jacobian_trace",
                "1 − Σp²",
                f"{short(1 - 1 / count)} is even, 0 is frozen",
                _pair(found, "jacobian_trace"),
            ),
        ),
        note="1 − Σp² is the trace of softmax's Jacobian: how far the weights can still move with their logits. It is not the "
        f"size of a gradient: what reaches q is also multiplied by the scale ({scales} here) and by {slope}.",
    )


def _heads(settings: Settings, found: Computed) -> Step:
    pairs = zip(*found.heads, strict=True)
    return Step(
        "heads",
        "Heads",
        "Every head asks its own question of the same words.",
        "headₕ = softmax(Zₕ) Vₕ",
        heads=tuple(
            HeadLine(place, *((one[name], two[name]) for name in ("variance", "top_weight", "entropy")))
            for place, (one, two) in enumerate(pairs, start=1)
        ),
    )


def _context(settings: Settings, found: Computed) -> Step:
    shape = ""
    if settings.heads is None and settings.d_k != settings.d_model:
        came = f"[{settings.count}×{settings.d_model}]"
        shape = f" Not the input's shape {came} yet: that takes all heads and one more matrix."
    elif settings.heads is None:
        shape = " It has the input's shape because d_k is d_model here; several heads need one more matrix."
    return Step(
        "context",
        "Context",
        f"Each word becomes the weighted mean of all values.{_one_head(settings)}{shape}",
        "head₁ = P V" if settings.heads else "C = P V",
        lanes=tuple(
            _rows(lane.info.label, part[0], settings) for lane, part in zip(found.lanes, found.context, strict=True)
        ),
    )


def _concat(settings: Settings, found: Computed) -> Step:
    whole = (settings.count, settings.d_model)
    return Step(
        "concat",
        "Concatenation",
        f"A word's contexts from all heads, end to end: {settings.heads} × {settings.d_k} = {settings.d_model} numbers.",
        "C = [head₁, head₂, …]",
        lanes=tuple(
            _rows(lane.info.label, part[:, :CORNER].transpose(0, 1).flatten(1), settings, shape=whole)
            for lane, part in zip(found.lanes, found.context, strict=True)
        ),
    )


def _output(settings: Settings, found: Computed) -> Step:
    assert found.output is not None
    return Step(
        "output",
        "Output",
        "One more matrix mixes the heads. Only now is the shape that of the input again.",
        "Y = C W_O",
        matrices=(_first_row("W_O", found.projections["W_O"], (settings.d_model, settings.d_model)),),
        lanes=tuple(
            _rows(lane.info.label, part, settings) for lane, part in zip(found.lanes, found.output, strict=True)
        ),
    )


def _one_head(settings: Settings) -> str:
    return " (Head 1's.)" if settings.heads else ""


def _over_heads(settings: Settings) -> str:
    return f" and {settings.heads} heads" if settings.heads and settings.heads > 1 else ""


def _pair(found: Computed, name: str) -> tuple[float, float]:
    return found.means[0][name], found.means[1][name]


def _rows(name: str, matrix: Tensor, settings: Settings, shape: tuple[int, ...] | None = None) -> Matrix:
    """A matrix with a row per word."""
    return Matrix(name, shape or tuple(matrix.shape), _numbers(matrix), rows=settings.shown)


def _first_row(name: str, corner: Tensor, shape: tuple[int, int]) -> Matrix:
    """A matrix whose rows stand for no word: the first is enough."""
    return Matrix(name, shape, _numbers(corner), rows=("row 1",))


def _square(name: str, corner: Tensor, settings: Settings, weights: bool = False) -> Matrix:
    """A matrix with a row and a column per word."""
    words = settings.shown
    return Matrix(name, (settings.count, settings.count), _numbers(corner), rows=words, columns=words, weights=weights)


def _numbers(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix[:CORNER, :CORNER].tolist())
