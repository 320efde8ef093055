"""Gradients in half precision, judged by torch's math backend, which sums in float32 and rounds once, and by float64."""

import itertools
import math

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import make_tensor

import attemper
from attemper.kernels.contract import ARGMAX_BIT, BIT, OUTPUT_LOW_BIT
from attemper.kernels.reference import define
from attemper.operation.call import prepare
from attemper.operation.shapes import broadcast_like_torch
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


def floor(tensors, cotangent, causal):
    """The norm of each gradient's float32 rounding. With logits to ±200 a row has one key, and its gradient is nothing else."""
    wide = {name: t.double() for name, t in tensors.items()}
    mask = wide.pop("attn_mask", None)
    inputs = broadcast_like_torch("judge", *wide.values(), False)
    problem = prepare("judge", *inputs, mask=mask, causal=causal).problem
    exact = define(problem)
    mass = gradient_mass(problem, exact._asdict(), "output", cotangent.double().view(exact.output.shape))
    rounding = torch.finfo(torch.float32).eps * math.sqrt(exact.weights.numel())
    return {"attn_mask" if name == "mask" else name: rounding * size for name, size in mass.items()}


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
        least = floor(tensors, cotangent, causal)
        for name, error in errors(gradients(by_us, tensors, cotangent), exact).items():
            budget = 1.5 * theirs[name] + (least[name] / exact[name].norm()).item()
            assert error <= budget, (
                f"sample {number}, d({name}): {error:.2e} exceeds {budget:.2e}, torch {theirs[name]:.2e}"
            )


def shared(dtype, device, rows=64, keys=64, size=(5.0, 3.0)):
    """Keys and values with a large common part. It cancels from the gradients, as Σp = 1, but only if δ is exact."""
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
    for rows, keys in ((64, 64), (2, 700), (300, 900)):  # one tile; decode; several tiles
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
        # d(scale) is float32: its error comes from the sum of many terms, not from a half-precision dtype
        _, definition, problem = by_definition(tensors, {}, torch.float64)
        mass = gradient_mass(problem, definition, "output", cotangent.double())["scale"]
        rounding = torch.finfo(torch.float32).eps * mass
        assert_within("d(scale)", ours["scale"].float(), exact["scale"], plain["scale"], rounding)


@pytest.mark.parametrize("kernel", FUSED)
def test_low_bits_survive_fakes_vmap_and_compiled_graphs(device, kernel):
    """Without them a gradient would be as rough as that of a rounded output."""
    tensors = shared(torch.bfloat16, device, rows=300, keys=900)
    inputs, cotangent = tuple(tensors[name] for name in ("query", "key", "value")), torch.randn(300, 64, device=device)

    def loss(query, key, value):
        return (attemper.attention(query, key, value, kernel=kernel, signs=()).output.float() * cotangent).sum()

    leaves = [t.requires_grad_() for t in inputs]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    by_sample = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))(*inputs)
    for name, truth, gradient in zip(("query", "key", "value"), expected, by_sample, strict=True):
        # heads are spread over threads in another way, and dq is joined in another order, before it is rounded
        assert (gradient - truth).norm() <= torch.finfo(torch.bfloat16).eps * truth.norm(), name
    if kernel == FUSED[0]:  # one graph for all kernels: the op's
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)(*leaves)
        for name, truth, gradient in zip(
            ("query", "key", "value"), expected, torch.autograd.grad(compiled, leaves), strict=True
        ):
            assert torch.equal(gradient, truth), name

    problem = prepare("test", *inputs).problem
    bits = sum(BIT.values()) | ARGMAX_BIT | OUTPUT_LOW_BIT
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.attemper.forward.default, (*problem, bits, kernel), test_utils=checks)
    low = torch.ops.attemper.forward(*problem, bits, kernel)[1]
    assert low.shape == inputs[0].shape
    assert low.any()
    assert not torch.ops.attemper.forward(*problem, bits ^ OUTPUT_LOW_BIT, kernel)[1].numel()


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.parametrize("size", [1e-5, 3e-7])
def test_small_outputs_of_float16_carry_what_rounding_took(kernel, size, device):
    """Rounding to a subnormal loses more than 16 bits of a float32 can hold, unless the bits count in another unit."""
    torch.manual_seed(0)
    key = torch.randn(1, 1, 600, 16) + 5 * torch.randn(16)
    value = (torch.randn(1, 1, 600, 16) + 3 * torch.randn(16)) * size
    inputs = [t.to(device).half().requires_grad_() for t in (torch.randn(1, 1, 7, 16), key, value)]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    cotangent = torch.randn(1, 1, 7, 16).to(device).half()
    output = attemper.attention(*inputs, kernel=kernel, signs=()).output
    truth = attemper.attention(*exact, kernel="reference", signs=()).output
    (found,) = torch.autograd.grad((output * (cotangent * 1024)).sum(), inputs[:1])
    (expected,) = torch.autograd.grad((truth * (cotangent * 1024).double()).sum(), exact[:1])
    error = (found.double() - expected).norm() / expected.norm()
    floor = torch.finfo(torch.float16).tiny * torch.finfo(torch.float16).eps * expected.numel() ** 0.5 / expected.norm()
    assert error <= 1.5 * (torch.finfo(torch.float16).eps / 2 + floor)
