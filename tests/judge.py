"""The judge: float64 decides, and a kernel may err twice as much as plain PyTorch does in the same dtype (plus rounding).

The output is measured against PyTorch in the inputs' own dtype; vitals and all gradients against float32 arithmetic on those
inputs, the gradients rounded once, as torch's math backend has them. Nothing judges float64 itself: there PyTorch's error is
taken to be its float32 error, smaller by the ratio of the two epsilons, and the definition, which is PyTorch too, may have erred
once as well.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import attemper
from attemper.kernels.contract import Problem, measuring_dtype
from attemper.kernels.reference import define
from attemper.operation.call import prepare
from native import variant
from rounding import gradient_mass, reference_mass, sign_mass

SIGNS = ("mean", "variance", "peak", "lse", "entropy", "sum_p2")
LEAVES = ("query", "key", "value", "mask", "scale")


def assert_within(name: str, actual: Tensor, exact: Tensor, plain: Tensor, rounding: float = 0.0) -> None:
    """Error against float64 must stay within 2 × (plain PyTorch's error + rounding)."""
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    actual64, plain64 = actual.detach().double(), plain.detach().double()
    finite = exact.isfinite()
    same = actual64[~finite].nan_to_num(nan=7.0) == exact[~finite].nan_to_num(nan=7.0)
    assert same.all(), f"{name}: infinities differ"
    if not finite.any():
        return
    error = (actual64 - exact)[finite].abs()
    assert error.isfinite().all(), f"{name}: not finite where the definition is"
    eps = torch.finfo(actual.dtype).eps
    shrink, times = (eps / torch.finfo(torch.float32).eps, 3) if actual.dtype == torch.float64 else (1.0, 2)
    yardstick = (plain64 - exact)[finite].abs().max().item() * shrink
    budget = times * (yardstick + eps * exact[finite].abs().max().item() + rounding)
    assert error.max().item() <= budget, f"{name}: error {error.max():.2e} exceeds {budget:.2e} (plain {yardstick:.2e})"


def assert_as_exact(name: str, ours: Tensor, plain: list[Tensor], exact: Tensor, scale: float = 0.0) -> None:
    """What whole models compute: root-mean-square errors, since the largest is one number's luck, grown by layers behind it.

    `plain` holds what PyTorch computes, by each way it has; `scale` is the size of what may have cancelled.
    """

    def rms(tensor: Tensor) -> float:
        return tensor.detach().double().square().mean().sqrt().item()

    error, yardstick = rms(ours - exact), max(rms(tensor - exact) for tensor in plain)
    budget = 2 * (yardstick + torch.finfo(ours.dtype).eps * max(rms(exact), scale))
    assert error <= budget, f"{name}: error {error:.2e} exceeds {budget:.2e} (plain {yardstick:.2e})"


def by_definition(tensors: dict[str, Tensor], options: dict, dtype: torch.dtype) -> tuple[dict, dict, Problem]:
    """Leaves and results of the definition computed in `dtype`, and the problem it solved."""
    leaves = {n: t.to(dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
    for leaf in leaves.values():
        leaf.requires_grad_(leaf.is_floating_point())
    positional = [leaves[n] for n in ("query", "key", "value")]
    extra = {n: leaves[n] for n in ("mask", "scale", "sink") if n in leaves}
    problem = prepare("judge", *positional, **extra, **options).problem
    if problem.gain is not None:
        problem = problem._replace(gain=problem.gain.to(dtype))
    with warnings.catch_warnings():
        # torch's own bfloat16 products of awkward size say so when they fall back
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        return leaves, define(problem)._asdict(), problem


def by_kernel(tensors: dict[str, Tensor], options: dict, way: str) -> tuple[dict, dict]:
    """Leaves and results of a kernel, through the public function. "cpu:avx2" is a variant of the native one."""
    leaves = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    positional = [leaves[n] for n in ("query", "key", "value")]
    extra = {n: leaves[n] for n in ("mask", "scale", "sink") if n in leaves}
    kernel = way.partition(":")[0]
    output, vitals = attemper.attention(*positional, **extra, **options, kernel=kernel)
    return leaves, {"output": output, **{n: getattr(vitals, n) for n in vitals.measured}}


def gradients(leaves: dict, results: dict, cotangents: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of Σ cotangent · result over the named results; -inf entries (empty rows) take no part."""
    loss = 0.0
    for name, cotangent in cotangents.items():
        result = results[name]
        loss = loss + (result.masked_fill(~result.isfinite(), 0.0) * cotangent.to(result.dtype)).sum()
    wanted = {n: t for n, t in leaves.items() if t.requires_grad}
    found = torch.autograd.grad(loss, list(wanted.values()), retain_graph=True, allow_unused=True)
    return {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(wanted.items(), found, strict=True)}


def judge(tensors: dict[str, Tensor], options: dict, *ways: str, losses: tuple[str, ...] = ("output", *SIGNS)) -> None:
    """Compare output, every vital and every gradient of kernels with the definition in float64, which is computed once for all.

    A way is a kernel, or a variant of the native one, as "cpu:avx2". `losses` are those whose gradients are compared.
    """
    dtype = tensors["query"].dtype
    wide = measuring_dtype(dtype)
    eps = torch.finfo(wide).eps
    exact_leaves, exact, problem = by_definition(tensors, options, torch.float64)
    wide_leaves, wide_plain, _ = by_definition(tensors, options, torch.float32)
    plain = wide_plain if wide == dtype else by_definition(tensors, options, dtype)[1]
    found = {}
    for way in ways:
        with variant(way.partition(":")[2]):
            found[way] = by_kernel(tensors, options, way)

    mass = sign_mass(problem, exact)
    for way, (_, actual) in found.items():
        with blaming(way):
            far = reference_mass(exact) if wide != dtype and way == "triton" else 0.0
            allowed = mass | {"mean": mass["mean"] + far}
            assert_values(actual, exact, wide_plain | {"output": plain["output"]}, allowed)

    for loss in losses:
        cotangent = torch.randn_like(exact[loss])
        if loss == "peak":
            cotangent = cotangent * _clear_winner(exact)
        if loss == "output":
            cotangent = cotangent.to(dtype).double()  # what arrives is the same for all
        exact_grads = gradients(exact_leaves, exact, {loss: cotangent})
        plain_grads = gradients(wide_leaves, wide_plain, {loss: cotangent})
        moved = gradient_mass(problem, exact, loss, cotangent)
        for way, (leaves, actual) in found.items():
            with blaming(way), variant(way.partition(":")[2]):
                for name, grad in gradients(leaves, actual, {loss: cotangent}).items():
                    once = plain_grads[name].to(grad.dtype)
                    assert_within(f"d({loss})/d({name})", grad, exact_grads[name], once, eps * moved[name])


def assert_values(actual: dict, exact: dict, plain: dict, mass: dict[str, float]) -> None:
    """Output and every vital of a kernel; `mass` is what one rounding of every logit moves, in units of epsilon."""
    assert torch.equal(actual["visible"], exact["visible"]), "visible differs"
    wide = measuring_dtype(actual["output"].dtype)
    for name in ("output", *SIGNS):
        assert name == "output" or actual[name].dtype == wide, f"{name} must be {wide}"
        assert_within(name, actual[name], exact[name].detach(), plain[name], torch.finfo(wide).eps * mass[name])


@contextmanager
def blaming(way: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{way}: {error}") from None


def error_ratios(tensors: dict[str, Tensor], options: dict, kernel: str) -> dict[str, float]:
    """Root-mean-square error of a kernel over that of plain PyTorch, for every value and gradient; float32 inputs."""
    exact_leaves, exact, _ = by_definition(tensors, options, torch.float64)
    plain_leaves, plain, _ = by_definition(tensors, options, torch.float32)
    leaves, actual = by_kernel(tensors, options, kernel)
    found = {}

    def compare(name: str, ours: Tensor, theirs: Tensor, truth: Tensor) -> None:
        finite = truth.isfinite()
        errors = [(t.detach().double() - truth)[finite].square().mean().sqrt().item() for t in (ours, theirs)]
        if errors[1] > 0:
            found[name] = errors[0] / errors[1]

    for loss in ("output", *SIGNS):
        compare(loss, actual[loss], plain[loss], exact[loss].detach())
        cotangent = torch.randn_like(exact[loss]) * (_clear_winner(exact) if loss == "peak" else 1.0)
        each = [
            gradients(*pair, {loss: cotangent})
            for pair in ((leaves, actual), (plain_leaves, plain), (exact_leaves, exact))
        ]
        for name in each[0]:
            compare(f"d({loss})/d({name})", *(grads[name] for grads in each))
    return found


def _clear_winner(exact: dict) -> Tensor:
    """1 where a row's largest logit leads by more than rounding; elsewhere the arg-max is nobody's to name."""
    top = exact["weights"].detach().topk(min(2, exact["weights"].shape[-1])).values
    if top.shape[-1] < 2:
        return torch.ones(exact["peak"].shape, dtype=torch.float64, device=top.device)
    gap = top[..., 0].log() - top[..., 1].clamp(min=1e-300).log()
    return (gap > 1e-4).double()
