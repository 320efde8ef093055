"""What must hold for any input: found by hypothesis, not by our imagination."""

import itertools
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attemper
from attemper.vitals import SIGNS
from close import assert_float64
from serving import ON_CPU

settings.register_profile("attemper", deadline=None, max_examples=40, suppress_health_check=list(HealthCheck))
settings.load_profile("attemper")

pytestmark = pytest.mark.parametrize("kernel", ON_CPU)


@st.composite
def problems(draw, dtype=torch.float64):
    heads = draw(st.sampled_from([(1, 1), (4, 2), (3, 3)]))
    rows, keys = draw(st.integers(1, 12)), draw(st.integers(1, 20))
    dim, value_dim = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([0.1, 1.0, 5.0]))

    def tensor(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).mul(size).to(dtype)

    q, k, v = tensor(2, heads[0], rows, dim), tensor(2, heads[1], keys, dim), tensor(2, heads[1], keys, value_dim)
    mask = draw(st.sampled_from(["none", "bool", "additive"]))
    if mask == "none":
        return q, k, v, None
    table = torch.randn(2, 1, rows, keys, generator=generator, dtype=torch.float64)
    return q, k, v, table > -0.5 if mask == "bool" else table.to(dtype)


def assert_same(one, other):
    assert_float64(one.output, other.output, "output")
    for name in SIGNS:
        assert_float64(getattr(one.vitals, name), getattr(other.vitals, name), name)


@given(problems())
def test_permuting_the_keys_changes_nothing(kernel, problem):
    q, k, v, mask = problem
    order = torch.randperm(k.shape[2])
    shuffled = None if mask is None else mask[..., order]
    one = attemper.attention(q, k, v, mask=mask, kernel=kernel)
    assert_same(one, attemper.attention(q, k[:, :, order], v[:, :, order], mask=shuffled, kernel=kernel))


@given(problems(), st.floats(-50, 50))
def test_shifting_the_logits_shifts_mean_peak_and_lse_alone(kernel, problem, shift):
    q, k, v, mask = problem
    bias = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
    if mask is not None:
        bias = bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask
    one = attemper.attention(q, k, v, mask=bias, kernel=kernel)
    two = attemper.attention(q, k, v, mask=bias + shift, kernel=kernel)
    assert_float64(one.output, two.output)
    for name in ("visible", "variance", "entropy", "sum_p2"):
        assert_float64(getattr(one.vitals, name), getattr(two.vitals, name), name)
    some = one.vitals.visible > 0
    for name in ("mean", "peak", "lse"):
        assert_float64((getattr(one.vitals, name) + shift)[some], getattr(two.vitals, name)[some], name)


@given(problems(), st.lists(st.integers(0, 20), max_size=4))
def test_merging_any_split_gives_the_whole(kernel, problem, cuts):
    q, k, v, mask = problem
    keys = k.shape[2]
    edges = [*sorted({min(c, keys) for c in cuts} | {0, keys}), keys]  # ends with an empty shard
    whole = attemper.attention(q, k, v, mask=mask, kernel=kernel)
    parts = [
        attemper.attention(q, k[:, :, a:b], v[:, :, a:b], mask=None if mask is None else mask[..., a:b], kernel=kernel)
        for a, b in itertools.pairwise(edges)
    ]
    assert_same(attemper.merge(parts), whole)
    assert_float64(attemper.merge([p.vitals for p in parts]).entropy, whole.vitals.entropy)


@given(problems(dtype=torch.float32))
def test_signs_stay_within_their_bounds(kernel, problem):
    q, k, v, mask = problem
    vitals = attemper.attention(q, k, v, mask=mask, kernel=kernel).vitals
    some = vitals.visible > 0
    seen = vitals.visible[some].float()
    slack = 16 * torch.finfo(torch.float32).eps * (1 + vitals.peak[some].abs())
    assert (vitals.entropy[some] >= -slack).all()
    assert (vitals.entropy[some] <= seen.log() + slack).all()
    assert (vitals.sum_p2[some] <= 1 + slack).all()
    assert (vitals.sum_p2[some] >= 1 / seen - slack).all()
    assert (vitals.variance >= 0).all()
    assert (vitals.mean[some] <= vitals.peak[some] + slack).all()
    assert (vitals.peak[some] <= vitals.lse[some] + slack).all()
    assert (vitals.lse[some] <= vitals.peak[some] + seen.log() + slack).all()
    assert (vitals.top_weight <= 1 + 1e-5).all()


@given(st.integers(1, 40), st.integers(1, 8), st.floats(-3, 3))
def test_equal_keys_are_shared_equally(kernel, keys, dim, level):
    q = torch.full((1, 3, dim), 1.0, dtype=torch.float64)
    k = torch.full((1, keys, dim), level, dtype=torch.float64)
    vitals = attemper.attention(q, k, k, kernel=kernel).vitals
    assert_float64(vitals.entropy, torch.full((1, 3), math.log(keys), dtype=torch.float64))
    assert_float64(vitals.sum_p2, torch.full((1, 3), 1 / keys, dtype=torch.float64))
    assert_float64(vitals.variance, torch.zeros(1, 3, dtype=torch.float64))
