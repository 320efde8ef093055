"""Every number of an explanation against a plain float64 recomputation, and the shapes against those of a textbook."""

import hashlib
import json
import math
import subprocess
import sys

import pytest
import torch

import attemper
from close import assert_float64, in_float64

TEXT = "Love Apple phones"
NINE = "The dog chased the ball because it was fast."


def steps(explanation):
    return {step.name: step for step in explanation.steps}


def drawn(name, shape, seed=0):
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def by_hand(text, d_model=512, d_k=64, heads=1, seed=0):
    """Embeddings and each head's q, k, v, with nothing of attemper."""
    embedded = torch.stack([drawn(f"word {word}", (d_model,), seed) for word in text.split()])
    parts = [
        torch.stack([embedded @ drawn(f"matrix {name} {h}", (d_model, d_k), seed) / d_model**0.5 for h in range(heads)])
        for name in ("W_Q", "W_K", "W_V")
    ]
    return embedded, *parts


def assert_corner(matrix, expected):
    corner = expected[: len(matrix.values), : len(matrix.values[0])]
    assert_float64(torch.tensor(matrix.values, dtype=torch.float64), corner)
    assert tuple(expected.shape) == matrix.shape


def assert_signs(signs, logits):
    """Signs as means over rows and heads, from logits (H, n, n)."""
    weights = logits.softmax(-1)
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    expected = {
        "variance": logits.flatten(1).var(-1, correction=0).mean(),
        "peak": logits.max(),
        "top_weight": weights.amax(-1).mean(),
        "entropy": entropy.mean(),
        "evenness": (entropy / math.log(logits.shape[-1])).mean(),
        "effective_keys": entropy.exp().mean(),
        "jacobian_trace": (1 - weights.square().sum(-1)).mean(),
    }
    assert signs.keys() == expected.keys()
    for name, value in expected.items():
        assert signs[name] == in_float64(value.item()), name


def test_the_shapes_are_those_of_a_textbook():
    found = steps(attemper.explain(TEXT))
    assert list(found) == ["embeddings", "projections", "queries", "scores", "logits", "weights", "signs", "context"]
    sizes = {name: [m.size for m in (*step.matrices, *step.lanes)] for name, step in found.items()}
    assert sizes == {
        "embeddings": ["[3×512]"],
        "projections": ["[512×64]"] * 3,
        "queries": ["[3×64]"] * 3,
        "scores": ["[3×3]"],
        "logits": ["[3×3]"] * 2,
        "weights": ["[3×3]"] * 2,
        "signs": [],
        "context": ["[3×64]"] * 2,
    }


def test_every_step_by_hand():
    explanation = attemper.explain(TEXT)
    found = steps(explanation)
    embedded, query, key, value = by_hand(TEXT)
    scores = query @ key.mT
    assert_corner(found["embeddings"].matrices[0], embedded)
    for matrix, expected in zip(found["queries"].matrices, (query, key, value), strict=True):
        assert_corner(matrix, expected[0])
    assert_corner(found["scores"].matrices[0], scores[0])
    for index, logits in enumerate((scores / 8, scores)):
        assert_corner(found["logits"].lanes[index], logits[0])
        assert_corner(found["weights"].lanes[index], logits[0].softmax(-1))
        assert_corner(found["context"].lanes[index], logits[0].softmax(-1) @ value[0])
        assert_signs(explanation.signs[index], logits)


def test_narrow_heads_stand_side_by_side_in_the_corner():
    lane = steps(attemper.explain(NINE, heads=8, d_model=16))["concat"].lanes[1]
    _, query, key, value = by_hand(NINE, d_model=16, d_k=2, heads=8)
    assert_corner(lane, ((query @ key.mT).softmax(-1) @ value).transpose(0, 1).flatten(1))
    assert len(lane.values[0]) == 6


def test_heads_are_concatenated_and_projected():
    explanation = attemper.explain(NINE, heads=8)
    found = steps(explanation)
    _, query, key, value = by_hand(NINE, heads=8)
    output = torch.cat([drawn(f"matrix W_O {head}", (64, 512)) for head in range(8)]) / 512**0.5
    for index, logits in enumerate((query @ key.mT / 8, query @ key.mT)):
        context = logits.softmax(-1) @ value
        together = context.transpose(0, 1).flatten(1)
        assert_corner(found["context"].lanes[index], context[0])
        assert_corner(found["concat"].lanes[index], together)
        assert_corner(found["output"].lanes[index], together @ output)
        assert_signs(explanation.signs[index], logits)
        for line, head in zip(found["heads"].heads, logits, strict=True):
            assert line.variance[index] == in_float64(head.var(correction=0).item())
            assert line.top_weight[index] == in_float64(head.softmax(-1).amax(-1).mean().item())
    assert found["output"].matrices[0].size == "[512×512]"
    assert found["output"].lanes[0].shape == found["embeddings"].matrices[0].shape
    assert found["context"].lanes[0].shape != found["embeddings"].matrices[0].shape
    # one head alone is the first of the eight
    assert steps(attemper.explain(NINE))["weights"].lanes == found["weights"].lanes


