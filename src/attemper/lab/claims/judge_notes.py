"""judge_notes: what the experiments say about C24 to C36, which the notes say in passing. Pure functions from rows."""

from __future__ import annotations

from statistics import fmean

from ..._display import plural
from ..details import head_dims, ranges, width
from ..engine.experiment import pick
from ..real_model import antecedent
from .judgement import CONDITION, FALSE, HOLDS, Evidence, Judgement

WEAK = 0.9
"""A head that looks at the right noun in fewer pairs than this does not decide what a pronoun refers to."""
FASTER = 1.05
"""Less than 5 % is no difference that anybody would call faster."""
EQUAL = 0.1
"""Numbers that differ by less than this share are called the same."""


def attention_resolves_pronouns(evidence: Evidence) -> Judgement:
    rows = [*evidence["antecedent"], *evidence["antecedent_agreement"]]
    control = evidence["antecedent_control"]
    toward, _ = antecedent.found(rows, "meaning")
    heads = pick(rows, by="meaning", rule="sqrt_dk", query="pronoun")
    best = max(heads, key=lambda row: row["t"])
    agreeing, opposed = antecedent.found(rows, "agreement")
    largest = max(pick(rows, by="agreement", rule="sqrt_dk", query="pronoun"), key=lambda row: row["t"])
    bare = next(
        row
        for row in pick(rows, by="meaning", rule="none")
        if (row["layer"], row["head"]) == (best["layer"], best["head"])
    )
    beside = next(row for row in control if (row["layer"], row["head"]) == (best["layer"], best["head"]))
    numbers = {
        f"heads of {len(heads)} in which 'it' looks more at its antecedent than chance allows": float(len(toward)),
        "share of the pairs of sentences that the most certain of them gets right": best["right"],
    }
    context = {
        "share that the best head would get right by chance, in 1 of 20 cases": best["right_by_chance"],
        "weight that moves to the antecedent in the most certain head": best["follows"],
        "weight that moves to the antecedent in that head, without the scale": bare["follows"],
        "weight that moves to the antecedent from the word before 'it', which refers to nothing": beside["follows"],
        "heads in which 'he' or 'she' looks more at its antecedent": float(len(agreeing)),
        "heads in which 'he' or 'she' looks more at the other noun": float(len(opposed)),
        "share of the pairs that the most certain of those that look at the antecedent gets right": largest["right"],
    }
    where = f"layer {best['layer']} head {best['head']}"
    if not toward:
        return Judgement(FALSE, numbers, "no head of MiniLM looks more at the noun that 'it' refers to", context)
    if best["right"] >= WEAK:
        return Judgement(HOLDS, numbers, f"in {where} of MiniLM", context)
    words = (
        f"as a tendency: in MiniLM mostly {where}, which is often wrong. More heads follow agreement in gender "
        f"({len(agreeing)}, while {len(opposed)} look at the other noun) than meaning"
    )
    return Judgement(CONDITION, numbers, words, context)


def keys_are_of_others(evidence: Evidence) -> Judgement:
    rows = evidence["own_key"]
    some = [row for row in rows if row["own_weight"] > 0]
    mean = fmean(row["own_weight"] for row in rows)
    numbers = {f"heads of {len(rows)} in which a word gives itself some weight": float(len(some))}
    context = {"mean weight of a word on itself": mean, "an even share, 1/n": rows[0]["even"]}
    if not some:
        return Judgement(HOLDS, numbers, "", context)
    words = "a token's own key is among them: Q, K and V come from the same tokens"
    return Judgement(FALSE if len(some) == len(rows) else CONDITION, numbers, words, context)


def sqrt_dmodel_under_corrects(evidence: Evidence) -> Judgement:
    rows = sorted(evidence["by_heads"], key=lambda row: row["heads"])
    numbers = {
        f"std of the logits after dividing by √d_model, {plural(row['heads'], 'head')}": row["logit_std"]
        for row in rows
    }
    above = [row for row in rows if row["logit_std"] > 1 + EQUAL]
    below = [row for row in rows if row["logit_std"] < 1 - EQUAL]
    if above and below:
        return Judgement(HOLDS, numbers, "")
    if not above and not below:
        return Judgement(FALSE, numbers, "it corrects exactly, whatever the number of heads")
    words = "it divides by too much with every number of heads above 1: d_model is never smaller than d_k"
    return Judgement(CONDITION, numbers, words if below else "it divides by too little")


