"""The lesson: what was computed, step by step, in words, formulas and numbers; and the conclusion from the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor

from ..maths.theory import NEARLY_ONE_HOT
from .compute import Computed, Lane, LaneInfo
from .settings import CORNER, ExplainSettings
from .steps import HeadLine, LaneReading, LessonStep, Matrix, format_exact, format_measured

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


def lesson(settings: ExplainSettings, computed: Computed) -> tuple[LessonStep, ...]:
    """The steps, in order."""
    return (*_vectors(settings, computed), *_attention(settings, computed), *_contexts(settings, computed))


def _vectors(settings: ExplainSettings, computed: Computed) -> Iterator[LessonStep]:
    """From words to queries, keys and values."""
    width = settings.d_k * (settings.heads or 1)
    share = f" Head h owns {settings.d_k} of the {width} columns: d_k = d_model / heads." if settings.heads else ""
    of_head = f" One slice per head, {settings.heads} in all; head 0 is shown." if settings.heads else ""
    query, key = (part.var(correction=0).item() for part in (computed.query, computed.key))
    vectors = {"Q": computed.query, "K": computed.key, "V": computed.value}
    yield LessonStep(
        "embeddings",
        "Embeddings",
        f"Each word becomes {settings.d_model} numbers. Here they are drawn from N(0,1) by its spelling and the seed (same "
        "word, same vector); a model learns them.",
        "X: one row per word",
        matrices=(_rows("X", computed.embedded, settings),),
    )
    yield LessonStep(
        "projections",
        "Projections",
        "Three matrices, the same for every word: one for queries, one for keys, one for values. Drawn from "
        f"N(0,1/{settings.d_model}), so that q and k have entries of variance 1.{share}",
        "W_Q, W_K, W_V",
        matrices=tuple(_first_row(f"W_{name}", computed, (settings.d_model, width)) for name in vectors),
    )
    yield LessonStep(
        "queries",
        "Queries, keys, values",
        f"Each word's vector, projected three ways, to d_k = {settings.d_k} numbers each.{of_head}",
        "Q = X W_Q,  K = X W_K,  V = X W_V",
        matrices=tuple(_rows(name, part[0], settings) for name, part in vectors.items()),
        note=f"Variance of the entries: q {query:.2f}, k {key:.2f}; drawn to be 1.",
    )


def _attention(settings: ExplainSettings, computed: Computed) -> Iterator[LessonStep]:
    """From scores to weights, in both lanes, and what the weights look like."""
    head, count = " (Head 0.)" if settings.heads else "", settings.count
    heads = settings.heads if settings.heads and settings.heads > 1 else 0
    first, second = (lane.lane for lane in computed.lanes)
    if settings.score == "additive":
        title, formula = "Scores", "Z[i, j] = wᵀ tanh(qᵢ + kⱼ)"
        words = (
            "Every query is compared with every key. Additive: add the two, take tanh of every entry, multiply by w and sum. "
            f"There is nothing to divide: no score exceeds ‖w‖₁ = {first.info.bound:.2f} (not 1)."
        )
    else:
        yield _scores(settings, computed, head)
        title, formula = (
            "Scale",
            ",  ".join(f"{lane.info.label}: {_scaled(lane.lane, settings)}" for lane in computed.lanes),
        )
        words = "One number multiplies the scores. Two choices of it, on the same q and k."
    several = f", mean of {heads} heads" if heads else ""
    variance = LaneReading(
        "variance",
        "variance",
        f"of all {count**2:,} logits{several}" if count > 1 else "one logit has none",
        _pair(computed, "variance"),
        expected=(first.variance, second.variance),
        std=(first.std, second.std),
        theory=_theory(settings, computed),
    )
    yield LessonStep(
        "logits",
        title,
        words,
        formula,
        lanes=tuple(_square(lane.info.label, lane.logits, settings) for lane in computed.lanes),
        readings=(variance, LaneReading("peak", "largest logit", _bounds(computed), _pair(computed, "peak"))),
        note=_rule(settings),
    )
    yield LessonStep(
        "weights",
        "Softmax",
        f"Each row becomes weights that sum to 1: how much word i takes from each word.{head}",
        "P[i, j] = exp Z[i, j] / Σⱼ exp Z[i, j]",
        lanes=tuple(_square(lane.info.label, lane.weights, settings, weights=True) for lane in computed.lanes),
    )
    scales = " and ".join(format_exact(lane.info.scale) for lane in computed.lanes)
    plain = all(lane.info.score == "dot" and lane.lane.softcap is None for lane in computed.lanes)
    readings = {
        "top_weight": ("top weight", f"{format_exact(1 / count)} is even, 1 is one-hot"),
        "entropy": ("entropy", f"ln {count:,} = {format_exact(math.log(count))} is even, 0 is one-hot"),
        "effective_keys": ("effective keys", f"of {count:,} share the weight"),
        "jacobian_trace": ("1 − Σp²", f"{format_exact(1 - 1 / count)} is even, 0 is one-hot"),
    }
    over = f" and {heads} heads" if heads else ""
    yield LessonStep(
        "signs",
        "Vital signs",
        f"What the weights look like, as means over the {count:,} {'rows' if count > 1 else 'row'}{over}.",
        "H = −Σ p ln p,  effective keys = exp H,  trace = 1 − Σ p²",
        readings=tuple(LaneReading(name, *words, _pair(computed, name)) for name, words in readings.items()),
        note="1 − Σp² is the trace of softmax's Jacobian: how much the weights change with their logits. It is not the "
        f"size of a gradient: the gradient of q is also multiplied by the scale ({scales} here) and by "
        f"{'k' if plain else 'the slope of the score'}.",
    )


def _scores(settings: ExplainSettings, computed: Computed, head: str) -> LessonStep:
    plain = next(lane.logits for lane in computed.lanes if lane.info.rule == "none")
    row = min(1, settings.count - 1)
    if settings.score == "dot":
        formula, example = "S = Q Kᵀ", f"a sum of {settings.d_k} products"
    else:
        formula, example = "S[i, j] = qᵢ·kⱼ / (|qᵢ| |kⱼ|)", "the cosine of their angle"
    return LessonStep(
        "scores",
        "Scores",
        f"Every query is compared with every key: row i has the scores of word i with each word.{head}",
        formula,
        matrices=(_square("S", plain, settings),),
        note=f"S[{settings.shown[row]}, {settings.shown[0]}] = {plain[row, 0].item():.2f}, {example}.",
    )


def _contexts(settings: ExplainSettings, computed: Computed) -> Iterator[LessonStep]:
    """What becomes of the values; with several heads, of all of them together."""
    shape = " (Head 0.)" if settings.heads else ""
    first, second = computed.lanes
    if settings.heads:
        lines = enumerate(zip(first.heads, second.heads, strict=True))
        signs = ("variance", "top_weight", "entropy")
        yield LessonStep(
            "heads",
            "Heads",
            "Every head has its own queries, keys and values of the same words.",
            "headₕ = softmax(Zₕ) Vₕ",
            heads=tuple(HeadLine(head, *((one[name], two[name]) for name in signs)) for head, (one, two) in lines),
        )
    elif settings.d_k == settings.d_model:
        shape = " It has the input's shape because d_k is d_model here; several heads need one more matrix."
    else:
        came = f"[{settings.count}×{settings.d_model}]"
        shape = f" Not the input's shape {came} yet: that takes all heads and one more matrix."
    yield LessonStep(
        "context",
        "Context",
        f"Each word becomes the weighted mean of all values.{shape}",
        "head₀ = P V" if settings.heads else "C = P V",
        lanes=tuple(_rows(lane.info.label, lane.context[0], settings) for lane in computed.lanes),
    )
    if not settings.heads:
        return
    whole = (settings.count, settings.d_model)
    yield LessonStep(
        "concat",
        "Concatenation",
        f"A word's contexts from all heads, one after another: {settings.heads} × {settings.d_k} = {settings.d_model} numbers.",
        "C = [head₀, head₁, …]",
        lanes=tuple(
            _rows(lane.info.label, lane.context[:, :CORNER].transpose(0, 1).flatten(1), settings, whole)
            for lane in computed.lanes
        ),
    )
    yield LessonStep(
        "output",
        "Output",
        "One more matrix mixes the heads. Only now is the shape that of the input again.",
        "Y = C W_O",
        matrices=(_first_row("W_O", computed, (settings.d_model, settings.d_model)),),
        lanes=tuple(
            _rows(lane.info.label, lane.output, settings) for lane in computed.lanes if lane.output is not None
        ),
    )


def _pair(computed: Computed, name: str) -> tuple[float, float]:
    return computed.lanes[0].means[name], computed.lanes[1].means[name]


def _rows(name: str, matrix: Tensor, settings: ExplainSettings, shape: tuple[int, ...] | None = None) -> Matrix:
    """A matrix with a row per word."""
    return Matrix(name, shape or tuple(matrix.shape), _numbers(matrix), rows=settings.shown)


def _first_row(name: str, computed: Computed, shape: tuple[int, int]) -> Matrix:
    """A projection, whose rows are not words: the first is enough."""
    return Matrix(name, shape, _numbers(computed.projections[name]), rows=("row 1",))


def _square(name: str, corner: Tensor, settings: ExplainSettings, weights: bool = False) -> Matrix:
    """A matrix with a row and a column per word."""
    words = settings.shown
    return Matrix(name, (settings.count, settings.count), _numbers(corner), rows=words, columns=words, weights=weights)


def _numbers(matrix: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix[:CORNER, :CORNER].tolist())


def _scaled(lane: Lane, settings: ExplainSettings) -> str:
    """A lane's formula with its numbers in it; S is the matrix of the step before."""
    score = "S" if lane.info.score == settings.score else "cos(q, k)"
    product = score if lane.info.scale == 1 else f"{format_exact(lane.info.scale)} {score}"
    if lane.softcap is None:
        return f"Z = {product}"
    return f"Z = {format_exact(lane.softcap)} tanh({product} / {format_exact(lane.softcap)})"


