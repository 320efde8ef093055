"""cards: questions for revision (cards.toml), each with its answer and the number that this run measured."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ..engine.experiment import pick
from ..exact.gradient import without_over_with
from ..exact.jacobian import peak
from ..maths.gradients import crossing
from ..maths.theory import NEARLY_ONE_HOT
from ..training import charlm
from . import claims
from .judgement import Evidence


@dataclass(frozen=True)
class Card:
    """A question, its answer in a sentence, and the number just measured."""

    question: str
    answer: str
    measured: str


def deck(note: Callable[[str], None] = lambda line: None) -> list[Card]:
    """Measure what the cards need, and make them."""
    return write(claims.gather(False, note))


def write(evidence: Evidence) -> list[Card]:
    """The cards, from evidence alone."""
    content = tomllib.loads((files(__package__) / "cards.toml").read_text(encoding="utf-8"))
    numbers = _numbers(evidence)
    return [Card(**{**card, "measured": card["measured"].format(**numbers)}) for card in content["cards"]]


def _numbers(evidence: Evidence) -> dict[str, Any]:
    """What the cards call `measured`, by the names that cards.toml uses."""
    variance = {row["d"]: row for row in evidence["variance"]}
    divisors = {row["rule"]: row for row in pick(evidence["divisors"], d=128)}
    precision, gradient, trained = evidence["precision"], evidence["gradient"], evidence["trained"]
    keys, (peak_at, largest) = gradient[0]["n"], peak(1024)
    columns = ("logits_median", "query_median", "query_rms")
    lr, medians = list(charlm.gradient_ratios(trained, "grad_q_median").items())[1]
    return {
        "variance": variance[64]["variance"],
        "scaled_variance": variance[1024]["scaled_variance"],
        "softmax": pick(evidence["worked"], quantity="softmax", example="7, 3", place=0)[0]["value"],
        "saturated": next(row["top_weight"] for row in pick(evidence["saturation"], s=8.0) if row["n"] == 1024),
        "bare": pick(evidence["jacobian"], rule="none", d=64, n=1024)[0],
        "nearly_one_hot": NEARLY_ONE_HOT,
        "peak": largest,
        "peak_at": peak_at,
        "keys": keys,
        "before": {column: without_over_with(gradient, column, keys)[128] for column in columns},
        "crossing_logits": crossing(keys, "logits"),
        "crossing_query": crossing(keys, "query"),
        "lr": lr,
        "step": max(medians),
        "median_first": medians[0],
        "median_last": medians[max(medians)],
        "rms_last": charlm.gradient_ratios(trained, "grad_q_rms")[lr][max(medians)],
        "overflowed": sum(row["stored_finite"] and not row["softmax_finite"] for row in precision),
        "half": pick(precision, dtype="float16")[0],
        "weight_moves": pick(precision, dtype="bfloat16", size=128.0)[0]["weight_moves"],
        "dk": divisors["dk"],
        "sqrt_dk": divisors["sqrt_dk"],
        "temperature": divisors["sqrt_dk"]["logit_std"] / divisors["sqrt_dmodel"]["logit_std"],
        "additive": max(pick(evidence["bounded"], score="additive"), key=lambda row: row["largest_score"]),
        "inits": {row["init"]: row for row in evidence["inits"]},
        "loop": min(evidence["parallel"], key=lambda row: (row["threads"], -row["n"])),
    }


def anki(cards: list[Card]) -> str:
    """The deck as a text file that Anki imports: one line per card, front and back separated by a tab."""
    lines = ["#separator:tab", "#html:false", "#deck:attemper", "#columns:Front\tBack"]
    lines += [f"{card.question}\t{card.answer} (Measured: {card.measured}.)" for card in cards]
    return "\n".join(lines) + "\n"
