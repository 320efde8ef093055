"""judge_notes: what the experiments say about C24 to C36, which the notes say in passing. Pure functions from rows."""

from __future__ import annotations

from statistics import fmean

from attemper.extension.tools import plural

from ..details import head_dims, ranges, width
from ..engine.experiment import pick
from ..real_model import antecedent
from .judgement import CONDITION, FALSE, HOLDS, UNDECIDED, Evidence, Judgement

WEAK = 0.9
"""A head that looks at the right noun in fewer pairs than this does not decide what a pronoun refers to."""
FASTER = 1.05
"""Less than 5 % is no difference that anybody would call faster."""
EQUAL = 0.1
"""Numbers that differ by less than this share are called the same."""
PART = 0.5
"""Of an even share of the weight: from there on a token's own key plays a part."""
WORSE = 0.1
"""Of the first loss: a loss that rises by more above its lowest is called unstable."""


def attention_resolves_pronouns(evidence: Evidence) -> Judgement:
    rows = [*evidence["antecedent"], *evidence["antecedent_agreement"]]
    toward, _ = antecedent.certain_heads(rows, "meaning")
    heads = pick(rows, by="meaning", rule="sqrt_dk", query="pronoun")
    best = max(heads, key=lambda row: row["t"])
    agreeing, opposed = antecedent.certain_heads(rows, "agreement")
    largest = max(pick(rows, by="agreement", rule="sqrt_dk", query="pronoun"), key=lambda row: row["t"])
    (bare,) = pick(rows, by="meaning", rule="none", layer=best["layer"], head=best["head"])
    (beside,) = pick(evidence["antecedent_control"], layer=best["layer"], head=best["head"])
    numbers = {
        f"heads of {len(heads)} in which 'it' looks more at its antecedent than chance allows": float(len(toward)),
        "share of the pairs of sentences that the most certain of them gets right": best["right"],
    }
    numbers["share that the best head would get right by chance, in 1 of 20 cases"] = best["right_by_chance"]
    context = {
        "weight that moves to the antecedent in the most certain head": best["follows"],
        "weight that moves to the antecedent in that head, without the scale": bare["follows"],
        "weight that moves to the antecedent from the word before 'it', which refers to nothing": beside["follows"],
        "heads in which 'he' or 'she' looks more at its antecedent": float(len(agreeing)),
        "heads in which 'he' or 'she' looks more at the other noun": float(len(opposed)),
        "share of the pairs that the most certain of those that look at the antecedent gets right": largest["right"],
    }
    where = f"layer {best['layer']} head {best['head']}"
    if not toward or best["right"] <= best["right_by_chance"]:
        return Judgement(
            FALSE, numbers, "no head of MiniLM finds the noun that 'it' refers to more often than chance", context
        )
    if best["right"] >= WEAK:
        return Judgement(HOLDS, numbers, f"in {where} of MiniLM", context)
    words = (
        f"as a tendency: in MiniLM mostly {where}, right in {best['right']:.0%} of the pairs, where the best of {len(heads)} "
        f"heads reaches {best['right_by_chance']:.0%} by chance in 1 of 20 cases. More heads follow agreement in gender "
        f"({len(agreeing)}, while {len(opposed)} look at the other noun) than meaning"
    )
    return Judgement(CONDITION, numbers, words, context)


def keys_are_of_others(evidence: Evidence) -> Judgement:
    """No mask hides a token's own key; whether it plays a part is measured: a part is half an even share or more."""
    rows = evidence["own_key"]
    some = [row for row in rows if row["own_weight"] >= PART * row["even"]]
    numbers = {f"heads of {len(rows)} in which a word gives itself half an even share or more": float(len(some))}
    context = {
        "mean weight of a word on itself": fmean(row["own_weight"] for row in rows),
        "an even share, 1/n": rows[0]["even"],
    }
    if len(some) <= (1 - WEAK) * len(rows):
        return Judgement(HOLDS, numbers, "a token's own key gets hardly any weight", context)
    words = "a token's own key is among them, as Q, K and V come from the same tokens; and heads use it"
    return Judgement(FALSE if len(some) > len(rows) / 2 else CONDITION, numbers, words, context)