def stable_across_widths(evidence: Evidence) -> Judgement:
    (fan_in, narrow, wide), (fixed, _, _) = (width.growth(evidence["width"], init) for init in width.INITS)
    numbers = {
        f"growth of the logits' variance from width {narrow} to {wide}, W of variance 1/d_model": fan_in,
        "growth from the narrow to the wide model, W of std 0.02": fixed,
    }
    steady = [abs(times - 1) < EQUAL for times in (fan_in, fixed)]
    if all(steady):
        return Judgement(HOLDS, numbers, "")
    words = "1/√d_k depends on the head dim, not on the width, so the initialisation must keep q and k at variance 1"
    return Judgement(CONDITION if any(steady) else FALSE, numbers, words)


def scaling_is_faster(evidence: Evidence) -> Judgement:
    rows = evidence["scale_cost"]
    names = {"attemper": "attemper's kernel", "eager": "three lines of torch"}
    numbers = {
        f"lower end of how many times as fast with the scale, {names[row['way']]}": row["speed_low"] for row in rows
    }
    context = {f"median of how many times as fast, {names[row['way']]}": row["speed"] for row in rows}
    context["share of the operations that the scale adds"] = rows[0]["share_of_operations"]
    faster = [row["speed_low"] > FASTER for row in rows]
    if all(faster):
        return Judgement(HOLDS, numbers, "on this machine", context)
    words = "a pass takes as long with it as without; learning can be faster (C15). The times are of this machine"
    return Judgement(CONDITION if any(faster) else FALSE, numbers, words, context)


def measured_fairly(evidence: Evidence) -> Judgement:
    rows = sorted(evidence["match"], key=lambda row: row["d"])
    stds = [row["logit_std"] for row in rows]
    numbers = {
        "smallest std of the scores of unrelated q and k, after 1/√d_k": min(stds),
        "largest std of the scores of unrelated q and k": max(stds),
        **{
            f"weight of a key equal to q among {row['n']}, d_k = {row['d']}": row["aligned_weight"]
            for row in (rows[0], rows[-1])
        },
    }
    context = {f"weight of a key equal to q, d_k = {row['d']}": row["aligned_weight"] for row in rows[1:-1]}
    if max(stds) / min(stds) > 1 + EQUAL:
        return Judgement(FALSE, numbers, "unrelated vectors spread differently at each d_k", context)
    if rows[-1]["aligned_weight"] - rows[0]["aligned_weight"] < EQUAL:
        return Judgement(HOLDS, numbers, "", context)
    words = "for unrelated vectors; a match still scores √d_k times the noise, so it stands out more as d_k grows"
    return Judgement(CONDITION, numbers, words, context)


def sqrt_dk_is_perfect(evidence: Evidence) -> Judgement:
    drawn = {row["init"]: row["scaled_variance"] ** 0.5 for row in evidence["inits"] if row["scale"] != 1}
    trained = [row["variance"] ** 0.5 for row in pick(evidence["real_heads"], rule="sqrt_dk")]
    near = sum(abs(std - 1) < EQUAL for std in trained)
    numbers = {
        "std of the logits after 1/√d_k, fan-in initialisation": drawn["fan_in"],
        f"heads of {len(trained)} of a trained model with a std within 10 % of 1": float(near),
    }
    context = {
        "std of the logits after 1/√d_k, torch.nn.Linear's initialisation": drawn["linear"],
        "smallest std of a trained head": min(trained),
        "largest std of a trained head": max(trained),
    }
    if abs(drawn["fan_in"] - 1) >= EQUAL:
        return Judgement(FALSE, numbers, "it does not bring the variance to 1 even before training", context)
    if near > 0.9 * len(trained):
        return Judgement(HOLDS, numbers, "", context)
    words = (
        "before training, for independent entries of variance 1, for which theory gives it; training then changes the "
        "variance"
    )
    return Judgement(CONDITION, numbers, words, context)


def is_512_common(evidence: Evidence) -> Judgement:
    rows = evidence["head_dims"]
    numbers = {
        f"share of {len(rows)} model families drawn from transformers with d_k = {size}": head_dims.share(rows, size)
        for size in head_dims.NAMED
    }
    rare = [size for size in head_dims.NAMED if head_dims.share(rows, size) < head_dims.COMMON]
    if not rare:
        return Judgement(HOLDS, numbers, "")
    words = f"{', '.join(map(str, rare))} is not a common head dim; 512 is the width of the first Transformer, whose d_k is 64"
    return Judgement(FALSE if len(rare) == len(head_dims.NAMED) else CONDITION, numbers, words)


