"""Sentences about a layer's scale, and what to do about a fault."""

from __future__ import annotations

from ...scale import RULES
from .judge import MeasuredScale, ScaleVerdict, close, inverse_of, limit, rule_of

LOST = "The call applies no scale, and what happened to q and k before it could not be followed"
ALIGNED = 0.25  # this far from 1, a ratio of spreads is not chance at the sizes that models have


def explain(scale: MeasuredScale, verdict: ScaleVerdict) -> tuple[str, str]:
    """What a layer's scale is or what is wrong with it, and what to do."""
    if verdict.fault is None:
        return _fine(scale, verdict.rule, verdict.after_softmax), ""
    return SENTENCES[verdict.fault](scale, verdict.after_softmax)


def _fine(scale: MeasuredScale, rule: str | None, after: float | None) -> str:
    number = scale.applied
    if scale.lost:
        return (
            "The scale is not known: the call itself multiplies q·k by nothing, and what happened to q and k between their "
            "projections and the call could not be followed."
        )
    if number is None:
        return "The scale could not be measured: between q·k and the softmax the scores are changed by more than one factor."
    shown = f"{number:.4g}" if scale.varies is None else f"{scale.varies[0]:.4g} to {scale.varies[1]:.4g}"
    words = f"q·k is multiplied by {shown}"
    if scale.norms is not None:
        gain = number * scale.norms[0] * scale.norms[1] * scale.head_dim**0.5
        words = f"q and k are normalised, then multiplied by {shown}: g √d_k cos(q, k) with g = {gain:.3g}"
    elif rule is not None:
        words += f": {RULES[rule].formula}"
    else:
        words += ", which matches no named rule"
    if scale.declared is not None and (scale.declared.firm or "." in scale.declared.by):
        formula = f" ({scale.declared.says})" if scale.declared.says and scale.declared.says != "1/√d_k" else ""
        words += (
            f", as {scale.declared.by} says{formula}" if close(number / scale.stretch, scale.declared.number) else ""
        )
    if scale.stretch != 1.0:
        words += f"; {scale.stretch:.4g} of it is the rotary embedding's, which stretches q and k (YaRN)"
    if scale.softcap is not None:
        words += f"; then capped at {scale.softcap:g}"
    if after is not None:
        words += f"; the weights of a row add up to {after:.4g}"
    if not scale.followed:
        words += "; what happened to q and k between their projections and the call could not be followed"
    return words + "."


def spread(measured: float | None, predicted: float | None) -> str:
    """The logit std compared with that of q and k of the same lengths in random directions."""
    if not measured or not predicted:
        return "The logit std could not be compared with that of q and k in random directions."
    times = measured / predicted
    means = "their directions look random, as before training"
    if times > 1 + ALIGNED:
        means = "queries are aligned with the directions in which keys differ, as training makes them"
    elif times < 1 - ALIGNED:
        means = "queries are aligned with directions in which keys differ little"
    return (
        f"The logit std is {measured:.3g}, {times:.2g} times the {predicted:.3g} of q and k of the same lengths in random "
        f"directions: {means}."
    )


