"""Where kernels break: empty and single rows, odd strides, huge and constant logits, NaN and inf, every mask shape, dropout."""

import itertools
import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import attemper
from close import assert_float64, assert_reordered
from judge import SIGNS, assert_values, assert_within, by_definition, judge
from rounding import sign_mass
from serving import FUSED, fused

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.parametrize("kernel", FUSED)]


def draw(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape).to(device, dtype)


@pytest.mark.parametrize("around", [nullcontext, partial(FlopCounterMode, display=False)], ids=["plain", "mode"])
@pytest.mark.parametrize(
    "shape",
    [(0, 2, 3, 3, 8), (1, 0, 3, 3, 8), (1, 2, 0, 3, 8), (1, 2, 3, 0, 8), (1, 2, 3, 3, 0), (0, 2, 3, 9000, 8), (0,) * 5],
)
def test_empty_sizes(kernel, device, shape, around):
    """Also under a dispatch mode, where the call is an op, which gives its backward no empty tensors."""
    b, h, lq, lk, dim = shape
    q, k, v = (draw(b, h, *size, device=device).requires_grad_() for size in ((lq, 8), (lk, 8), (lk, dim)))
    with around():
        output, vitals = attemper.attention(q, k, v, kernel=kernel)
    assert output.shape == (b, h, lq, dim)
    assert not output.any()
    for name in vitals.measured:
        assert getattr(vitals, name).shape == (b, h, lq)
    if lk == 0:
        assert (vitals.visible == 0).all()
        assert (vitals.lse == -math.inf).all()
        assert not vitals.variance.any()
    (output.sum() + vitals.entropy.sum() + vitals.mean.sum()).backward()
    for t in (q, k, v):
        assert t.grad.shape == t.shape
        assert dim == 0 or not t.grad.any()


def widest(kernel):
    """Float64, in which layouts and dropout are compared; float32 for a kernel that does not serve it."""
    return torch.float64 if kernel in fused(torch.float64) else torch.float32


def assert_same(found, exact, terms):
    """Of a float64 computation in another order; of a float32 one, sums of so many terms."""
    if found.dtype == torch.float64:
        assert_float64(found, exact)
    else:
        assert_reordered(found, exact.to(found.dtype), terms)


@pytest.mark.parametrize("dims", [2, 3, 4, 5, 6])
def test_any_number_of_dimensions(kernel, device, dims):
    lead = (2, 3, 2, 2)[: dims - 2]
    q, k, v = (draw(*lead, n, dim, dtype=widest(kernel), device=device) for n, dim in ((5, 8), (7, 8), (7, 4)))
    output, vitals = attemper.attention(q, k, v, kernel=kernel)
    assert_same(output, F.scaled_dot_product_attention(q.double(), k.double(), v.double()), terms=7 * 8)
    assert vitals.entropy.shape == (*lead, 5)


def test_any_strides(kernel, device):
    """Transposed, sliced, expanded and negative-step-like views are read as well as their contiguous copies."""
    base = draw(2, 9, 3, 16, device=device)
    query = base.transpose(1, 2)[..., ::2]  # (2, 3, 9, 8), no dimension contiguous
    key = draw(1, 1, 11, 8, device=device).expand(2, 3, 11, 8)
    value = draw(3, 11, 6, 2, device=device).permute(3, 0, 1, 2).flip(-1)
    mask = (draw(11, 9, device=device) > 0).t()
    loose = attemper.attention(query, key, value, mask=mask, kernel=kernel)
    tight = attemper.attention(*(t.contiguous() for t in (query, key, value)), mask=mask.contiguous(), kernel=kernel)
    tensors = {"query": query, "key": key, "value": value, "mask": mask}
    exact, plain = (by_definition(tensors, {}, dtype) for dtype in (torch.float64, torch.float32))
    mass = sign_mass(exact[2], exact[1])
    for output, vitals in (loose, tight):
        found = {"output": output, **{name: getattr(vitals, name) for name in vitals.measured}}
        assert_values(found, exact[1], plain[1], mass)