def sqrt_dmodel_under_corrects(evidence: Evidence) -> Judgement:
    """Too little: the logits' std stays above 1; too much: it falls below. With GPT-2's std of 0.02 the entries of a wide model
    have a variance above 1."""
    unit = {row["heads"]: row["logit_std"] for row in evidence["by_heads"]}
    fixed = {
        row["d_model"] // row["d"]: (row["logit_variance"] * row["d"] / row["d_model"]) ** 0.5
        for row in evidence["by_heads_fixed"]
    }
    width = evidence["by_heads_fixed"][0]["d_model"]
    label = "std of the logits after dividing by √d_model"
    numbers = {f"{label}, {plural(heads, 'head')}": std for heads, std in sorted(unit.items())}
    numbers |= {
        f"{label}, W of std 0.02 at width {width}, {plural(n, 'head')}": std for n, std in sorted(fixed.items())
    }
    both = [any(s > 1 + EQUAL for s in of.values()) and any(s < 1 - EQUAL for s in of.values()) for of in (unit, fixed)]
    if both[0]:
        return Judgement(HOLDS, numbers, "")
    if both[1]:
        many, few = max(fixed), min(fixed)
        words = (
            f"for W of std 0.02 at width {width}: too little with {few} heads ({fixed[few]:.2f}), too much with {many} "
            f"({fixed[many]:.2f}). With entries of variance 1 it never divides by too little: d_model is at least d_k"
        )
        return Judgement(CONDITION, numbers, words)
    return Judgement(FALSE, numbers, "it goes wrong on one side alone, or not at all, whatever the number of heads")


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
    label = "end of how many times as fast with the scale"
    ends = (("lower", "speed_low"), ("upper", "speed_high"))
    numbers = {f"{word} {label}, {names[row['way']]}": row[end] for word, end in ends for row in rows}
    context = {f"median of how many times as fast, {names[row['way']]}": row["speed"] for row in rows}
    context["share of the operations that the scale adds"] = rows[0]["share_of_operations"]
    faster = [row["speed_low"] > FASTER for row in rows]
    if all(faster):
        return Judgement(HOLDS, numbers, "on this machine", context)
    if any(row["speed_low"] < FASTER < row["speed_high"] for row in rows):
        return Judgement(UNDECIDED, numbers, "the times of this machine, now, vary too much to tell", context)
    words = "a pass takes as long with it as without; learning can be faster (C15). The times are of this machine"
    return Judgement(CONDITION if any(faster) else FALSE, numbers, words, context)


def measured_fairly(evidence: Evidence) -> Judgement:
    rows = sorted(evidence["match"], key=lambda row: row["d"])
    stds = [row["logit_std"] for row in rows]
    numbers = {
        "smallest std of the scores of unrelated q and k, after 1/√d_k": min(stds),
        "largest std of the scores of unrelated q and k": max(stds),
    }
    for row in (rows[0], rows[-1]):
        numbers[f"weight of a key equal to q among {row['n']}, d_k = {row['d']}"] = row["aligned_weight"]
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
    words = "before training, for independent entries of variance 1, for which theory gives it"
    words += "; training then changes the variance"
    return Judgement(CONDITION, numbers, words, context)


def is_512_common(evidence: Evidence) -> Judgement:
    rows = evidence["head_dims"]
    label = f"share of {len(rows)} model families drawn from transformers with d_k ="
    numbers = {f"{label} {size}": head_dims.share(rows, size) for size in head_dims.NAMED}
    rare = [size for size in head_dims.NAMED if head_dims.share(rows, size) < head_dims.COMMON]
    if not rare:
        return Judgement(HOLDS, numbers, "")
    words = f"{', '.join(map(str, rare))} is not a common head dim; 512 is the width of the first Transformer, whose d_k is 64"
    return Judgement(FALSE if len(rare) == len(head_dims.NAMED) else CONDITION, numbers, words)


def ranges_as_said(evidence: Evidence) -> Judgement:
    rows = sorted(evidence["ranges"], key=lambda row: row["scores"])
    few, many = rows[0], rows[-1]
    label = f"in which the range in 5 dimensions is {ranges.SAID:.1f} times that in 2"
    numbers = {
        f"share of draws of {few['scores']} scores {label}": few["as_said"],
        f"share of such draws of {many['scores']} scores": many["as_said"],
    }
    context = {f"median ratio of the ranges, {row['scores']} scores": row["ratio"] for row in rows}
    if max(few["as_said"], many["as_said"]) < 0.01:
        return Judgement(FALSE, numbers, "such a ratio hardly occurs", context)
    if min(few["as_said"], many["as_said"]) > 0.25:
        return Judgement(HOLDS, numbers, "", context)
    words = "as a rare draw of very few scores; in theory the stds have the ratio √(5/2) = 1.58"
    return Judgement(CONDITION, numbers, words, context)


