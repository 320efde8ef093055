"""What is particular to the scores: bounds, zero vectors, extreme lengths, empty sizes, NaN, dropout, half precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

import attemper
from close import ROUNDING, assert_float64, in_float64
from judge import assert_as_exact
from scores.plain import additive_logits, cosine_logits

SIGNS = ("mean", "variance", "peak", "lse", "entropy", "sum_p2")


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def additive(query, key, value, weight, **options):
    return attemper.additive_attention(query, key, value, weight, **options)


def cosine(query, key, value, scale, **options):
    return attemper.cosine_attention(query, key, value, scale=scale, **options)


BOTH = pytest.mark.parametrize("score", [additive, cosine])


def extra(score, dim, dtype=torch.float32):
    return draw(dim, dtype=dtype) if score is additive else torch.tensor(3.0, dtype=dtype)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    keys=st.integers(1, 9),
    dim=st.integers(1, 9),
    size=st.floats(0.01, 100),
    seed=st.integers(0, 999),
)
def test_an_additive_logit_is_bounded_by_the_sum_of_the_weights_and_not_by_one(rows, keys, dim, size, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, w = (torch.randn(n, dim, generator=generator).double() * size for n in (rows, keys, 1))
    vitals = additive(q, k, k, w[0], signs=("peak", "mean", "variance")).vitals
    bound = w.abs().sum().item() * (1 + ROUNDING)
    assert vitals.peak.abs().max().item() <= bound
    assert vitals.variance.max().item() <= bound**2
    # reached, and above 1 where the weights are: every tanh takes its weight's sign
    towards = 50 * w.sign()
    reached = additive(towards, 0 * k, k, w[0]).vitals.mean.item()
    assert reached == in_float64(w.abs().sum().item())


@settings(max_examples=25, deadline=None)
@given(dim=st.integers(1, 9), scale=st.floats(-50, 50), length=st.floats(-30, 30), seed=st.integers(0, 999))
def test_a_cosine_logit_is_bounded_by_the_scale_and_ignores_lengths(dim, scale, length, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, dim, generator=generator).double() for n in (5, 7))
    near = cosine(q, k, k, scale).vitals
    far = cosine(q * 10**length, k * 10**-length, k, scale).vitals
    assert near.peak.abs().max().item() <= abs(scale) * (1 + ROUNDING)
    for name in SIGNS:
        assert_float64(getattr(far, name), getattr(near, name), name)


@pytest.mark.parametrize("size", [1e-20, 1e20, 1e-30, 1e37])
def test_cosine_of_extreme_lengths_in_float32(size):
    """Squares of these leave float32; the direction does not: as exact as lengths near 1, and so is the gradient times `size`."""
    q, k, v = draw(6, 8), draw(9, 8), draw(9, 4)
    grads = []
    for factor, dtype in ((size, torch.float32), (1.0, torch.float32), (1.0, torch.float64)):
        leaves = [(q.to(dtype) * factor).requires_grad_(), (k.to(dtype) * factor).requires_grad_()]
        output, vitals = cosine(*leaves, v.to(dtype), 5.0)
        found = torch.autograd.grad(output.sum() + vitals.entropy.sum(), leaves)
        grads.append([output.double(), *(g.double() * factor for g in found)])
    for name, ours, plain, exact in zip(("output", "d(query)", "d(key)"), *grads, strict=True):
        assert_as_exact(name, ours.float(), [plain], exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_vector_has_logit_zero_and_finite_gradients(dtype):
    q, k, v = draw(3, 8, dtype=dtype), draw(5, 8, dtype=dtype), draw(5, 4, dtype=dtype)
    q[1], k[2] = 0, 0
    for leaf in (q, k, v):
        leaf.requires_grad_()
    output, vitals = cosine(q, k, v, 10.0)
    assert vitals.entropy[1] == torch.tensor(math.log(5))
    assert vitals.peak[1] == vitals.variance[1] == 0
    (output.float().sum() + vitals.entropy.sum() + vitals.variance.sum()).backward()
    for leaf in (q, k, v):
        assert leaf.grad.isfinite().all()
    assert not q.grad[1].any()
    assert not k.grad[2].any()
    assert q.grad[0].any()
    alone = cosine(q, 0 * k, v, 10.0).vitals
    assert not alone.peak.any()


@BOTH
def test_gradcheck(score):
    """Numerical derivatives agree, with a mask, a causal band, grouped heads and every sign in the loss."""
    torch.manual_seed(1)
    leaves = [draw(1, h, n, 3, dtype=torch.float64).requires_grad_() for h, n in ((2, 4), (1, 5), (1, 5))]
    leaves += [extra(score, 3, torch.float64).requires_grad_(), draw(2, 1, 5, dtype=torch.float64).requires_grad_()]

    def run(query, key, value, number, mask):
        output, vitals = score(query, key, value, number, mask=mask, causal="lower_right")
        return (output, *(getattr(vitals, name) for name in SIGNS))

    assert gradcheck(run, leaves)


@BOTH
@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (1, 0, 3, 3), (1, 2, 0, 3), (1, 2, 3, 0), (0, 0, 0, 0)])
def test_empty_sizes(score, shape):
    b, h, lq, lk = shape
    q, k, v = (draw(b, h, n, 8).requires_grad_() for n in (lq, lk, lk))
    number = extra(score, 8).requires_grad_()
    output, vitals = score(q, k, v, number)
    assert output.shape == (b, h, lq, 8)
    assert not output.any()
    assert all(getattr(vitals, name).shape == (b, h, lq) for name in vitals.measured)
    (output.sum() + vitals.entropy.sum() + vitals.mean.sum()).backward()
    for leaf in (q, k, v, number):
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


@BOTH
def test_a_head_dim_of_zero_has_logit_zero(score):
    q, v = torch.empty(2, 4, 0, dtype=torch.float64, requires_grad=True), draw(2, 4, 3, dtype=torch.float64)
    output, vitals = score(q, q, v, extra(score, 0, torch.float64))
    assert_float64(output, v.mean(1, keepdim=True).expand(2, 4, 3))
    assert not vitals.peak.any()
    vitals.entropy.sum().backward()


@BOTH
@pytest.mark.parametrize("dims", [2, 3, 5])
def test_any_number_of_dimensions_and_broadcast_leads(score, dims):
    lead = (2, 3, 2)[: dims - 2]
    shapes = ((*lead, 5, 8), (*(1 for _ in lead[:-1]), *lead[-1:], 7, 8), (*lead, 7, 4))
    q, k, v = (draw(*shape, dtype=torch.float64) for shape in shapes)
    number = extra(score, 8, torch.float64)
    logits = additive_logits if score is additive else cosine_logits
    wide = k.expand(*lead, 7, 8)
    z = logits(q.reshape(-1, 1, 5, 8), wide.reshape(-1, 1, 7, 8), number).reshape(*lead, 5, 7)
    output, vitals = score(q, k, v, number)
    assert_float64(output, z.softmax(-1) @ v)
    assert_float64(vitals.peak, z.amax(-1))
    assert vitals.entropy.shape == (*lead, 5)


@BOTH
def test_signs_do_not_change_the_output(score):
    q, number = draw(2, 3, 40, 8), extra(score, 8)
    full, bare, one = (score(q, q, q, number, causal=True, signs=s) for s in ("all", (), "entropy"))
    assert torch.equal(full.output, bare.output)
    assert torch.equal(full.output, one.output)
    assert bare.vitals.measured == ()
    assert one.vitals.measured == ("entropy",)
    assert torch.equal(one.vitals.entropy, full.vitals.entropy)


@BOTH
def test_a_key_outside_the_band_never_reaches_a_row(score):
    q, k, v = draw(6, 8), draw(6, 8), draw(6, 4)
    number = extra(score, 8)
    clean = score(q, k, v, number, causal=True)
    k[4] = math.nan
    output, vitals = score(q, k, v, number, causal=True)
    assert torch.equal(output[:4], clean.output[:4])
    assert torch.equal(vitals.lse[:4], clean.vitals.lse[:4])
    assert output[4:].isnan().all()


def test_infinite_entries_saturate_the_additive_score():
    k = draw(4, 3)
    k[0, 0], k[1, 0] = math.inf, -math.inf
    k.requires_grad_()
    output, vitals = additive(draw(2, 3), k, draw(4, 3), draw(3))
    output.sum().backward()
    assert vitals.lse.isfinite().all()
    assert k.grad.isfinite().all()
    assert not k.grad[:2, 0].any()


@BOTH
def test_dropout_keeps_the_mean_and_the_vitals_and_its_backward_draws_the_same(score):
    q, k = draw(40, 8, dtype=torch.float64), draw(30, 8, dtype=torch.float64)
    v = torch.ones(30, 1, dtype=torch.float64, requires_grad=True)
    number = extra(score, 8, torch.float64)
    dropped = score(q, k, v, number, dropout=0.5)
    assert torch.equal(dropped.vitals.entropy, score(q, k, v, number).vitals.entropy)
    assert 0.8 < dropped.output.mean().item() < 1.2
    assert dropped.output.std().item() > 0.01
    dropped.output.sum().backward()  # linear in the value: Σ v · dv is the output's sum, if the same weights were dropped
    assert_float64((v * v.grad).sum(), dropped.output.sum())


@BOTH
def test_half_precision_is_rounded_once(score):
    """From the same bfloat16 numbers, float32 arithmetic and one rounding of the output."""
    q, k, v = (draw(2, 20, 16, dtype=torch.bfloat16) for _ in range(3))
    number = extra(score, 16)
    low, high = score(q, k, v, number), score(q.float(), k.float(), v.float(), number)
    assert low.output.dtype == torch.bfloat16
    assert torch.equal(low.output, high.output.bfloat16())
    for name in SIGNS:
        assert torch.equal(getattr(low.vitals, name), getattr(high.vitals, name)), name
