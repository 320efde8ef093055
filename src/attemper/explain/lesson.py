"""The lesson: what was computed, step by step, in words, formulas and numbers; and the conclusion from the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from .compute import Computed, Lane, LaneInfo
from .settings import CORNER, ExplainSettings
from .steps import HeadLine, LaneReading, LessonStep, Matrix, measured, short

ONE_HOT = 0.9
"""At this mean top weight and above, attention is called nearly one-hot."""
NARROW = 0.5
"""Below this evenness (entropy as a share of its maximum), it is called narrow."""
FLAT = 0.99
"""At this evenness and above, it is called flat."""

LOOKS = {
    "one-hot": "is nearly one-hot",
    "narrow": "is on few keys without being one-hot",
    "shared": "is spread over several keys",
    "flat": "is nearly even",
}

SignMeans = Mapping[str, float]


def lesson(settings: ExplainSettings, found: Computed) -> tuple[LessonStep, ...]:
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


def _embeddings(settings: ExplainSettings, found: Computed) -> LessonStep:
    return LessonStep(
        "embeddings",
        "Embeddings",
        f"Each word becomes {settings.d_model} numbers. Here they are drawn from N(0,1) by its spelling and the seed (same "
        "word, same vector); a model learns them.",
        "X: one row per word",
        matrices=(_rows("X", found.embedded, settings),),
    )


def _projections(settings: ExplainSettings, found: Computed) -> LessonStep:
    width = settings.d_k * (settings.heads or 1)
    share = f" Head h owns {settings.d_k} of the {width} columns: d_k = d_model / heads." if settings.heads else ""
    return LessonStep(
        "projections",
        "Projections",
        "Three matrices, the same for every word: one for queries, one for keys, one for values. Drawn from "
        f"N(0,1/{settings.d_model}), so that q and k have entries of variance 1.{share}",
        "W_Q, W_K, W_V",
        matrices=tuple(
            _first_row(name, found.projections[name], (settings.d_model, width)) for name in ("W_Q", "W_K", "W_V")
        ),
    )


def _queries(settings: ExplainSettings, found: Computed) -> LessonStep:
    of_head = f" One slice per head, {settings.heads} in all; head 1 is shown." if settings.heads else ""
    entries = tuple(part.var(correction=0).item() for part in (found.query, found.key))
    return LessonStep(
        "queries",
        "Queries, keys, values",
        f"Each word's vector, projected three ways, to d_k = {settings.d_k} numbers each.{of_head}",
        "Q = X W_Q,  K = X W_K,  V = X W_V",
        matrices=tuple(
            _rows(name, part[0], settings) for name, part in (("Q", found.query), ("K", found.key), ("V", found.value))
        ),
        note=f"Variance of the entries: q {entries[0]:.2f}, k {entries[1]:.2f}; drawn to be 1.",
    )


def _scores(settings: ExplainSettings, found: Computed) -> LessonStep:
    plain = next(place for place, lane in enumerate(found.lanes) if lane.info.rule == "none")
    scores = found.logits[plain]
    asks, offers = settings.shown[min(1, settings.count - 1)], settings.shown[0]
    value = scores[min(1, settings.count - 1), 0].item()
    if settings.score == "dot":
        formula, example = "S = Q Kᵀ", f"a sum of {settings.d_k} products"
    else:
        formula, example = "S[i, j] = qᵢ·kⱼ / (|qᵢ| |kⱼ|)", "the cosine of their angle"
    return LessonStep(
        "scores",
        "Scores",
        f"Every query is compared with every key: row i has the scores of word i with each word.{_one_head(settings)}",
        formula,
        matrices=(_square("S", scores, settings),),
        note=f"S[{offers if settings.count == 1 else asks}, {offers}] = {value:.2f}, {example}.",
    )


def _logits(settings: ExplainSettings, found: Computed) -> LessonStep:
    first, second = found.lanes
    several = f", mean of {settings.heads} heads" if settings.heads and settings.heads > 1 else ""
    if settings.score == "additive":
        title, formula = "Scores", "Z[i, j] = wᵀ tanh(qᵢ + kⱼ)"
        words = (
            "Every query is compared with every key. Additive: add the two, take tanh of every entry, multiply by w and sum. "
            f"There is nothing to divide: no score exceeds ‖w‖₁ = {first.info.bound:.2f} (not 1)."
        )
    else:
        title, formula = ("Scale", ",  ".join(f"{lane.info.label}: {_scaled(lane, settings)}" for lane in found.lanes))
        words = "One number multiplies the scores. Two choices of it, on the same q and k."
    return LessonStep(
        "logits",
        title,
        words,
        formula,
        lanes=tuple(_square(label, part, settings) for label, part in found.by_lane(found.logits)),
        readings=(
            LaneReading(
                "variance",
                "variance",
                f"of all {settings.count**2:,} logits{several}" if settings.count > 1 else "one logit has none",
                _pair(found, "variance"),
                expected=(first.variance, second.variance),
                give=(first.give, second.give),
                theory=_theory(settings, found),
            ),
            LaneReading("peak", "largest logit", _bounds(found), _pair(found, "peak")),
        ),
        note=_rule(settings),
    )


def _weights(settings: ExplainSettings, found: Computed) -> LessonStep:
    return LessonStep(
        "weights",
        "Softmax",
        f"Each row becomes weights that sum to 1: how much word i takes from each word.{_one_head(settings)}",
        "P[i, j] = exp Z[i, j] / Σⱼ exp Z[i, j]",
        lanes=tuple(_square(label, part, settings, weights=True) for label, part in found.by_lane(found.weights)),
    )


def _signs(settings: ExplainSettings, found: Computed) -> LessonStep:
    count = settings.count
    scales = " and ".join(short(lane.info.scale) for lane in found.lanes)
    plain = all(lane.info.score == "dot" and lane.softcap is None for lane in found.lanes)
    slope = "k" if plain else "the slope of the score"
    readings = (
        ("top_weight", "top weight", f"{short(1 / count)} is even, 1 is one-hot"),
        ("entropy", "entropy", f"ln {count:,} = {short(math.log(count))} is even, 0 is one-hot"),
        ("effective_keys", "effective keys", f"of {count:,} share the weight"),
        ("jacobian_trace", "1 − Σp²", f"{short(1 - 1 / count)} is even, 0 is one-hot"),
    )
    return LessonStep(
        "signs",
        "Vital signs",
        f"What the weights look like, as means over the {count:,} {'rows' if count > 1 else 'row'}{_over_heads(settings)}.",
        "H = −Σ p ln p,  effective keys = exp H,  trace = 1 − Σ p²",
        readings=tuple(LaneReading(name, label, says, _pair(found, name)) for name, label, says in readings),
        note="1 − Σp² is the trace of softmax's Jacobian: how much the weights change with their logits. It is not the "
        f"size of a gradient: the gradient of q is also multiplied by the scale ({scales} here) and by {slope}.",
    )


def _heads(settings: ExplainSettings, found: Computed) -> LessonStep:
    pairs = zip(*found.heads, strict=True)
    return LessonStep(
        "heads",
        "Heads",
        "Every head has its own queries, keys and values of the same words.",
        "headₕ = softmax(Zₕ) Vₕ",
        heads=tuple(
            HeadLine(place, *((one[name], two[name]) for name in ("variance", "top_weight", "entropy")))
            for place, (one, two) in enumerate(pairs, start=1)
        ),
    )


def _context(settings: ExplainSettings, found: Computed) -> LessonStep:
    shape = ""
    if settings.heads is None and settings.d_k != settings.d_model:
        came = f"[{settings.count}×{settings.d_model}]"
        shape = f" Not the input's shape {came} yet: that takes all heads and one more matrix."
    elif settings.heads is None:
        shape = " It has the input's shape because d_k is d_model here; several heads need one more matrix."
    return LessonStep(
        "context",
        "Context",
        f"Each word becomes the weighted mean of all values.{_one_head(settings)}{shape}",
        "head₁ = P V" if settings.heads else "C = P V",
        lanes=tuple(_rows(label, part[0], settings) for label, part in found.by_lane(found.context)),
    )


def _concat(settings: ExplainSettings, found: Computed) -> LessonStep:
    whole = (settings.count, settings.d_model)
    return LessonStep(
        "concat",
        "Concatenation",
        f"A word's contexts from all heads, one after another: {settings.heads} × {settings.d_k} = {settings.d_model} numbers.",
        "C = [head₁, head₂, …]",
        lanes=tuple(
            _rows(label, part[:, :CORNER].transpose(0, 1).flatten(1), settings, shape=whole)
            for label, part in found.by_lane(found.context)
        ),
    )


def _output(settings: ExplainSettings, found: Computed) -> LessonStep:
    assert found.output is not None
    return LessonStep(
        "output",
        "Output",
        "One more matrix mixes the heads. Only now is the shape that of the input again.",
        "Y = C W_O",
        matrices=(_first_row("W_O", found.projections["W_O"], (settings.d_model, settings.d_model)),),
        lanes=tuple(_rows(label, part, settings) for label, part in found.by_lane(found.output)),
    )


def _one_head(settings: ExplainSettings) -> str:
    return " (Head 1.)" if settings.heads else ""


def _over_heads(settings: ExplainSettings) -> str:
    return f" and {settings.heads} heads" if settings.heads and settings.heads > 1 else ""


def _pair(found: Computed, name: str) -> tuple[float, float]:
    return found.means[0][name], found.means[1][name]


def _rows(name: str, matrix: Tensor, settings: ExplainSettings, shape: tuple[int, ...] | None = None) -> Matrix:
    """A matrix with a row per word."""
    return Matrix(name, shape or tuple(matrix.shape), _numbers(matrix), rows=settings.shown)


def _first_row(name: str, corner: Tensor, shape: tuple[int, int]) -> Matrix:
    """A matrix whose rows are not words: the first is enough."""
    return Matrix(name, shape, _numbers(corner), rows=("row 1",))


def _square(name: str, corner: Tensor, settings: ExplainSettings, weights: bool = False) -> Matrix:
    """A matrix with a row and a column per word."""
    words = settings.shown
    return Matrix(name, (settings.count, settings.count), _numbers(corner), rows=words, columns=words, weights=weights)


def _numbers(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix[:CORNER, :CORNER].tolist())


def _scaled(lane: Lane, settings: ExplainSettings) -> str:
    """A lane's formula with its numbers in it; S is the matrix of the step before."""
    score = "S" if lane.info.score == settings.score else "cos(q, k)"
    product = score if lane.info.scale == 1 else f"{short(lane.info.scale)} {score}"
    if lane.softcap is None:
        return f"Z = {product}"
    return f"Z = {short(lane.softcap)} tanh({product} / {short(lane.softcap)})"