def ranges_as_said(evidence: Evidence) -> Judgement:
    rows = sorted(evidence["ranges"], key=lambda row: row["scores"])
    few, many = rows[0], rows[-1]
    numbers = {
        f"share of draws of {few['scores']} scores in which the range in 5 dimensions is {ranges.SAID:.1f} times that in 2": few[
            "as_said"
        ],
        f"share of such draws of {many['scores']} scores": many["as_said"],
    }
    context = {f"median ratio of the ranges, {row['scores']} scores": row["ratio"] for row in rows}
    if max(few["as_said"], many["as_said"]) < 0.01:
        return Judgement(FALSE, numbers, "such a ratio hardly occurs", context)
    if min(few["as_said"], many["as_said"]) > 0.25:
        return Judgement(HOLDS, numbers, "", context)
    return Judgement(
        CONDITION,
        numbers,
        "as a rare draw of very few scores; in theory the stds have the ratio √(5/2) = 1.58",
        context,
    )


def additive_has_no_products(evidence: Evidence) -> Judgement:
    rows = {
        row["score"]: row
        for row in evidence["three_scores"]
        if row["d"] == max(one["d"] for one in evidence["three_scores"])
    }
    additive, dot = rows["additive"], rows["dot"]
    numbers = {
        "operations in matrix products, additive over dot product": additive["product_flops"] / dot["product_flops"]
    }
    context = {
        "tanh's for each pair of tokens, additive": additive["tanhs"] / additive["n"] ** 2,
        "tanh's for each pair of tokens, dot product": dot["tanhs"] / dot["n"] ** 2,
    }
    if additive["product_flops"] == 0:
        return Judgement(HOLDS, numbers, "", context)
    words = "it has as many; the d tanh's for every pair of tokens make it slow, and no matrix product can replace them"
    return Judgement(FALSE, numbers, words, context)


def small_gradients_are_unstable(evidence: Evidence) -> Judgement:
    rate = min(row["lr"] for row in evidence["plateau"])
    rows = sorted(pick(evidence["plateau"], lr=rate), key=lambda row: row["first_gradient"])
    small, large = rows[0], rows[-1]
    hasty = max(evidence["plateau"], key=lambda row: row["lr"])
    numbers = {"share of steps that raise the loss, smallest first gradient": small["rises"]}
    context = {
        "first gradient, smallest over largest": small["first_gradient"] / large["first_gradient"],
        "steps to learn, smallest first gradient": small["steps_to_learn"],
        "steps to learn, largest first gradient": large["steps_to_learn"],
        f"share of steps that raise the loss with a learning rate of {hasty['lr']:g}": hasty["rises"],
    }
    if small["rises"] > 0.01:
        return Judgement(HOLDS, numbers, "", context)
    return Judgement(
        FALSE,
        numbers,
        "small gradients make learning slow, not unstable; steps that are too large make it unstable",
        context,
    )


def dot_needs_scaling(evidence: Evidence) -> Judgement:
    rows = evidence["three_scores"]
    d, n = max(row["d"] for row in rows), rows[0]["n"]
    keys = {row["score"]: row["effective_keys"] for row in pick(rows, d=d)}
    slower = max(evidence["additive_cost"], key=lambda row: row["d"])["factor_low"]
    numbers = {
        f"effective keys of {n}, additive score, d = {d}": keys["additive"],
        "effective keys, dot product without a scale": keys["dot"],
        "effective keys, dot product with 1/√d": keys["scaled"],
        "how many times as long additive attention takes, at least": slower,
    }
    context = {
        "how many times as long it takes, median": max(evidence["additive_cost"], key=lambda row: row["d"])["factor"]
    }
    if slower <= 1:
        return Judgement(FALSE, numbers, "additive attention is not slower here", context)
    if keys["dot"] > 0.5 * min(keys["additive"], keys["scaled"]):
        return Judgement(FALSE, numbers, "without the scale the dot product spreads its weight as widely", context)
    if keys["additive"] < 0.5 * keys["scaled"]:
        return Judgement(CONDITION, numbers, "the additive score saturates too", context)
    return Judgement(
        HOLDS,
        numbers,
        "before training, with w drawn as a layer draws it; the factor of time is of this machine",
        context,
    )


def dot_is_similarity(evidence: Evidence) -> Judgement:
    rows = sorted(evidence["similarity"], key=lambda row: row["d"])
    row = rows[-1]
    numbers = {
        f"share of queries whose largest dot product is on the key of the largest cosine, d_k = {row['d']}": row[
            "same_key"
        ],
        "how many times as often a key twice as long wins": row["longer_wins"] / max(row["first_wins"], 1e-9),
    }
    context = {f"share of such queries, d_k = {one['d']}": one["same_key"] for one in rows[:-1]}
    if row["same_key"] < 0.5:
        return Judgement(FALSE, numbers, "most queries choose another key than the most similar one", context)
    if row["same_key"] > 0.99 and numbers["how many times as often a key twice as long wins"] < 1 + EQUAL:
        return Judgement(HOLDS, numbers, "", context)
    return Judgement(
        CONDITION,
        numbers,
        "for keys of about the same length: q·k = |q| |k| cos, and a longer key scores more",
        context,
    )