def logits_of(rule, query, key):
    width, keys = query.shape[-1], key.shape[-2]
    scores = query @ key.mT
    cosine = scores / query.norm(dim=-1)[..., None] / key.norm(dim=-1)[..., None, :]
    return {
        "sqrt_dk": scores / width**0.5,
        "none": scores,
        "dk": scores / width,
        "sqrt_dmodel": scores / 64**0.5,
        "layer": scores / (3 * width**0.5),
        "log_n": 0.43 * math.log(keys) * scores / width**0.5,
        "learned": scores / width**0.5,
        "qk_norm": width**0.5 * cosine,
        "softcap": 50 * torch.tanh(scores / width**0.5 / 50),
    }[rule]


@pytest.mark.parametrize("rule", attemper.RULES)
def test_every_rule_beside_none(rule):
    explanation = attemper.explain(NINE, rule=rule, d_model=64, d_k=16, layer=2)
    assert explanation.lanes[0].rule == rule
    assert explanation.lanes[1].rule == ("sqrt_dk" if rule == "none" else "none")
    _, query, key, _ = by_hand(NINE, d_model=64, d_k=16)
    for lane, signs in zip(explanation.lanes, explanation.signs, strict=True):
        assert_signs(signs, logits_of(lane.rule, query, key))
    assert ("layer 2" in str(explanation)) == (rule == "layer")


def test_additive_stands_beside_the_unscaled_dot_product():
    explanation = attemper.explain(NINE, score="additive", heads=4, d_model=64)
    _, query, key, _ = by_hand(NINE, d_model=64, d_k=16, heads=4)
    weight = torch.stack([drawn(f"vector w {head}", (16,)) for head in range(4)]) / 16**0.5
    logits = ((query[:, :, None] + key[:, None]).tanh() * weight[:, None, None]).sum(-1)
    assert_signs(explanation.signs[0], logits)
    assert_signs(explanation.signs[1], query @ key.mT)
    assert_corner(steps(explanation)["logits"].lanes[0], logits[0])
    assert_corner(steps(explanation)["weights"].lanes[0], logits[0].softmax(-1))
    assert explanation.lanes[0].bound == in_float64(weight.abs().sum(-1).max().item())
    assert logits.abs().max() < explanation.lanes[0].bound
    assert "scores" not in steps(explanation)


@pytest.mark.parametrize("rule", [None, "none"])
def test_cosine_is_scaled_up(rule):
    explanation = attemper.explain(NINE, score="cosine", rule=rule, d_model=64, d_k=16)
    _, query, key, _ = by_hand(NINE, d_model=64, d_k=16)
    both = [logits_of("qk_norm", query, key), logits_of("qk_norm", query, key) / 4]
    for signs, logits in zip(explanation.signs, both if rule is None else both[::-1], strict=True):
        assert_signs(signs, logits)
    assert_corner(steps(explanation)["scores"].matrices[0], both[1][0])
    assert sorted(lane.bound for lane in explanation.lanes) == [1, 4]


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_the_expected_variance_and_its_std_hold_over_seeds(score, heads):
    d_k = 16 if heads is None else None
    found = [
        attemper.explain("a b c d e f g h", score=score, heads=heads, d_model=64, d_k=d_k, seed=s) for s in range(40)
    ]
    reading = steps(found[0])["logits"].readings[0]
    off = torch.tensor([(f.signs[0]["variance"] - reading.expected[0]) / reading.std[0] for f in found])
    assert off.mean().abs() < 0.5
    assert 0.7 < off.std() < 1.5


def test_the_same_word_and_seed_give_the_same_numbers_everywhere():
    corner = steps(attemper.explain("Love Love Apple"))["embeddings"].matrices[0].values
    assert corner[0] == corner[1] != corner[2]
    assert steps(attemper.explain("Apple"))["embeddings"].matrices[0].values[0] == corner[2]
    assert attemper.explain(TEXT, seed=1).signs != attemper.explain(TEXT).signs
    assert attemper.explain(TEXT).conclusion == attemper.explain(TEXT).conclusion


PEAK = """
import json, resource, sys, attemper
first = attemper.explain("Love Apple phones").conclusion
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
explanation = attemper.explain(" ".join(f"w{place}" for place in range(10_000)), d_model=64, d_k=16)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
reading = next(step for step in explanation.steps if step.name == "logits").readings[0]
print(json.dumps([grown / (2**20 if sys.platform == "darwin" else 2**10), len(str(explanation).splitlines()),
                  reading.values[0], reading.expected[0], reading.std[0], first]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX")
def test_ten_thousand_words_in_another_process_keep_no_square_matrix_and_the_same_numbers():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    mib, lines, measured, expected, std, first = json.loads(done.stdout)
    assert first == attemper.explain(TEXT).conclusion
    assert mib < 120  # 10,000 × 10,000 weights would take 381 in float32
    assert lines < 150
    assert abs(measured - expected) < 4 * std