def _rule(settings: ExplainSettings) -> str:
    """What the chosen rule is, and what it knows here."""
    if settings.score == "additive":
        return ""
    chosen = settings.rule
    facts = {"layer": settings.layer, "keys": settings.count}
    here = [f"{name} = {facts[name]:,}" for name in chosen.needs if name in facts]
    if chosen.gain is not None:
        here.append(f"the learned number is {short(chosen.gain)}, where it starts")
    return f"{chosen.name}: {chosen.says}" + (f" Here {', '.join(here)}." if here else "")


def _theory(settings: ExplainSettings, found: Computed) -> str:
    """Where the expected variance comes from."""
    parts = {"cosine": "scale²/d_k", "dot": "scale²·d_k"}
    kinds = dict.fromkeys(parts[lane.info.score] for lane in found.lanes if lane.variance is not None)
    return "" if not kinds else f"{' and '.join(kinds)}; ± for {len(set(settings.words)):,} words"


def _bounds(found: Computed) -> str:
    """The most a logit can be."""
    known = [f"{lane.info.label} ≤ {short(lane.info.bound)}" for lane in found.lanes if lane.info.bound is not None]
    return f"always {', '.join(known)}" if known else "not bounded"


def conclude(count: int, distinct: int, lanes: tuple[LaneInfo, LaneInfo], signs: tuple[SignMeans, SignMeans]) -> str:
    """One sentence, from the means over rows and heads; the chosen lane comes first in both pairs."""
    if count == 1:
        return "A single word has one key, itself: its weight is 1 whatever the scale. Try two words or more."
    if distinct == 1:
        return (
            f"All {count:,} words are the same, and so are their keys: every weight is 1/{count:,} whatever the scale."
        )
    chosen, other = (lane.label for lane in lanes)
    keys, other_keys = (measured(sign["effective_keys"]) for sign in signs)
    clause = _clause(state(signs[0]), state(signs[1]))
    follows = clause.format(chosen=chosen, other=other, keys=keys, other_keys=other_keys, count=f"{count:,}")
    return f"With {other}, attention {_summary(signs[1])}; with {chosen}, it {_summary(signs[0])}: {follows}"


