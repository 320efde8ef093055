"""cards: questions for revision, each with its answer and the number that this run measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine.experiment import pick
from ..exact.gradient import without_over_with
from ..exact.jacobian import peak
from ..maths.gradients import crossing
from ..maths.theory import NEARLY_ONE_HOT
from ..training import charlm
from . import claims
from .judge_exact import NAMES
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
    return [*_spread(evidence), *_softmax(evidence), *_precision(evidence), *_divisors(evidence), *_practice(evidence)]


def _spread(evidence: Evidence) -> list[Card]:
    variance = {row["d"]: row for row in evidence["variance"]}
    return [
        Card(
            "What is the variance of q·k when q and k have d_k independent entries of mean 0 and variance 1?",
            "d_k: a sum of d_k products, each of variance 1. So the std is √d_k.",
            f"{variance[64]['variance']:.2f} at d_k = 64",
        ),
        Card(
            "Why does attention divide by √d_k and not by d_k?",
            "Dividing a variable by c divides its variance by c²; √d_k brings the variance d_k to 1.",
            f"variance {variance[1024]['scaled_variance']:.3f} at d_k = 1024 after dividing by √d_k",
        ),
    ]


def _softmax(evidence: Evidence) -> list[Card]:
    softmax = pick(evidence["worked"], quantity="softmax", example="7, 3", place=0)[0]
    top = {row["n"]: row for row in pick(evidence["saturation"], s=8.0)}
    bare = pick(evidence["jacobian"], rule="none", d=64, n=1024)[0]
    at, most = peak(1024)
    return [
        Card(
            "What is softmax([7, 3])?",
            "About [0.98, 0.02]: only the difference counts, and e⁴ = 54.6.",
            f"{softmax['value']:.4f} for the first",
        ),
        Card(
            "At which spread of the logits does softmax over n keys put most of the weight on one?",
            "From about √(2 ln n) on, where the random energy model freezes. For 1024 keys it is 3.72.",
            f"at a std of 8 the mean top weight is {top[1024]['top_weight']:.2f} with 1024 keys",
        ),
        Card(
            "Without the scale, at d_k = 64 and 1024 keys, is attention one-hot?",
            "Partly: the top key gets most of the weight on average, but fewer than a third of the rows are nearly one-hot.",
            f"mean top weight {bare['top_weight']:.2f}; {bare['one_hot']:.0%} of rows above {NEARLY_ONE_HOT:g}",
        ),
        *_gradients(evidence),
        Card(
            "When is the softmax's Jacobian largest?",
            "In between: it is small when the weights are even and when one key has all the weight. In the limit of many keys "
            "‖J‖_F² peaks at 1/12, at d_k = 8 ln n; with fewer keys it peaks earlier and higher.",
            f"{bare['square']:.4f} at d_k = 64 with 1024 keys; the exact peak is {most:.4f}, at d_k = {at}",
        ),
    ]


def _gradients(evidence: Evidence) -> list[Card]:
    rows, n = evidence["gradient"], evidence["gradient"][0]["n"]
    before = {
        column: without_over_with(rows, column, n)[128] for column in ("logits_median", "query_median", "query_rms")
    }
    lr, while_training = list(charlm.gradient_ratios(evidence["trained"], "grad_q_median").items())[1]
    step = max(while_training)
    rms = charlm.gradient_ratios(evidence["trained"], "grad_q_rms")[lr][step]
    return [
        Card(
            "Do gradients vanish or explode without the scale, before training?",
            "Neither for all. The RMS at q is larger. The median gradient at the softmax's input is smaller from a d_k on that "
            "depends on the number of keys; at q there is a factor √d_k more, and it is smaller only much later.",
            f"without ÷ with, {n} keys, d_k = 128: median {before['logits_median']:.2g} at the softmax's input and "
            f"{before['query_median']:.2g} at q, RMS {before['query_rms']:.2g} at q; the medians cross at d_k ≈ "
            f"{crossing(n, 'logits'):.0f} and ≈ {crossing(n, 'query'):.0f}",
        ),
        Card(
            "And while a model trains?",
            "From unit-variance q and k, the median gradient at q vanishes and the RMS stays larger: a few queries get it all. "
            "Saturation feeds itself.",
            f"without ÷ with, at q, language model with d_k = 64, lr {lr:g}: median {while_training[0]:.2g} at step 0 and "
            f"{while_training[step]:.2g} at step {step}, RMS {rms:.2g} at step {step} (measured on a GPU)",
        ),
    ]


def _precision(evidence: Evidence) -> list[Card]:
    half = pick(evidence["precision"], dtype="float16")[0]
    moves = pick(evidence["precision"], dtype="bfloat16", size=128.0)[0]
    overflowed = sum(row["stored_finite"] and not row["softmax_finite"] for row in evidence["precision"])
    return [
        Card(
            "Does exp overflow in softmax when logits are large?",
            "Not in torch, which subtracts the maximum first. A softmax that does not overflows in float16 above 11.09, which "
            "unscaled scores exceed and scaled ones do not.",
            f"torch's softmaxes that overflowed: {overflowed}; rows in which one that does not subtract it does, "
            "float16, 128 keys of 64: "
            f"{half['plain_overflows_none']:.0%} unscaled, {half['plain_overflows_sqrt_dk']:.0%} scaled",
        ),
        Card(
            "What does rounding a logit of 128 to bfloat16 do to its weight?",
            "Half a unit in the last place is 0.5, and e^0.5 = 1.65: it can move by 65 %.",
            f"{moves['weight_moves']:.0%}",
        ),
    ]


def _divisors(evidence: Evidence) -> list[Card]:
    divisors = {row["rule"]: row for row in pick(evidence["divisors"], d=128)}
    additive = max(pick(evidence["bounded"], score="additive"), key=lambda row: row["largest_score"])
    return [
        Card(
            "What does dividing by d_k instead do before training?",
            "It makes attention nearly uniform: even a key equal to the query gets almost no weight. W_q and W_k can learn the "
            "factor, and µP divides by d_k on purpose, so that a learned logit does not depend on d_k.",
            f"a key equal to q gets {divisors['dk']['aligned_weight']:.2%} among {divisors['dk']['n']} others, with √d_k "
            f"{divisors['sqrt_dk']['aligned_weight']:.0%}",
        ),
        Card(
            "By how much is the temperature off when one divides by √d_model instead of √d_k?",
            "By √heads: d_model = heads · d_k.",
            f"{divisors['sqrt_dk']['logit_std'] / divisors['sqrt_dmodel']['logit_std']:.2f} for 96 heads",
        ),
        Card(
            "Between which numbers does an additive score wᵀ tanh(q + k) lie?",
            "±Σ|w|. Each tanh lies within ±1, but w weighs them.",
            f"{additive['largest_score']:.1f} was reached with Σ|w| = {additive['bound']:g}",
        ),
    ]


def _practice(evidence: Evidence) -> list[Card]:
    inits = {row["init"]: row for row in evidence["inits"]}
    loop = min(evidence["parallel"], key=lambda row: (row["threads"], -row["n"]))
    return [
        Card(
            "Do real initialisations give q and k unit variance?",
            "Weights of variance 1/d_model (LeCun's) do. torch.nn.Linear gives 1/3 and GPT-2's 0.02 gives 0.31 at width 768.",
            "logit variance after 1/√d_k: "
            + ", ".join(f"{NAMES[name]} {inits[name]['scaled_variance']:.2f}" for name in ("fan_in", "linear", "gpt2")),
        ),
        Card(
            "How does T5 do without a divisor?",
            "It draws W_q with variance 1/(d_model d_k): the divisor is folded in, and the function at step 0 is the same.",
            f"unscaled logit std {inits['t5']['std']:.2f} at d_k = 64",
        ),
        Card(
            "Why compute attention in one pass and not token by token?",
            "The rows do not depend on one another, so one product does them all.",
            f"{loop['factor']:.0f} times as fast at {loop['n']} tokens; {loop['work_factor']:.1f} times without call overhead",
        ),
    ]


def anki(cards: list[Card]) -> str:
    """The deck as a text file that Anki imports: one line per card, front and back separated by a tab."""
    lines = ["#separator:tab", "#html:false", "#deck:attemper", "#columns:Front\tBack"]
    lines += [f"{card.question}\t{card.answer} (Measured: {card.measured}.)" for card in cards]
    return "\n".join(lines) + "\n"