def additive_has_no_products(evidence: Evidence) -> Judgement:
    d = max(row["d"] for row in evidence["three_scores"])
    additive, dot = (pick(evidence["three_scores"], score=score, d=d)[-1] for score in ("additive", "dot"))
    ratio = additive["product_flops"] / dot["product_flops"]
    numbers = {"operations in matrix products, additive over dot product": ratio}
    context = {
        "tanh's for each pair of tokens, additive": additive["tanhs"] / additive["n"] ** 2,
        "tanh's for each pair of tokens, dot product": dot["tanhs"] / dot["n"] ** 2,
    }
    if ratio <= EQUAL:
        return Judgement(HOLDS, numbers, "hardly any of its work is in matrix products", context)
    if ratio < 1 - EQUAL:
        return Judgement(CONDITION, numbers, "less of its work is in matrix products, but not none", context)
    words = "it has as many; the d tanh's for every pair of tokens make it slow, and no matrix product can replace them"
    return Judgement(FALSE, numbers, words, context)


def small_gradients_are_unstable(evidence: Evidence) -> Judgement:
    """With noise in every gradient, under SGD and Adam: does the loss rise more where the first gradient is small?"""
    numbers: dict[str, float] = {}
    context: dict[str, float] = {}
    unstable = []
    for name, rows in (("SGD", evidence["plateau"]), ("Adam", evidence["plateau_adam"])):
        rate = min(row["lr"] for row in rows)
        some = sorted(pick(rows, lr=rate), key=lambda row: row["first_gradient"])
        small, large = some[0], some[-1]
        label = f"largest rise of the loss above its lowest, in first losses, {name}"
        numbers |= {f"{label}, smallest first gradient": small["worst_rise"], f"{label}, largest": large["worst_rise"]}
        context[f"steps to learn, smallest first gradient, {name}"] = small["steps_to_learn"]
        context[f"steps to learn, largest first gradient, {name}"] = large["steps_to_learn"]
        unstable.append(small["worst_rise"] > max(WORSE, (1 + EQUAL) * large["worst_rise"]))
    context["first gradient, smallest over largest"] = small["first_gradient"] / large["first_gradient"]
    hasty = max(evidence["plateau"], key=lambda row: row["lr"])
    context[f"largest rise of the loss with a learning rate of {hasty['lr']:g}, SGD"] = hasty["worst_rise"]
    if all(unstable):
        return Judgement(HOLDS, numbers, "with noise in the gradients, under SGD and Adam", context)
    if any(unstable):
        return Judgement(
            CONDITION, numbers, f"under {'SGD' if unstable[0] else 'Adam'} alone, with noise in the gradients", context
        )
    words = "small gradients make learning slow, not unstable, with noise in them too; steps that are too large make it unstable"
    return Judgement(FALSE, numbers, words, context)


def dot_needs_scaling(evidence: Evidence) -> Judgement:
    rows = evidence["three_scores"]
    d, n = max(row["d"] for row in rows), rows[0]["n"]
    keys = {row["score"]: row["effective_keys"] for row in pick(rows, d=d)}
    cost = max(evidence["additive_cost"], key=lambda row: row["d"])
    numbers = {
        f"effective keys of {n}, additive score, d = {d}": keys["additive"],
        "effective keys, dot product without a scale": keys["dot"],
        "effective keys, dot product with 1/√d": keys["scaled"],
        "how many times as long additive attention takes, at least": cost["factor_low"],
    }
    context = {"how many times as long it takes, median": cost["factor"]}
    if cost["factor_low"] <= 1:
        return Judgement(FALSE, numbers, "additive attention is not slower here", context)
    if keys["dot"] > 0.5 * min(keys["additive"], keys["scaled"]):
        return Judgement(FALSE, numbers, "without the scale the dot product spreads its weight as widely", context)
    if keys["additive"] < 0.5 * keys["scaled"]:
        return Judgement(CONDITION, numbers, "the additive score saturates too", context)
    words = "before training, with w drawn as a layer draws it; the factor of time is of this machine"
    return Judgement(HOLDS, numbers, words, context)


def dot_is_similarity(evidence: Evidence) -> Judgement:
    *narrower, row = sorted(evidence["similarity"], key=lambda row: row["d"])
    longer, label = (
        row["longer_wins"] / max(row["first_wins"], 1e-9),
        "largest dot product is on the key of the largest cosine",
    )
    numbers = {
        f"share of queries whose {label}, d_k = {row['d']}": row["same_key"],
        "how many times as often a key twice as long wins": longer,
    }
    context = {f"share of such queries, d_k = {other['d']}": other["same_key"] for other in narrower}
    if row["same_key"] < 0.5:
        return Judgement(FALSE, numbers, "most queries choose another key than the most similar one", context)
    if row["same_key"] > 0.99 and longer < 1 + EQUAL:
        return Judgement(HOLDS, numbers, "", context)
    words = "for keys of about the same length: q·k = |q| |k| cos, and a longer key scores more"
    return Judgement(CONDITION, numbers, words, context)
