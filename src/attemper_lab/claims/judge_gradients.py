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
SAID = {"median": "median", "rms": "RMS"}


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
    ratios = _Ratios({}, {}, {}, {}, {})
    for rows in (evidence["gradient"], evidence["gradient_long"]):
        n = rows[0]["n"]
        for unit, where in UNITS.items():
            for statistic, some in (("median", ratios.median_before), ("rms", ratios.rms_before)):
                ratio = without_over_with(rows, f"{unit}_{statistic}", n)[HEAD_DIM]
                name = f"{SAID[statistic]} gradient {where} before training, without the scale ÷ with it"
                some[f"{name} (d_k = {HEAD_DIM}, {n} keys)"] = ratio
            name = f"d_k from which the median gradient {where} is smaller without the scale, before training, {n} keys"
            ratios.context[name] = gradients.crossing(n, unit)
    _while_training(evidence["trained"], ratios)
    return ratios


def _while_training(rows: Rows, collected: _Ratios) -> None:
    """The ratios after the last step, at the learning rate that speaks most against the claims: largest median, smallest RMS."""
    d = rows[0]["d_model"] // rows[0]["heads"]
    step, rates = max(row["step"] for row in rows), ", ".join(f"{lr:g}" for lr in sorted({row["lr"] for row in rows}))
    model = f"language model, d_k = {d}, lr {rates}"
    for statistic, some in (("median", collected.median_trained), ("rms", collected.rms_trained)):
        ratios = charlm.gradient_ratios(rows, f"grad_q_{statistic}")
        last = [of_step[step] for of_step in ratios.values()]
        for word, value in (("largest", max(last)), ("smallest", min(last))):
            name = f"{SAID[statistic]} gradient at q after {step} training steps, without the scale ÷ with it, {word}"
            some[f"{name} ({model})"] = value
            name = f"{SAID[statistic]} gradient at q after {step} steps, without ÷ with it, the factor √d_k set aside, {word}"
            collected.context[name] = value / math.sqrt(d)
        name = f"{SAID[statistic]} gradient at q at step 0 of that model, without the scale ÷ with it"
        collected.context[name] = next(iter(ratios.values()))[0]
    for rule, words in (("none", "without the scale"), ("sqrt_dk", "with it")):
        share = median(row["grad_q_median"] / row["grad_q_rms"] for row in pick(rows, rule=rule, step=step))
        collected.context[f"median ÷ RMS of the gradient at q after {step} steps, {words}, median of the runs"] = share


