"""Gradients against finite differences in float64: of the reference with every feature, of the fused kernels with all at once."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import attemper
from close import assert_float64
from serving import ON_CPU

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "lower_right_window": {"causal": "lower_right", "window": 3},
    "softcap": {"softcap": 1.5},
    "bool": {"mask": torch.tensor([True, True, False, True, True])},
}


def leaves(additive: bool = False):
    draw = torch.Generator().manual_seed(3)
    shapes = {"query": (1, 4, 3, 4), "key": (1, 2, 5, 4), "value": (1, 2, 5, 3), "scale": (4,)}
    if additive:
        shapes["mask"] = (1, 4, 1, 5)
    return [torch.randn(s, generator=draw, dtype=torch.float64).mul_(0.7).requires_grad_() for s in shapes.values()]


def everything(kernel, options):
    def run(query, key, value, scale, mask=None):
        extra = {"mask": mask} if mask is not None else {}
        output, vitals = attemper.attention(query, key, value, scale=scale, kernel=kernel, **extra, **options)
        return (output, *(getattr(vitals, name) for name in vitals.measured if name != "visible"))

    return run


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_first_derivatives_of_the_reference(options):
    assert gradcheck(everything("reference", options), leaves())


@pytest.mark.parametrize("kernel", ON_CPU)
def test_first_derivatives_with_an_additive_mask(kernel):
    """The others are compared with the reference, feature by feature, in tests/kernels/test_agreement.py."""
    options = {"softcap": 2.0, "causal": "lower_right", "window": 4}
    assert gradcheck(everything(kernel, options), leaves(additive=True))


def test_second_derivatives_of_the_reference():
    assert gradgradcheck(everything("reference", {"causal": "lower_right"}), leaves())


@pytest.mark.parametrize("kernel", ON_CPU)
def test_measure_has_the_gradients_of_attention(kernel):
    query, key, value, scale = leaves()
    with_values = attemper.attention(query, key, value, scale=scale, kernel=kernel).vitals
    without = attemper.measure(query, key, scale=scale, kernel=kernel)
    for name in without.measured:
        if name == "visible":
            continue
        expected = torch.autograd.grad(getattr(with_values, name).sum(), (query, key, scale), retain_graph=True)
        actual = torch.autograd.grad(getattr(without, name).sum(), (query, key, scale), retain_graph=True)
        for a, b in zip(actual, expected, strict=True):
            assert_float64(a, b)