@pytest.mark.parametrize("scale", ["number", "scalar", "one", "heads", "per_head", "rows", "zero", "negative"])
def test_every_kind_of_scale(kernel, device, scale):
    tensors = {name: draw(2, 3, 6, 8, device=device) for name in ("query", "key", "value")}
    shapes = {"scalar": (), "one": (1,), "heads": (3,), "per_head": (3, 1, 1), "rows": (2, 1, 6, 1)}
    options = {"number": {"scale": 0.7}, "zero": {"scale": 0.0}, "negative": {"scale": -0.5}}.get(scale, {})
    if scale in shapes:
        tensors["scale"] = draw(*shapes[scale], device=device)
    judge(tensors, options, kernel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_with_weights_and_no_key_that_counts(kernel, device, dtype):
    """A bias of -20,000 at every key: they share the weight, and none is visible. The mean of no logits has no gradient."""
    query, key, value = (draw(1, 2, n, 16, dtype=dtype, device=device) for n in (9, 20, 20))
    mask = torch.zeros(1, 1, 9, 20, dtype=dtype, device=device)
    mask[..., :5, :] = -2e4
    tensors = {"query": query, "key": key + 4.0, "value": value, "mask": mask}
    judge(tensors, {}, kernel, losses=("output", "mean", "variance"))


@pytest.mark.parametrize("size", [30.0, 1e4])
def test_huge_logits(kernel, device, size):
    """Rows that are nearly one-hot, with logits to ±1e4: nothing overflows, nothing is lost."""
    tensors = {"query": draw(1, 2, 65, 8, device=device), "key": draw(1, 2, 700, 8, device=device)}
    tensors["value"] = draw(1, 2, 700, 8, device=device)
    z = tensors["query"].double() @ tensors["key"].double().mT
    judge(tensors, {"scale": size / z.abs().max().item()}, kernel)


def test_a_late_giant_raises_the_reference(kernel, device):
    """The largest logit arrives in the last tile, far above all that came before it; and the first tile holds nothing at all."""
    query, key, value = (draw(1, 1, n, 8, device=device) for n in (3, 1500, 1500))
    key[..., -1, :] = 40 * query[..., 0, :]
    mask = torch.ones(3, 1500, dtype=torch.bool, device=device)
    mask[1, :1400] = False
    tensors = {"query": query, "key": key - 3, "value": value, "mask": mask}
    judge(tensors, {}, kernel)


def test_logits_far_from_zero_keep_their_variance(kernel, device):
    """A constant added to every logit must not eat the variance: 1 around 1000."""
    tensors = {name: draw(1, 1, n, 16, device=device) for name, n in (("query", 40), ("key", 600), ("value", 600))}
    tensors["mask"] = torch.full((40, 600), 1000.0, device=device)
    judge(tensors, {}, kernel)
    judge(tensors, {"causal": True}, kernel)


def test_constant_rows(kernel, device):
    """Equal keys: entropy ln n, variance 0, sum_p2 1/n, top weight 1/n; one key: entropy 0."""
    query, key = draw(1, 1, 5, 8, device=device), draw(1, 1, 1, 8, device=device).expand(1, 1, 777, 8)
    for dtype in dict.fromkeys((torch.float32, widest(kernel))):
        q, k = query.to(dtype), key.to(dtype)
        vitals = attemper.attention(q, k, k, kernel=kernel).vitals
        for name, closed in (("entropy", math.log(777)), ("sum_p2", 1 / 777), ("top_weight", 1 / 777)):
            assert_reordered(getattr(vitals, name) / closed, torch.ones_like(vitals.sum_p2), 777, name)
        assert vitals.variance.max() <= 777 * torch.finfo(q.dtype).eps ** 2 * vitals.peak.abs().max() ** 2
    one = attemper.attention(draw(1, 1, 5, 8, device=device), key[..., :1, :], key[..., :1, :], kernel=kernel).vitals
    assert one.entropy.abs().max() == 0
    assert (one.sum_p2 == 1).all()
    assert (one.jacobian_trace == 0).all()


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_flow_as_in_torch(kernel, device, what, poison):
    """torch's math backend is the yardstick: its fused CPU kernel turns a NaN query into zeros."""
    tensors = {name: draw(1, 1, n, 8, device=device) for name, n in (("query", 5), ("key", 6), ("value", 6))}
    tensors["key"][0, 0, :2, 0] = torch.tensor([1.0, -1.0])  # so that an infinite query has logits of both signs
    tensors[what][0, 0, 2, 0] = poison
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*tensors.values())
    output, vitals = attemper.attention(*tensors.values(), kernel=kernel)
    assert torch.equal(output.isnan(), expected.isnan())
    assert torch.equal(output.isinf(), expected.isinf())
    if what == "query":
        assert vitals.entropy[0, 0, 2].isnan()
        assert vitals.entropy[0, 0, 3].isfinite()


