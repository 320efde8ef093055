"""Every verdict that a judge can give is reached by rows made up for it: a judge for which no rows exist is no judge.

Those of the claims about training are in test_training_verdicts.py.
"""

import inspect
import re

import pytest
import torch

from attemper_lab.claims import claims, judge_gradients
from attemper_lab.claims.judgement import CONDITION, FALSE, HOLDS, UNDECIDED
from attemper_lab.exact.gradient import _half
from attemper_lab.maths.theory import critical_std

GIVES = {"HOLDS": HOLDS, "CONDITION": CONDITION, "FALSE": FALSE, "UNDECIDED": UNDECIDED}
TRAINED = {"C9", "C15", "C19", "C20"}


def est(**values):
    """Estimates with a reach of a hundredth."""
    return {**values, **{f"{name}_reach": 0.01 for name in values}}


def scores(*variances):
    return [{"d": d, **est(variance=v, scaled_variance=v / d)} for d, v in zip((2, 64), variances, strict=True)]


INITS = [{"init": "fan_in", "d": 64, "scale": 0.125, **est(variance=64.0, scaled_variance=1.0)}]
LINEAR = [*INITS, {"init": "linear", "d": 64, "scale": 0.125, **est(variance=7.1, scaled_variance=0.11)}]


def saturated(*at):
    """Rows whose top weight is 0.1, 0.5, 0.95 at these multiples of √(2 ln n)."""
    rows = [{"n": n, "s": k * critical_std(n), "top_weight": w} for n in (16, 1024) for k, w in at]
    return {"saturation": rows, "jacobian": [{"rule": "none", "d": 64, "n": 1024, "top_weight": 0.7, "one_hot": 0.3}]}


def gradients(*, median=(1.0, 1.0), rms=(1.0, 1.0), one_hot=0.001):
    """Without the scale ÷ with it: (before training, at the end of it), and ‖J‖_F² at saturation, of 0.1 at most."""
    units = {f"{unit}_{name}": of for unit in ("logits", "query") for name, of in (("median", median), ("rms", rms))}
    before = [
        {"n": n, "d": 128, "rule": rule, **{name: of[0] if rule == "none" else 1.0 for name, of in units.items()}}
        for n in (128, 1024) for rule in ("none", "sqrt_dk")
    ]  # fmt: skip
    trained = [
        {
            "rule": rule, "lr": 1e-3, "seed": 0, "step": step, "d_model": 256, "heads": 4,
            "grad_q_median": median[step > 0] if rule == "none" else 1.0, "grad_q_rms": rms[step > 0] if rule == "none" else 1.0,
        }
        for rule in ("none", "sqrt_dk") for step in (0, 800)
    ]  # fmt: skip
    jacobian = [{"rule": "none", "d": 64, "n": 1024, "square": 0.1, "one_hot_square": one_hot}]
    return {"gradient": before[:2], "gradient_long": before[2:], "jacobian": jacobian, "trained": trained}


def precise(softmax=True, fused=True):
    row = {"stored_finite": True, "softmax_finite": softmax, "inputs_finite": True, "fused_finite": fused, "size": 8.0}
    limits = {"plain_overflows_none": 1.0, "plain_overflows_sqrt_dk": 0.0, "plain_limit": 11.0, "stored_limit": 65520.0}
    return {"precision": [{**row, **limits, "dtype": dtype} for dtype in ("float16", "float32")]}


def ended(rule, loss, **more):
    """Three runs of a language model."""
    parts = {f"held_out_{index}": loss for index in range(1, 9)}
    base = {"rule": rule, "lr": 1e-3, "step": 400, "steps": 400, "loss": loss, "held_out": loss, **parts, **more}
    return [{**base, "seed": seed} for seed in (0, 1, 2)]


def divided(flat=1.0, found=0.01, dk=2.03, none=2.2):
    rows = [{"d": 512, "n": 1024, "rule": rule, **est(evenness=e), "aligned_weight": w}
            for rule, e, w in (("dk", flat, found), ("sqrt_dk", 0.9, 1.0))]  # fmt: skip
    ends = [("sqrt_dk", 2.0), ("dk", dk), ("none", none)]
    larger = [row for rule, loss in ends for row in ended(rule, loss, head_dim=64, parameters=32e6)]
    return {"divisors": rows, "larger": larger}