def state(signs: SignMeans) -> str:
    """one-hot, narrow, shared or flat."""
    if signs["top_weight"] >= ONE_HOT:
        return "one-hot"
    if signs["evenness"] >= FLAT:
        return "flat"
    return "narrow" if signs["evenness"] < NARROW else "shared"


def _summary(signs: SignMeans) -> str:
    facts = f"variance {measured(signs['variance'])}, top weight {measured(signs['top_weight'])}"
    return f"{LOOKS[state(signs)]} ({facts})"


def _clause(chosen: str, other: str) -> str:
    sharp = ("one-hot", "narrow")
    if chosen == "flat":
        return "hardly any of the {count} keys is preferred, and " + (
            "neither scale tells them apart." if other == "flat" else "{chosen} is what makes them even."
        )
    if other == "flat":
        return "{chosen} lets a word prefer some of the {count} keys; {other} hardly does."
    if chosen == other == "shared":
        return "nothing saturates here; {chosen} changes the effective keys from {other_keys} to {keys} of {count}."
    if chosen in sharp and other in sharp:
        return "both leave few effective keys of {count}: {other_keys} and {keys}."
    if other in sharp:
        return "{chosen} keeps {keys} effective keys of {count} instead of {other_keys}."
    return "{chosen} leaves {keys} effective keys of {count}; {other} keeps {other_keys}."