@pytest.mark.parametrize("keys", [6, 900])
def test_a_score_of_minus_inf_is_counted_and_adds_nothing(kernel, device, keys):
    """From an infinite key; the definition's mean and variance are of the other logits, over all that are seen."""
    query, key, value = (draw(1, 2, n, 8, device=device).abs() for n in (5, keys, keys))
    key[0, :, 2, 0] = -math.inf
    for mask in (None, torch.rand(keys, device=device) > 0.3):
        tensors = [t.clone().requires_grad_() for t in (query, key, value)]
        vitals = attemper.attention(*tensors, mask=mask, kernel=kernel).vitals
        wide = [t.double() for t in (query, key, value)]
        exact = attemper.attention(*wide, mask=mask, kernel="reference").vitals
        plain = attemper.attention(query, key, value, mask=mask, kernel="reference").vitals
        assert torch.equal(vitals.visible, exact.visible)
        named = dict(zip(("query", "key", "value"), (query, key.nan_to_num(neginf=0.0), value), strict=True))
        _, definition, problem = by_definition(named | ({} if mask is None else {"mask": mask}), {}, torch.float64)
        mass = sign_mass(problem, definition)
        for name in ("mean", "variance"):
            rounding = torch.finfo(torch.float32).eps * mass[name]
            assert_within(name, getattr(vitals, name), getattr(exact, name), getattr(plain, name), rounding)
        (grad,) = torch.autograd.grad((vitals.mean + vitals.variance).sum(), tensors[1])
        assert not grad[0, :, 2].any()  # neither depends on that key


@pytest.mark.parametrize(("size", "cap"), [(100.0, 30.0), (300.0, 50.0)])
def test_the_slope_of_a_softcap_keeps_its_digits(kernel, device, size, cap):
    """Scores several caps large, where 1 - tanh² is a difference of almost equal numbers."""
    query, key, value, cotangent = (draw(2, 2, 70, 16, device=device) for _ in range(4))

    def plain(q, k, v):
        return (cap * torch.tanh(q @ k.mT / 4 / cap)).softmax(-1) @ v

    def ours(q, k, v):
        return attemper.attention(q, k, v, softcap=cap, signs=(), kernel=kernel).output

    def gradients(run, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (query * size, key, value)]
        return torch.autograd.grad(run(*leaves), leaves[:2], cotangent.to(dtype))

    exact, found = gradients(plain, torch.float64), [gradients(run, torch.float32) for run in (ours, plain)]
    for name, truth, us, them in zip(("query", "key"), exact, *found, strict=True):
        errors = [(t.double() - truth).norm().item() for t in (us, them)]
        assert errors[0] <= 1.5 * errors[1], f"d({name}): {errors[0]:.2e}, plain {errors[1]:.2e}"


def test_nan_in_the_future_does_not_reach_the_past(kernel, device):
    query, key, value = (draw(1, 1, 6, 8, device=device) for _ in range(3))
    key[0, 0, 4] = math.nan
    output, vitals = attemper.attention(query, key, value, causal=True, kernel=kernel)
    assert output[0, 0, :4].isfinite().all()
    assert output[0, 0, 4:].isnan().all()
    for name in SIGNS:
        assert getattr(vitals, name)[0, 0, :4].isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [False, True])
def test_asking_for_vitals_changes_no_bit_of_the_output(kernel, device, dtype, causal):
    if kernel not in fused(dtype):
        pytest.skip(f"does not apply: {kernel} does not serve {dtype}")
    q, k, v = (draw(2, 4, n, 16, dtype=dtype, device=device) for n in (70, 600, 600))
    bare = attemper.attention(q, k, v, causal=causal, signs=(), kernel=kernel).output
    assert bare.dtype == dtype
    for signs in ["all", *itertools.combinations(("variance", "entropy", "sum_p2", "peak", "visible"), 2)]:
        assert torch.equal(attemper.attention(q, k, v, causal=causal, signs=signs, kernel=kernel).output, bare)


