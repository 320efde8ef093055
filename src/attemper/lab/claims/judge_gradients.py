"""judge_gradients: what becomes of the gradient without the scale: two units, two statistics, two times. Functions from rows.

Units: at the softmax's input, |J dL/dp|, and at q. Statistics: the median and the root mean square (RMS). Times: before training,
and while a language model trains (rows that come with the package). All are ratios: without the scale ÷ with 1/√d_k.
"""

from __future__ import annotations

import math
from statistics import median
from typing import NamedTuple

from ..engine.experiment import Rows, pick
from ..exact.gradient import without_over_with
from ..maths import gradients
from ..maths.gradients import UNITS
from ..maths.theory import NEARLY_ONE_HOT
from ..training import charlm
from .judgement import CONDITION, FALSE, HOLDS, Evidence, Judgement

HEAD_DIM = 128  # at which gradients before training are compared: that of most large models
SMALL = 0.2  # of its largest value: the Jacobian has become small


class _Ratios(NamedTuple):
    """The numbers by name, apart by statistic and time, and the context."""

    median_before: dict[str, float]
    rms_before: dict[str, float]
    median_trained: dict[str, float]
    rms_trained: dict[str, float]
    context: dict[str, float]

    @property
    def numbers(self) -> dict[str, float]:
        return {**self.median_before, **self.rms_before, **self.median_trained, **self.rms_trained}


def _ratios(evidence: Evidence) -> _Ratios:
    found = _Ratios({}, {}, {}, {}, {})
    for rows in (evidence["gradient"], evidence["gradient_long"]):
        n = rows[0]["n"]
        for unit, where in UNITS.items():
            for statistic, some in (("median", found.median_before), ("rms", found.rms_before)):
                ratio = without_over_with(rows, f"{unit}_{statistic}", n)[HEAD_DIM]
                name = f"{_said(statistic)} gradient {where} before training, without the scale ÷ with it"
                some[f"{name} (d_k = {HEAD_DIM}, {n} keys)"] = ratio
            name = f"d_k from which the median gradient {where} is smaller without the scale, before training, {n} keys"
            found.context[name] = gradients.crossing(n, unit)
    _while_training(evidence["trained"], found)
    return found


def _while_training(rows: Rows, found: _Ratios) -> None:
    """The ratios after the last step, at the learning rate that speaks most against the claims: largest median, smallest RMS."""
    d = rows[0]["d_model"] // rows[0]["heads"]
    step, rates = max(row["step"] for row in rows), ", ".join(f"{lr:g}" for lr in sorted({row["lr"] for row in rows}))
    model = f"language model, d_k = {d}, lr {rates}"
    for statistic, some in (("median", found.median_trained), ("rms", found.rms_trained)):
        ratios = charlm.gradient_ratios(rows, f"grad_q_{statistic}")
        last = [of_step[step] for of_step in ratios.values()]
        for word, value in (("largest", max(last)), ("smallest", min(last))):
            name = f"{_said(statistic)} gradient at q after {step} training steps, without the scale ÷ with it, {word}"
            some[f"{name} ({model})"] = value
            name = f"{_said(statistic)} gradient at q after {step} steps, without ÷ with it, the factor √d_k set aside, {word}"
            found.context[name] = value / math.sqrt(d)
        name = f"{_said(statistic)} gradient at q at step 0 of that model, without the scale ÷ with it"
        found.context[name] = next(iter(ratios.values()))[0]
    for rule, words in (("none", "without the scale"), ("sqrt_dk", "with it")):
        last_rows = pick(rows, rule=rule, step=step)
        shares = [row["grad_q_median"] / row["grad_q_rms"] for row in last_rows]
        found.context[f"median ÷ RMS of the gradient at q after {step} steps, {words}, median of the runs"] = median(
            shares
        )