def _aside(trained: Rows, ratios: _Ratios) -> str:
    """The RMS while a model trains, in the other unit."""
    root = math.sqrt(trained[0]["d_model"] // trained[0]["heads"])
    less = {name: value / root for name, value in ratios.rms_trained.items()}
    return f"without the factor √d_k, which Adam ignores, it ends at {_range(less)} times its value with the scale"


def _range(ratios: dict[str, float]) -> str:
    """From the least to the most, in two digits."""
    ends = dict.fromkeys(f"{value:.2g}" for value in (min(ratios.values()), max(ratios.values())))
    return " to ".join(ends)


def gradients_vanish(evidence: Evidence) -> Judgement:
    """At saturation the Jacobian is small, which is a statement of its own; what the scale has to do with it is another."""
    ratios = _ratios(evidence)
    bare = pick(evidence["jacobian"], rule="none")
    largest = max(bare, key=lambda row: row["square"])
    one_hot = pick(bare, d=64)[0]["one_hot_square"]
    numbers = {
        f"mean ‖J‖_F² of nearly one-hot rows (top weight above {NEARLY_ONE_HOT:g}; d_k = 64, {largest['n']} keys)": one_hot,
        f"mean ‖J‖_F² where it is largest (d_k = {largest['d']}, {largest['n']} keys)": largest["square"],
        **ratios.numbers,
    }
    if not one_hot < SMALL * largest["square"]:
        words = "even where one key has nearly all the weight, the softmax's Jacobian is not small"
        return Judgement(FALSE, numbers, words, ratios.context)
    share = f"{one_hot / largest['square']:.0%}"
    words = f"at saturation ‖J‖_F² is {share} of its largest mean (p(1−p) is only J's diagonal)"
    if max(ratios.median_trained.values()) >= 1:
        words += "; but while a model trains, leaving the scale out does not make the median gradient smaller"
        return Judgement(FALSE, numbers, words, ratios.context)
    if max(ratios.numbers.values()) < 1:
        return Judgement(HOLDS, numbers, f"{words}, and without the scale every gradient is smaller", ratios.context)
    words += (
        ". Without the scale the median gradient vanishes while a model trains from unit-variance q and k "
        f"({_range(ratios.median_trained)} times its value with the scale); before training it is {_range(ratios.median_before)} "
        "times, depending on the number of keys and on whether it is taken at the softmax's input or at q"
    )
    if min(*ratios.rms_before.values(), *ratios.rms_trained.values()) > 1:
        words += f". The RMS does not vanish: at q it is larger at both times; {_aside(evidence['trained'], ratios)}"
    return Judgement(CONDITION, numbers, words, ratios.context)


def gradients_explode(evidence: Evidence) -> Judgement:
    """The RMS, which explodes if anything does, without the explicit factor √d_k, which Adam divides away: at the softmax's
    input before training, at q when it ends."""
    ratios = _ratios(evidence)
    root = math.sqrt(evidence["trained"][0]["d_model"] // evidence["trained"][0]["heads"])
    before = {name: value for name, value in ratios.rms_before.items() if UNITS["logits"] in name}
    ended = {f"{name}, the factor √d_k set aside": value / root for name, value in ratios.rms_trained.items()}
    numbers = {**before, **ended}
    context = {name: value for name, value in {**ratios.numbers, **ratios.context}.items() if name not in numbers}
    words = (
        f"before training the RMS is {_range(before)} times its value with the scale at the softmax's input; after training "
        f"under Adam it is {_range(ended)} times at q, the factor √d_k set aside"
    )
    if max(ended.values()) <= 1:
        return Judgement(FALSE, numbers, words, context)
    if min(*before.values(), *ended.values()) > 1:
        return Judgement(HOLDS, numbers, words, context)
    return Judgement(CONDITION, numbers, words, context)


ONE_QUERY = 0.047
"""The share of a matrix's entries that hold half of the squared gradient if one query sent all of it: those of x yᵀ, x and y
normal. A normal law has 0.124. `python -m pytest tests/lab -k one_query` draws both."""
FEW, MANY = 1.1 * ONE_QUERY, 0.7 * 0.124


def few_weights_move(evidence: Evidence) -> Judgement:
    """How few entries of W_Q and W_K hold half of the squared gradient: from what one query would give to a normal law."""
    d = max(row["d"] for row in evidence["gradient"])
    bare, scaled = (pick(evidence["gradient"], rule=name, d=d)[0] for name in ("none", "sqrt_dk"))
    numbers = {
        f"share of {name}'s entries that hold half of its squared gradient, without the scale, d_k = {d}": bare[column]
        for name, column in (("W_Q", "w_q_half"), ("W_K", "w_k_half"))
    }
    context = {
        "the same of W_Q with 1/√d_k (a normal law has 0.124)": scaled["w_q_half"],
        "the same if one query sent the whole gradient": ONE_QUERY,
        "share of queries that hold half of the squared gradient, without the scale": bare["query_half"],
        "share of queries that hold half of the squared gradient, with 1/√d_k": scaled["query_half"],
    }
    share = max(numbers.values())
    if share <= FEW:
        return Judgement(HOLDS, numbers, "before training; as few as if one query sent the whole gradient", context)
    words = (
        f"before training half of the gradient is in {share:.0%} of the entries of W_Q and W_K without the scale, "
        f"{scaled['w_q_half']:.0%} with it. Few queries send it (of {bare['n']}, {bare['query_half']:.1%} send half, "
        f"{scaled['query_half']:.0%} with the scale), but each reaches nearly every entry"
    )
    return Judgement(CONDITION if share <= MANY else FALSE, numbers, words, context)
