"""Gradients in half precision, judged by torch's math backend, which sums in float32 and rounds once, and by float64."""

import itertools

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import make_tensor

import attemper
from judge import assert_within, by_definition
from rounding import gradient_mass
from serving import FUSED

HALVES = (torch.float16, torch.bfloat16)


def by_torch(*inputs, attn_mask=None, **options):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(*inputs, attn_mask=attn_mask, **options)


def gradients(run, tensors, cotangent, dtype=None):
    """The gradients of Σ cotangent · output, in double; everything in `dtype`, or as it comes."""
    leaves = {name: t.to(dtype or t.dtype).detach().requires_grad_() for name, t in tensors.items()}
    output = run(**leaves)
    found = torch.autograd.grad(output, list(leaves.values()), cotangent.to(output.dtype))
    return {name: grad.double() for name, grad in zip(leaves, found, strict=True)}


def errors(found, exact):
    return {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}


def samples(device, dtype):
    """The inputs without dropout that torch's own tests draw for this function (OpInfo), 13 of them."""
    batch, heads, rows, keys, dim = 4, 4, 3, 6, 8
    shapes = [
        ((batch, rows, dim), (batch, keys, dim)),
        ((batch, heads, rows, dim), (batch, heads, keys, dim)),
        ((heads, rows, dim), (batch, heads, keys, dim)),
    ]
    draws = [(*both, causal, None) for both, causal, _ in itertools.product(shapes, (True, False), range(2))]
    for query, key, causal, mask in [*draws, (*shapes[1], False, (rows, keys))]:
        of = {"query": query, "key": key, "value": key} | ({"attn_mask": mask} if mask else {})
        yield {name: make_tensor(shape, device=device, dtype=dtype) for name, shape in of.items()}, causal


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_samples_of_torch(device, dtype):
    for number, (tensors, causal) in enumerate(samples(device, dtype)):
        lead = torch.broadcast_shapes(tensors["query"].shape[:-2], tensors["key"].shape[:-2])
        cotangent = make_tensor((*lead, *tensors["query"].shape[-2:]), device=device, dtype=dtype)

        def by_us(query, key, value, attn_mask=None, causal=causal):
            return attemper.sdpa(query, key, value, attn_mask, is_causal=causal)

        def by_them(query, key, value, attn_mask=None, causal=causal):
            return by_torch(query, key, value, attn_mask=attn_mask, is_causal=causal)

        exact = gradients(by_them, tensors, cotangent, torch.float64)
        theirs = errors(gradients(by_them, tensors, cotangent), exact)
        for name, error in errors(gradients(by_us, tensors, cotangent), exact).items():
            assert error <= 1.5 * theirs[name], f"sample {number}, d({name}): {error:.2e}, torch {theirs[name]:.2e}"


def shared(dtype, device, rows=64, keys=64, size=(5.0, 3.0)):
    """Keys and values that share a large part: what the weights multiply it by is Σp = 1, and cancels only if δ is exact."""
    heads, dim = 4, 64
    draw = {name: torch.randn(2, heads, n, dim) for name, n in (("query", rows), ("key", keys), ("value", keys))}
    for name, part in zip(("key", "value"), size, strict=True):
        draw[name] += part * torch.randn(1, heads, 1, dim)
    return {name: t.to(device, dtype) for name, t in draw.items()} | {
        "scale": torch.full((heads,), 0.125, device=device)
    }


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kernel", FUSED)
def test_keys_and_values_that_share_a_part(device, kernel, dtype):
    for rows, keys in ((64, 64), (2, 700)):  # strips and tiles; decode
        tensors = shared(dtype, device, rows, keys)
        cotangent = torch.randn(tensors["query"].shape, device=device).to(dtype)

        def by_us(query, key, value, scale):
            return attemper.attention(query, key, value, scale=scale, kernel=kernel, signs=()).output

        def by_them(query, key, value, scale):
            return (query @ key.mT * scale.view(-1, 1, 1)).softmax(-1) @ value

        exact = gradients(by_them, tensors, cotangent, torch.float64)
        plain = gradients(by_them, tensors, cotangent, torch.float32)
        theirs = errors({name: g.to(tensors[name].dtype).double() for name, g in plain.items()}, exact)
        ours = gradients(by_us, tensors, cotangent)
        for name, error in errors(ours, exact).items():
            if name != "scale":
                assert error <= 1.5 * theirs[name], f"{rows} rows, d({name}): {error:.2e}, torch {theirs[name]:.2e}"
        # float32, and so rounded by its many terms and not by its dtype
        _, definition, problem = by_definition(tensors, {}, torch.float64)
        mass = gradient_mass(problem, definition, "output", cotangent.double())["scale"]
        rounding = torch.finfo(torch.float32).eps * mass
        assert_within("d(scale)", ours["scale"].float(), exact["scale"], plain["scale"], rounding)