def _aside(trained: Rows, found: _Ratios) -> str:
    """The RMS while a model trains, in the other unit."""
    root = math.sqrt(trained[0]["d_model"] // trained[0]["heads"])
    less = {name: value / root for name, value in found.rms_trained.items()}
    return f"without the factor √d_k, which Adam ignores, it ends at {_range(less)} times its value with the scale"


def _said(statistic: str) -> str:
    return {"median": "median", "rms": "RMS"}[statistic]


def _range(ratios: dict[str, float]) -> str:
    """From the least to the most, in two digits."""
    ends = dict.fromkeys(f"{value:.2g}" for value in (min(ratios.values()), max(ratios.values())))
    return " to ".join(ends)


def gradients_vanish(evidence: Evidence) -> Judgement:
    """At saturation the Jacobian is small, which is a statement of its own; what the scale has to do with it is another."""
    found = _ratios(evidence)
    bare = pick(evidence["jacobian"], rule="none")
    largest = max(bare, key=lambda row: row["square"])
    one_hot = pick(bare, d=64)[0]["one_hot_square"]
    numbers = {
        f"mean ‖J‖_F² of nearly one-hot rows (top weight above {NEARLY_ONE_HOT:g}; d_k = 64, {largest['n']} keys)": one_hot,
        f"mean ‖J‖_F² where it is largest (d_k = {largest['d']}, {largest['n']} keys)": largest["square"],
        **found.numbers,
    }
    if not one_hot < SMALL * largest["square"]:
        words = "even where one key has nearly all the weight, the softmax's Jacobian is not small"
        return Judgement(FALSE, numbers, words, found.context)
    words = (
        f"at saturation ‖J‖_F² is {one_hot / largest['square']:.0%} of its largest mean (p(1−p) is only J's diagonal)"
    )
    if max(found.median_trained.values()) >= 1:
        words += "; but while a model trains, leaving the scale out does not make the median gradient smaller"
        return Judgement(FALSE, numbers, words, found.context)
    if max(found.numbers.values()) < 1:
        return Judgement(HOLDS, numbers, f"{words}, and without the scale every gradient is smaller", found.context)
    words += (
        ". Without the scale the median gradient vanishes while a model trains from unit-variance q and k "
        f"({_range(found.median_trained)} times its value with the scale); before training it is {_range(found.median_before)} "
        "times, depending on the number of keys and on whether it is taken at the softmax's input or at q"
    )
    if min(*found.rms_before.values(), *found.rms_trained.values()) > 1:
        words += f". The RMS does not vanish: at q it is larger at both times; {_aside(evidence['trained'], found)}"
    return Judgement(CONDITION, numbers, words, found.context)


def gradients_explode(evidence: Evidence) -> Judgement:
    found = _ratios(evidence)
    if min(found.rms_before.values()) <= 1:
        words = "before training the RMS gradient is not larger without the scale"
        return Judgement(FALSE, found.numbers, words, found.context)
    if min(found.rms_trained.values()) <= 1:
        words = "while a model trains the RMS gradient is not larger without the scale"
        return Judgement(FALSE, found.numbers, words, found.context)
    if min(found.numbers.values()) > 1:
        return Judgement(HOLDS, found.numbers, "every gradient is larger without the scale", found.context)
    words = (
        f"for the RMS, which a few queries dominate: it is {_range(found.rms_before)} times its value with the scale before "
        f"training and {_range(found.rms_trained)} times at q while a model trains; {_aside(evidence['trained'], found)}. The "
        f"median falls to {_range(found.median_trained)} times. At the softmax's input nothing explodes: ‖J‖_F is at most ½"
    )
    return Judgement(CONDITION, found.numbers, words, found.context)


def few_weights_move(evidence: Evidence) -> Judgement:
    bare, scaled = (
        max(pick(evidence["gradient"], rule=name), key=lambda row: row["d"]) for name in ("none", "sqrt_dk")
    )
    d = bare["d"]
    numbers = {
        f"share of W_q's entries whose gradient is under 1 % of the RMS, without the scale, d_k = {d}": bare[
            "w_q_small"
        ],
        f"share of W_k's entries whose gradient is under 1 % of the RMS, without the scale, d_k = {d}": bare[
            "w_k_small"
        ],
    }
    context = {
        "share of W_q's entries under 1 % of the RMS with 1/√d_k (a normal law has 0.8 %)": scaled["w_q_small"],
        "share of queries whose gradient is under 1 % of the RMS, without the scale": bare["small_share"],
        "share of queries whose gradient is under 1 % of the RMS, with 1/√d_k": scaled["small_share"],
    }
    if bare["w_q_small"] > 0.5 or bare["w_k_small"] > 0.5:
        return Judgement(HOLDS, numbers, "before training", context)
    words = "before training nearly every weight gets a gradient"
    if bare["small_share"] > max(0.1, 2 * scaled["small_share"]):
        words = (
            "before training some queries get almost no gradient, but W_q and W_k do: theirs is a sum over the queries"
        )
    return Judgement(FALSE, numbers, words, context)