@pytest.mark.parametrize(
    "signs", [("variance",), ("mean", "sum_p2"), ("visible",), ("entropy",), ("peak", "lse")], ids=str
)
@pytest.mark.parametrize("masked", [False, True])
def test_a_subset_of_signs_has_the_values_of_all(kernel, device, signs, masked):
    q, k, v = (draw(2, 4, n, 16, device=device).requires_grad_() for n in (70, 600, 600))
    options = {"mask": torch.rand(2, 1, 1, 600, device=device) > 0.3} if masked else {"causal": True}
    every = attemper.attention(q, k, v, **options, kernel=kernel).vitals
    some = attemper.attention(q, k, v, **options, signs=signs, kernel=kernel).vitals
    alone = attemper.measure(q, k, **options, signs=signs, kernel=kernel)
    assert some.measured == alone.measured == tuple(n for n in every.measured if n in signs)
    for name in signs:
        assert torch.equal(getattr(some, name), getattr(every, name)), name
        assert torch.equal(getattr(alone, name), getattr(every, name)), name
        if name != "visible":
            expected = torch.autograd.grad(getattr(every, name).sum(), (q, k), retain_graph=True)
            actual = torch.autograd.grad(getattr(some, name).sum(), (q, k), retain_graph=True)
            for a, b in zip(actual, expected, strict=True):
                assert torch.equal(a, b), name


class TestDropout:
    """Law, not bits: with values = identity the output is the dropped weights themselves."""

    def weights(self, kernel, device, p, n=64, **options):
        q, k = (draw(2, 3, n, 8, dtype=widest(kernel), device=device) for _ in range(2))
        eye = torch.eye(n, dtype=widest(kernel), device=device).expand(2, 3, n, n)
        return attemper.attention(q, k, eye, dropout=p, kernel=kernel, **options).output, q, k

    def test_keeps_and_scales(self, kernel, device):
        dropped, q, k = self.weights(kernel, device, 0.25)
        weights = (q.double() @ k.double().mT / math.sqrt(8)).softmax(-1)
        kept = dropped != 0
        assert_same(dropped[kept], weights[kept] / 0.75, terms=64 * 8)
        # 24,576 coins: three standard deviations
        assert abs(kept.float().mean().item() - 0.75) < 3 * math.sqrt(0.25 * 0.75 / kept.numel())

    def test_rows_heads_and_calls_differ_and_a_seed_repeats(self, kernel, device):
        torch.manual_seed(5)
        first = self.weights(kernel, device, 0.5)[0]
        second = self.weights(kernel, device, 0.5)[0]
        torch.manual_seed(5)
        again = self.weights(kernel, device, 0.5)[0]
        assert torch.equal(first, again)
        assert not torch.equal(first != 0, second != 0)
        pattern = (first != 0).flatten(0, 1)
        assert not torch.equal(pattern[0], pattern[1])
        assert not torch.equal(pattern[:, 0], pattern[:, 1])

    def test_backward_drops_what_forward_dropped(self, kernel, device):
        dtype = widest(kernel)
        n = (
            600 if dtype == torch.float64 else 250
        )  # several tiles; and values of n numbers, which have a limit on a GPU
        q, k = (draw(1, 2, n, 8, device=device).to(dtype) for _ in range(2))
        eye = torch.eye(n, device=device, dtype=dtype).expand(1, 2, n, n)
        torch.manual_seed(1)
        kept = attemper.attention(q, k, eye, dropout=0.3, causal=True, kernel=kernel).output != 0
        leaves = [t.clone().requires_grad_() for t in (q, k, torch.randn(1, 2, n, n, dtype=dtype, device=device))]
        torch.manual_seed(1)
        output, vitals = attemper.attention(*leaves, dropout=0.3, causal=True, kernel=kernel)
        exact = [t.detach().double().requires_grad_() for t in leaves]
        z = (exact[0] @ exact[1].mT / math.sqrt(8)).masked_fill(
            torch.ones(n, n, device=device).triu(1).bool(), -math.inf
        )
        expected = (z.softmax(-1) * kept / 0.7) @ exact[2]
        assert_same(output, expected, terms=n * n)
        cotangent = torch.randn_like(output)
        loss, judge_loss = (output * cotangent).sum() + vitals.sum_p2.sum(), (expected * cotangent).sum()
        judge_loss = judge_loss + z.softmax(-1).square().sum()
        for a, b in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(judge_loss, exact), strict=True):
            assert_same(a, b, terms=n * n)

    def test_all_or_nothing(self, kernel, device):
        assert not self.weights(kernel, device, 1.0)[0].any()
        vitals_with = attemper.attention(*(draw(1, 1, 4, 4) for _ in range(3)), dropout=1.0, kernel="reference").vitals
        assert (vitals_with.entropy > 0).all()  # vitals precede dropout
