"""Masks of a class with __torch_function__: a CausalBias means the same as in torch's SDPA, any other is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import CausalBias, CausalVariant, causal_lower_right, causal_upper_left

import attemper
from attemper.errors import InputError
from judge import assert_as_exact

SIZES = [(5, 5), (4, 9), (9, 4), (1, 7), (33, 33)]


class Overrides(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


class Inherits(torch.Tensor):
    pass


def draw(rows, keys):
    return torch.randn(2, 4, rows, 8), torch.randn(2, 4, keys, 8), torch.randn(2, 4, keys, 6)


@pytest.fixture(params=[causal_upper_left, causal_lower_right])
def make(request):
    return request.param


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize(("rows", "keys"), SIZES)
def test_a_causal_bias_is_what_torch_makes_of_it(make, rows, keys):
    q, k, v = draw(rows, keys)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=make(rows, keys))
    exact = F.scaled_dot_product_attention(*(t.double() for t in (q, k, v)), attn_mask=make(rows, keys))
    assert_as_exact("output", attemper.sdpa(q, k, v, attn_mask=make(rows, keys)), [expected], exact, 1.0)
    corner = True if make is causal_upper_left or rows == keys else "lower_right"
    for found, same in (
        (attemper.attention(q, k, v, mask=make(rows, keys)), attemper.attention(q, k, v, causal=corner)),
        (attemper.cosine_attention(q, k, v, scale=3.0, mask=make(rows, keys)),
         attemper.cosine_attention(q, k, v, scale=3.0, causal=corner)),
    ):  # fmt: skip
        assert torch.equal(found.output, same.output)
        assert torch.equal(found.vitals.visible, same.vitals.visible)
    vitals = attemper.measure(q, k, mask=make(rows, keys), window=3)
    assert torch.equal(vitals.entropy, attemper.measure(q, k, causal=corner, window=3).entropy)
    assert torch.equal(attemper.weights(q, k, mask=make(rows, keys)), attemper.weights(q, k, causal=corner))
    assert attemper.kernels.why(q, k, v, mask=make(rows, keys))[0].taken


@pytest.mark.parametrize("outside", [True, False])
def test_a_causal_bias_in_a_compiled_function(make, outside):
    q, k, v = draw(4, 9)
    bias = make(4, 9)
    compiled = torch.compile(
        lambda q: attemper.sdpa(q, k, v, attn_mask=bias if outside else make(4, 9)), backend="eager"
    )
    assert torch.equal(compiled(q), attemper.sdpa(q, k, v, attn_mask=bias))


def test_what_a_bias_cannot_mean_is_refused():
    q, k, v = draw(4, 9)
    for call in (
        lambda: attemper.sdpa(q, k, v, attn_mask=causal_upper_left(4, 9), is_causal=True),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(4, 9), is_causal=True),
    ):
        with pytest.raises(ValueError, match="causal"):
            call()
    with pytest.raises(InputError, match=r"for 4 queries and 8 keys; got 4 and 9\. Use causal_lower_right\(4, 9\)"):
        attemper.attention(q, k, v, mask=causal_lower_right(4, 8))
    part = CausalBias(CausalVariant.UPPER_LEFT, 4, 9)[0]
    with pytest.raises(InputError, match="or the whole CausalBias"):
        attemper.attention(q, k, v, mask=part)


@pytest.mark.parametrize(
    ("like", "known"), [(nn.Parameter, True), (nn.Buffer, True), (Inherits, True), (Overrides, False)]
)
def test_only_a_class_that_overrides_torch_functions_is_refused(like, known):
    q, k, v = draw(4, 9)
    numbers = torch.randn(4, 9)
    mask = numbers.as_subclass(like) if issubclass(like, (Inherits, Overrides)) else like(numbers)
    calls = [
        lambda: attemper.sdpa(q, k, v, attn_mask=mask),
        lambda: attemper.attention(q, k, v, mask=mask).output,
        lambda: attemper.additive_attention(q, k, v, torch.ones(8), mask=mask).output,
        lambda: attemper.cosine_attention(q, k, v, scale=1.0, mask=mask).output,
        lambda: attemper.weights(q, k, mask=mask),
        lambda: attemper.measure(q, k, mask=mask).entropy,
        lambda: attemper.MultiHeadAttention(8, 2)(q[0, 0], k[0, 0], k[0, 0], attn_mask=mask)[0],
    ]
    for call in calls:
        if known:
            assert call().isfinite().all()
        else:
            with pytest.raises(InputError, match="must hold its values itself; got Overrides"):
                call()
    if known:
        assert torch.equal(calls[0](), attemper.sdpa(q, k, v, attn_mask=numbers))
        if like is nn.Parameter:
            calls[0]().sum().backward()
            assert mask.grad.shape == mask.shape
