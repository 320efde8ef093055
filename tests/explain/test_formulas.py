"""Formulas follow the numbers: what a step writes, put to its own S, Q and K, gives the Z it shows; also for a custom rule."""

import dataclasses
import re
import time

import pytest
import torch

import attemper
from attemper.errors import InputError
from close import assert_float64, in_float64

NINE = "The dog chased the ball because it was fast."
TIGHT = dataclasses.replace(attemper.RULES["softcap"], name="tight", formula="3 tanh(…)", softcap=3.0)
ROUND = dataclasses.replace(TIGHT, name="round", factor=lambda head_dim: 4.0, unit=True)
PAIRS = [
    *((rule, "dot") for rule in (*attemper.RULES.values(), TIGHT, ROUND)),
    *(
        (attemper.RULES[name], score)
        for name, score in (("none", "cosine"), ("qk_norm", "cosine"), ("none", "additive"))
    ),
]


def steps(explanation):
    return {step.name: step for step in explanation.steps}


def corner(matrix):
    return torch.tensor(matrix.values, dtype=torch.float64)


def evaluate(formula, values):
    """Z = 3 tanh(0.5 S / 3), as written, on the tensors that the letters stand for."""
    code = formula.removeprefix("Z = ").replace("cos(q, k)", "COS")
    code = re.sub(r"(?<=\d) (?=[A-Za-z])", " * ", code)
    return eval(code, {"tanh": torch.tanh, **values})


@pytest.mark.parametrize(("rule", "score"), PAIRS, ids=[f"{rule.name}-{score}" for rule, score in PAIRS])
def test_every_formula_gives_the_numbers_beside_it(rule, score):
    explanation = attemper.explain(NINE, rule=rule, score=score, heads=2, d_model=8, layer=2)  # d_k = 4: all is shown
    found = steps(explanation)
    query, key, _ = (corner(matrix) for matrix in found["queries"].matrices)
    cosine = (query @ key.mT) / query.norm(dim=-1)[:, None] / key.norm(dim=-1)
    if score == "additive":
        assert found["logits"].formula == "Z[i, j] = wᵀ tanh(qᵢ + kⱼ)"
    else:
        values = {"S": corner(found["scores"].matrices[0]), "COS": cosine}
        by_name = {"S = Q Kᵀ": query @ key.mT, "S[i, j] = qᵢ·kⱼ / (|qᵢ| |kⱼ|)": cosine}
        assert_float64(values["S"], by_name[found["scores"].formula])
        for lane, matrix, said in zip(
            explanation.lanes, found["logits"].lanes, found["logits"].formula.split(",  "), strict=True
        ):
            label, _, formula = said.partition(": ")
            assert label == lane.label
            # the numbers are written in three digits
            torch.testing.assert_close(evaluate(formula, values), corner(matrix), rtol=6e-3, atol=1e-3)
    assert found["heads"].formula == "headₕ = softmax(Zₕ) Vₕ"
    assert found["context"].formula == "head₀ = P V"
    assert found["concat"].formula == "C = [head₀, head₁, …]"
    for lane, signs in zip(explanation.lanes, explanation.signs, strict=True):
        assert lane.bound is None or signs["peak"] <= lane.bound


def test_a_near_cap_is_foretold_no_variance():
    far, near = (steps(attemper.explain(NINE, rule=rule))["logits"].readings[0] for rule in ("softcap", TIGHT))
    assert far.expected == (1.0, 64.0)
    assert near.expected == (None, 64.0)
    assert near.std[0] is None
    assert near.values[0] < 1
    capped = steps(attemper.explain(NINE, rule="softcap"))["signs"].note
    assert capped.endswith("and by the slope of the score.")
    assert steps(attemper.explain("one"))["logits"].readings[0].theory == ""


def test_far_is_far_enough_for_the_give():
    """A normal logit under a cap 20 standard deviations away loses half a percent of its variance."""
    normal = torch.randn(10**5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lost = 1 - (20 * (normal / 20).tanh()).var() / normal.var()
    assert lost.item() == pytest.approx(2 / 20**2, rel=0.05)


def test_layer_has_no_silent_default():
    with pytest.raises(InputError, match="needs `layer`"):
        attemper.explain(NINE, rule="layer")
    first, fourth = (attemper.explain(NINE, rule="layer", layer=layer).lanes[0].scale for layer in (0, 3))
    assert first == in_float64(4 * fourth)
    assert attemper.explain(NINE).to_dict()["settings"]["layer"] is None


def test_a_prime_width_is_answered_at_once():
    start = time.process_time()
    with pytest.raises(InputError, match="Use 1 or 100000007 heads"):
        attemper.explain(NINE, d_model=10**8 + 7, heads=10**4)
    assert time.process_time() - start < 1