def dmodel(cost, std=0.1):
    rows = [{"d": 128, "heads": 96, "n": 1024, "rule": rule, "logit_std": s, "aligned_weight": w, "evenness": 0.9}
            for rule, s, w in (("sqrt_dk", 1.0, 0.96), ("sqrt_dmodel", std, 0.003))]  # fmt: skip
    more = {"init": "unit", "heads": 8, "d_model": 64, "entropy": 1.0, "peak": 1.0, "seen": 1.0}
    trained = [*ended("sqrt_dk", 2.0, **more), *ended("sqrt_dmodel", 2.0 + cost, **more)]
    return {"divisors": rows, "dmodel": trained}


def additive(largest):
    return {"bounded": [{"score": "additive", "largest_score": largest, "smallest_score": -largest, "bound": 10.0}]}


def slow(factor, unit, fan_in=1.0):
    low = {"n": 512, "d": 16, "factor_low": factor, "factor": factor, "additive_mib": 1, "dot_mib": 1}
    low |= {"additive_variance_fan_in": 1.0, "additive_variance_unit": 1.0, "dot_variance": 1.0}
    high = {"d": 256, "additive_variance_fan_in": fan_in, "additive_variance_unit": unit, "dot_variance": 16.0}
    return {"additive_cost": [low, {**low, **high}]}


def tops(*without):
    rows = [
        {"rule": "none", "init": "unit", "lr": lr, "top_weight": w, "step": 800, "steps": 800}
        for lr, w in enumerate(without)
    ]
    return {"charlm": [*rows, {**rows[0], "rule": "sqrt_dk", "top_weight": 0.3}]}


def keys(before=600.0, trained=40.0, bare=2.0):
    drawn = [
        {"rule": rule, "d": 512, "n": 1024, **est(effective_keys=k)} for rule, k in (("sqrt_dk", before), ("none", 1.4))
    ]
    rows = [{"rule": rule, "lr": 1e-3, "seed": 0, "step": step, "length": 128, "effective_keys": k}
            for rule, k in (("sqrt_dk", trained), ("none", bare)) for step in (0, 800)]  # fmt: skip
    return {"divisors": drawn, "trained": rows}


def widths(head, joined):
    rows = {"input": 512, "one head": head, "heads joined": joined}
    return {"worked": [{"quantity": "width", "example": name, "value": value} for name, value in rows.items()]}


def subspaces(different, overlap, chance=0.1):
    row = {"different": different, "overlap": overlap, "overlap_reach": 0.01, "chance": chance}
    return {"subspaces": [{**row, "distance": 0.4, "own_distance": 0.1, "largest_overlap": 0.5}]}


def passes(factor, work, difference=1e-7):
    row = {
        "n": 512,
        "threads": 1,
        "factor": factor,
        "factor_low": factor,
        "work_factor": work,
        "difference": difference,
    }
    return {"parallel": [{**row, "pass_ms": 1.0}]}


def entries(share):
    row = {"d": 1024, "n": 128, "w_q_half": share, "w_k_half": share, "query_half": 0.02}
    return {"gradient": [{**row, "rule": "none"}, {**row, "rule": "sqrt_dk", "w_q_half": 0.124}]}


def pronouns(right, p=0.001, chance=0.7):
    row = {"layer": 3, "head": 1, "t": 4.0, "p": p, "right": right, "right_by_chance": chance, "follows": 0.1}
    by = {"by": "meaning", "rule": "sqrt_dk", "query": "pronoun"}
    agreement = [{**row, **by, "by": "agreement"}]
    return {"antecedent": [{**row, **by}, {**row, **by, "rule": "none"}], "antecedent_agreement": agreement,
            "antecedent_control": [{**row, **by, "query": "word before"}]}  # fmt: skip


def own(*weights):
    return {"own_key": [{"own_weight": w, "even": 0.1} for w in weights]}


