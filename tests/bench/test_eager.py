"""The bench's rivals are right: eager attention and eager statistics against the definition in float64."""

import pytest
import torch
from torch.autograd import grad

import attemper
from attemper_lab.bench import eager
from close import assert_float64
from judge import SIGNS, assert_within

INPUTS = {
    "normal": (1.0, 0.0),
    "far from zero": (1.0, 100.0),  # logits near 400 that differ by 1: what a naive variance loses
    "saturated": (40.0, 0.0),
}


def draw(kind: str = "normal", dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    gain, offset = INPUTS[kind]
    query, key, value = torch.randn(3, 2, 3, 111, 24, dtype=torch.float64)
    return [t.to(dtype) for t in (gain * query, key + offset, value)]


def defined(tensors: list[torch.Tensor], causal: bool, dtype: torch.dtype = torch.float64) -> attemper.Attended:
    return attemper.attention(*(t.to(dtype) for t in tensors), causal=causal, kernel="reference")


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tracked", [False, True], ids=["inference", "training"])
def test_statistics_are_as_exact_as_the_definition_in_the_same_dtype(kind, causal, dtype, tracked):
    tensors = draw(kind, dtype)
    exact, plain = defined(tensors, causal), defined(tensors, causal, torch.float32)
    output, vitals = eager.with_statistics(*(t.requires_grad_(tracked) for t in tensors), causal=causal)
    # the output weighs values by exp of rounded logits, and entropy is a difference of terms as large as lse
    size = torch.finfo(dtype).eps * exact.vitals.lse.abs().max().item()
    assert_within("output", output, exact.output, plain.output, size)
    assert torch.equal(vitals.visible, exact.vitals.visible)
    for name in SIGNS:
        assert_within(name, *(getattr(v, name) for v in (vitals, exact.vitals, plain.vitals)), size)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sign", ["output", *SIGNS])
def test_every_sign_has_its_gradient(sign, causal):
    tensors = [t.requires_grad_() for t in draw()]

    def gradients(attended):
        result = attended.output if sign == "output" else getattr(attended.vitals, sign)
        weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape)
        return grad((result * weights).sum(), tensors, allow_unused=True, materialize_grads=True)

    found = gradients(eager.with_statistics(*tensors, causal=causal))
    for actual, expected in zip(found, gradients(defined(tensors, causal)), strict=True):
        assert_float64(actual, expected)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("tracked", [False, True], ids=["inference", "training"])
def test_plain_eager_is_attention(causal, tracked):
    tensors = [t.requires_grad_(tracked) for t in draw()]
    output = eager.attention(*tensors, causal=causal)
    expected = defined(tensors, causal).output
    assert_float64(output, expected)
    if tracked:
        for pair in zip(grad(output.sum(), tensors), grad(expected.sum(), tensors), strict=True):
            assert_float64(*pair)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_half_precision_is_measured_in_float32(causal):
    tensors = draw(dtype=torch.float16)
    exact = defined(tensors, causal)
    output, vitals = eager.with_statistics(*tensors, causal=causal)
    assert output.dtype == torch.float16
    assert (output - exact.output).abs().max() < 4e-3
    for name in SIGNS:
        sign = getattr(vitals, name)
        assert sign.dtype == torch.float32
        # the logits themselves are products rounded to float16
        assert (sign - getattr(exact.vitals, name)).abs().max() < 8e-3, name


def test_inputs_are_left_alone():
    tensors = draw()
    kept = [t.clone() for t in tensors]
    eager.attention(*tensors, causal=True)
    eager.with_statistics(*tensors, causal=True)
    assert all(map(torch.equal, tensors, kept))