def _rule(settings: ExplainSettings) -> str:
    """What the chosen rule is, with the values of what it depends on."""
    if settings.score == "additive":
        return ""
    chosen = settings.rule
    facts = {"layer": settings.layer, "keys": settings.count}
    here = [f"{name} = {facts[name]:,}" for name in chosen.needs if name in facts]
    if chosen.gain is not None:
        here.append(f"the learned number is {format_exact(chosen.gain)}, where it starts")
    return f"{chosen.name}: {chosen.description}" + (f" Here {', '.join(here)}." if here else "")


def _theory(settings: ExplainSettings, computed: Computed) -> str:
    """Where the expected variance comes from."""
    parts = {"cosine": "scale²/d_k", "dot": "scale²·d_k"}
    kinds = dict.fromkeys(parts[lane.info.score] for lane in computed.lanes if lane.lane.variance is not None)
    return "" if not kinds else f"{' and '.join(kinds)}; ± for {len(set(settings.words)):,} words"


def _bounds(computed: Computed) -> str:
    """The most a logit can be."""
    known = [
        f"{lane.info.label} ≤ {format_exact(lane.info.bound)}" for lane in computed.lanes if lane.info.bound is not None
    ]
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
    keys, other_keys = (format_measured(sign["effective_keys"]) for sign in signs)
    clause = _clause(state(signs[0]), state(signs[1]))
    follows = clause.format(chosen=chosen, other=other, keys=keys, other_keys=other_keys, count=f"{count:,}")
    return f"With {other}, attention {_summary(signs[1])}; with {chosen}, it {_summary(signs[0])}: {follows}"


def state(signs: SignMeans) -> str:
    """one-hot, narrow, shared or flat."""
    if signs["top_weight"] >= NEARLY_ONE_HOT:
        return "one-hot"
    if signs["evenness"] >= FLAT:
        return "flat"
    return "narrow" if signs["evenness"] < NARROW else "shared"


def _summary(signs: SignMeans) -> str:
    facts = f"variance {format_measured(signs['variance'])}, top weight {format_measured(signs['top_weight'])}"
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