def by_heads(unit, fixed):
    drawn = [{"heads": h, "logit_std": s} for h, s in zip((1, 96), unit, strict=True)]
    wide = [
        {"d_model": 12288, "d": 12288 // h, "logit_variance": s * s * h} for h, s in zip((12, 96), fixed, strict=True)
    ]
    return {"by_heads": drawn, "by_heads_fixed": wide}


def grown(fan_in, fixed):
    rows = [("fan_in", 256, 1.0), ("fan_in", 4096, fan_in), ("fixed", 256, 1.0), ("fixed", 4096, fixed)]
    return {"width": [{"init": init, "d_model": d, "logit_variance": v} for init, d, v in rows]}


def timed(ours, eager, wide=0.0):
    rows = [
        {"way": w, "speed_low": s, "speed": s, "speed_high": s + wide}
        for w, s in (("attemper", ours), ("eager", eager))
    ]
    return {"scale_cost": [{**row, "share_of_operations": 0.01} for row in rows]}


def matched(stds, weights):
    rows = zip((16, 512), stds, weights, strict=True)
    return {"match": [{"d": d, "n": 1024, "logit_std": s, "aligned_weight": w} for d, s, w in rows]}


def perfect(fan_in, *heads):
    rows = [
        {"init": "fan_in", "scale": 0.1, "scaled_variance": fan_in},
        {"init": "linear", "scale": 0.1, "scaled_variance": 0.1},
    ]
    return {"inits": rows, "real_heads": [{"rule": "sqrt_dk", "variance": head} for head in heads]}


def dims(*sizes):
    return {"head_dims": [{"head_dim": size} for size in sizes]}


def ranged(few, many):
    rows = zip((9, 1024), (few, many), strict=True)
    return {"ranges": [{"scores": n, "as_said": share, "ratio": 1.5} for n, share in rows]}


def products(ratio):
    rows = zip(("additive", "dot"), (ratio, 1.0), strict=True)
    return {"three_scores": [{"d": 256, "n": 512, "score": s, "product_flops": f, "tanhs": 0} for s, f in rows]}


def rises(sgd, adam):
    """(smallest, largest first gradient) under each optimizer."""
    return {
        name: [
            {"lr": 1.0, "first_gradient": gradient, "worst_rise": rise, "steps_to_learn": 9.0}
            for gradient, rise in zip((0.01, 1.0), of, strict=True)
        ]
        for name, of in (("plateau", sgd), ("plateau_adam", adam))
    }  # fmt: skip


def shared(additive_keys, dot, scaled, factor=9.0):
    rows = zip(("additive", "dot", "scaled"), (additive_keys, dot, scaled), strict=True)
    cost = [{"d": 256, "factor_low": factor, "factor": factor}]
    return {
        "three_scores": [{"d": 256, "n": 512, "score": s, "effective_keys": k} for s, k in rows],
        "additive_cost": cost,
    }


def similar(same, longer):
    return {"similarity": [{"d": 64, "same_key": same, "longer_wins": longer, "first_wins": 1.0}]}


def softmaxes(value):
    return {"worked": [{"quantity": "softmax", "example": "7, 3", "place": 0, "value": value, "said": 0.98}]}


def a_times(many):
    return {"nonunit": [{"a": 9.0, "d": d, **est(variance=v)} for d, v in ((1, 9.0), (64, many))]}


REACHED = {
    "C1": {HOLDS: {"variance": scores(2, 64), "inits": LINEAR}, CONDITION: {"variance": scores(2, 50), "inits": LINEAR},
           FALSE: {"variance": scores(3, 50), "inits": LINEAR}},
    "C2": {HOLDS: {"variance": scores(2, 64), "inits": INITS}, CONDITION: {"variance": scores(2, 64), "inits": LINEAR},
           FALSE: {"variance": scores(2, 50), "inits": INITS}},
    "C3": {verdict: {"variance": [{"d": d, **est(range=r), "range_of": 1000} for d, r in ((2, 10.0), (5, wide))]}
           for verdict, wide in ((HOLDS, 18.0), (FALSE, 10.0))},
    "C4": {HOLDS: softmaxes(0.982), FALSE: softmaxes(0.9)},
    "C5": {HOLDS: saturated((0.1, 0.1), (0.5, 0.5), (0.9, 0.95)), CONDITION: saturated((0.5, 0.1), (1, 0.5), (6, 0.95)),
           FALSE: saturated((0.5, 0.1), (1, 0.5), (6, 0.8))},
    "C6": {HOLDS: gradients(median=(0.1, 0.1), rms=(0.5, 0.5)), CONDITION: gradients(median=(2, 0.1), rms=(3, 3)),
           FALSE: gradients(median=(2, 2), rms=(3, 3))},
    "C7": {HOLDS: gradients(rms=(3, 30)), CONDITION: gradients(rms=(0.5, 30)), FALSE: gradients(rms=(3, 3))},
    "C8": {HOLDS: precise(softmax=False), CONDITION: precise(fused=False), FALSE: precise()},
    "C10": {HOLDS: divided(dk=2.3), CONDITION: divided(), FALSE: divided(flat=0.9)},
    "C11": {HOLDS: dmodel(cost=0.3), CONDITION: dmodel(cost=0.0), FALSE: dmodel(std=1.0, cost=0.0)},
    "C12": {HOLDS: additive(0.9), FALSE: additive(10.0)},
    "C13": {HOLDS: slow(5.0, 1.0), CONDITION: slow(5.0, 16.0), FALSE: slow(0.9, 16.0)},
    "C14": {HOLDS: tops(0.95, 0.99), CONDITION: tops(0.4, 0.99), FALSE: tops(0.4, 0.5)},
    "C16": {HOLDS: keys(), CONDITION: keys(trained=13.0), FALSE: keys(before=100.0)},
    "C17": {HOLDS: widths(512, 512), CONDITION: widths(64, 512), FALSE: widths(64, 64)},
    "C18": {HOLDS: subspaces(0.95, 0.1), CONDITION: subspaces(0.95, 0.2), FALSE: subspaces(0.3, 0.2)},
    "C21": {HOLDS: passes(9.0, 3.0), CONDITION: passes(9.0, 0.9), FALSE: passes(0.9, 0.9)},
    "C22": {HOLDS: entries(0.048), CONDITION: entries(0.08), FALSE: entries(0.11)},
    "C23": {HOLDS: a_times(576.0), FALSE: a_times(500.0)},
    "C24": {HOLDS: pronouns(0.95), CONDITION: pronouns(0.75), FALSE: pronouns(0.65)},
    "C25": {HOLDS: own(0.01, 0.02), CONDITION: own(0.2, 0.01, 0.01), FALSE: own(0.2, 0.1)},
    "C26": {HOLDS: by_heads((2.0, 0.5), (1, 1)), CONDITION: by_heads((1.0, 0.1), (1.4, 0.5)),
            FALSE: by_heads((1.0, 0.1), (0.9, 0.5))},
    "C27": {HOLDS: grown(1.0, 1.0), CONDITION: grown(1.0, 256.0), FALSE: grown(3.0, 256.0)},
    "C28": {HOLDS: timed(1.5, 1.5), CONDITION: timed(1.5, 1.0), FALSE: timed(1.0, 1.0), UNDECIDED: timed(1.0, 1.0, wide=1.0)},
    "C29": {HOLDS: matched((1, 1), (0.5, 0.5)), CONDITION: matched((1, 1), (0.1, 0.9)), FALSE: matched((1, 8), (0.1, 0.9))},
    "C30": {HOLDS: perfect(1.0, 1.0, 1.1), CONDITION: perfect(1.0, 9.0, 1.0), FALSE: perfect(4.0, 1.0)},
    "C31": {HOLDS: dims(64, 128, 512), CONDITION: dims(64, 128, 80), FALSE: dims(80, 96)},
    "C32": {HOLDS: ranged(0.5, 0.5), CONDITION: ranged(0.14, 0.0), FALSE: ranged(0.0, 0.0)},
    "C33": {HOLDS: products(0.0), CONDITION: products(0.5), FALSE: products(1.0)},
    "C34": {HOLDS: rises((0.5, 0.1), (0.5, 0.1)), CONDITION: rises((0.01, 0.02), (0.5, 0.1)),
            FALSE: rises((0.01, 0.02), (0.01, 0.02))},
    "C35": {HOLDS: shared(200, 1.5, 150), CONDITION: shared(50, 1.5, 150), FALSE: shared(200, 150, 150)},
    "C36": {HOLDS: similar(1.0, 1.0), CONDITION: similar(0.7, 9.0), FALSE: similar(0.3, 9.0)},
}  # fmt: skip
JUDGES = {claim.id: claim.judge for claim in claims.CLAIMS}


@pytest.mark.parametrize(("name", "verdict"), [(name, verdict) for name, of in REACHED.items() for verdict in of])
def test_made_up_rows_reach_the_verdict(name, verdict):
    judged = JUDGES[name](REACHED[name][verdict])
    assert judged.verdict == verdict, judged.condition
    assert judged.numbers


def test_every_verdict_that_a_judge_can_give_is_reached():
    """The verdicts that its source names are those above, and two at least: with one alone nothing could come out otherwise."""
    assert set(REACHED) | TRAINED == set(JUDGES)
    for name, of in REACHED.items():
        named = {
            GIVES[word]
            for word in re.findall(r"\b(HOLDS|CONDITION|FALSE|UNDECIDED)\b", inspect.getsource(JUDGES[name]))
        }
        assert set(of) == named, name
        assert {HOLDS, FALSE} <= named, name


def test_one_query_alone_reaches_few_entries():
    """What C22 compares with: half of the sum of squares of a normal law, and of x yᵀ."""
    stream = torch.Generator().manual_seed(5)
    x, y, z = (torch.randn(1_000_000, generator=stream) for _ in range(3))
    assert abs(float(_half(x)) - 0.124) < 0.002
    assert abs(float(_half(y * z)) - judge_gradients.ONE_QUERY) < 0.001