def _says_twice(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    d = scale.head_dim
    return (
        f"Scaled twice: 1/√d_k = {d**-0.5:.4g} is applied twice, so q·k is multiplied by {scale.applied:.4g} and "
        "attention is far flatter than intended.",
        "Remove one of the two: pass scale=1.0 to scaled_dot_product_attention, or do not scale q before it. If 1/d_k is meant "
        "(µP), write it as one number.",
    )


def _says_sqrt_dmodel(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    d = scale.head_dim
    return (
        f"√d_model instead of √d_k: q·k is multiplied by {scale.applied:.4g}, but each head sums over d_k = {d} numbers, which "
        f"needs {d**-0.5:.4g}. Logits are {d**-0.5 / (scale.applied or 1):.3g} times too small, and attention too flat.",
        "Divide by the square root of the head's width, head_dim ** 0.5. If the weights were trained like this, keep it and "
        "say so in a comment.",
    )


def _says_ignored(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    if scale.declared is not None and (scale.declared.firm or not scale.declared.heeded):
        formula = f"{scale.declared.says} = " if scale.declared.says else ""
        source, wanted = scale.declared.by, f"{formula}{scale.declared.number:.4g}"
    else:
        source, wanted = "the attention interface was given", f"{scale.given:.4g}"
    rule = rule_of(scale)
    given = f"{scale.applied:.4g}" + (f" ({RULES[rule].formula})" if rule is not None else "")
    verb = "" if source.endswith("given") else " says"
    return (
        f"A setting is ignored: {source}{verb} {wanted}, but the code that ran applies {given}.",
        "Use an attention implementation that honours it (attn_implementation='eager' often does), or update the library.",
    )


def _says_uncontrolled(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    opening = f"q·k is multiplied by {scale.applied:.4g}, without QK-norm" if scale.applied is not None else LOST
    if scale.applied is not None and close(scale.applied, 1.0):
        opening = "No scale and no QK-norm"
    return (
        f"{opening}: the logit std is {scale.logit_std:.3g}, above √(2 ln n) = {limit(scale.keys or 1.0):.3g} for the "
        f"{scale.keys:.0f} keys a row sees, where a softmax freezes on one key.",
        "Multiply q·k by 1/√d_k (scaled_dot_product_attention does so by default), or normalise q and k. If 1/√d_k is part "
        "of the weights, the scale is correct: the heads are sharp because of training.",
    )


def _says_unscaled(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    spread = "" if scale.logit_std is None else f" Logits spread by {scale.logit_std:.3g} here, and"
    return (
        f"No scale, and nothing declares that: q·k is a sum over d_k = {scale.head_dim} numbers and is multiplied by nothing."
        f"{spread or ' Logits'} grow with the weights: 1/√d_k = {scale.head_dim**-0.5:.4g} keeps their size independent of d_k.",
        "If it is meant (1/√d_k folded into the weights, as T5 has it), declare it: scale = 1.0 in the attention module. Else "
        "multiply q·k by head_dim ** -0.5.",
    )


def _says_multiplied(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    divisor = inverse_of(scale)
    spread = "" if scale.logit_std is None else f" The logit std is {scale.logit_std:.3g}."
    return (
        f"Multiplied instead of divided: q·k is multiplied by {scale.applied:.4g} = {divisor}, instead of "
        f"{scale.head_dim**-0.5:.4g} = 1/√d_k.{spread}",
        "Divide q·k by √d_k, or multiply it by head_dim ** -0.5: the sign of the exponent is missing, or * was written for /.",
    )


def _says_negative(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    return (
        f"A negative scale: q·k is multiplied by {scale.applied:.4g}, so the keys that match a query least get the most weight.",
        "Remove the minus. If the weights were trained like this, they need it: keep it and say so in a comment.",
    )


def _says_shrunk(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    return (
        f"The weights of a row add up to {after:.4g}, which is both 1/heads and 1/√d_k: a mean over the heads if they are "
        "summed afterwards; otherwise the output is scaled after the softmax.",
        "If the heads are concatenated, remove the factor after the softmax.",
    )


def out_of_line(number: float, others: int, common: float) -> tuple[str, str]:
    """The sentences for a layer that applies another scale than all others like it."""
    return (
        f"This layer multiplies q·k by {number:.4g}, the {others} others like it by {common:.4g}.",
        "If that is intended, say so in a comment; otherwise give it the scale of the others.",
    )


def _says_after(scale: MeasuredScale, after: float | None) -> tuple[str, str]:
    return (
        f"Scaled after the softmax: its output is multiplied by {after:.4g}, which shrinks the output and does not "
        "change how sharp attention is.",
        "Move the factor in front of the softmax: softmax(q·k / √d_k) v.",
    )


SENTENCES = {
    "twice": _says_twice,
    "sqrt_dmodel": _says_sqrt_dmodel,
    "ignored": _says_ignored,
    "uncontrolled": _says_uncontrolled,
    "unscaled": _says_unscaled,
    "multiplied": _says_multiplied,
    "negative": _says_negative,
    "shrunk": _says_shrunk,
    "after_softmax": _says_after,
}
