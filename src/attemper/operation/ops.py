"""The operation for torch: two opaque ops with fakes, and the autograd Function around them.

`_Attention` gives the first derivative, vmap by joining with the batch, and an error for any other derivative; the same rules are
registered on the bare op. Additive scores are the same op with a `weight`. Kernels are imported when an op runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from .._torch_private import _AutoDispatchBelowAutograd, _get_tracing_state, is_forward_mode
from ..errors import KernelUnavailable
from ..kernels import reference
from ..kernels.contract import (
    ARGMAX_BIT,
    BIT,
    KEEP_LAYOUT,
    N_GRADS,
    N_TENSORS,
    Gradients,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    empty_results,
    empty_vectors,
    is_recording,
    measuring_dtype,
    with_gradient_bits,
)
from ..vitals import HALVES, Vitals, rounded_off

PROBLEM_SCHEMA = (
    "Tensor query, Tensor key, Tensor? value, Tensor? mask, Tensor? gain, Tensor? weight, Tensor? seed, "
    "float scale, SymInt? left, SymInt? right, float? softcap, float dropout"
)
_SAVED = ", ".join(f"Tensor? {name}" for name in Results._fields)
_UPSTREAM = ", ".join(f"Tensor? g_{name}" for name in Upstream._fields)
N_PROBLEM, N_RESULTS, N_UPSTREAM = len(Problem._fields), len(Results._fields), len(Upstream._fields)


def _returns(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


torch.library.define("attemper::forward", f"({PROBLEM_SCHEMA}, int sign_bits, str kernel) -> {_returns(N_RESULTS)}")
torch.library.define(
    "attemper::backward",
    f"({PROBLEM_SCHEMA}, {_SAVED}, {_UPSTREAM}, bool[] needs_grad, str kernel) -> {_returns(len(Gradients._fields))}",
)

FORWARD = torch.ops.attemper.forward.default
TAKES_NONE = frozenset({"triton"})
"""Kernels whose backward takes None for what was not saved."""


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast has lowered the inputs already; the arithmetic inside is ours."""
    device = tensor.device.type
    off = device == "meta" or not torch.is_autocast_enabled(device)  # meta tensors know no autocast
    return nullcontext() if off else torch.autocast(device, enabled=False)


@torch.library.impl("attemper::forward", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Results:
    problem, (sign_bits, kernel) = Problem(*args[:N_PROBLEM]), args[N_PROBLEM:]
    with without_autocast(problem.query):
        return Results(*kernels.load(kernel).forward(problem, sign_bits))


@torch.library.impl("attemper::backward", "CompositeExplicitAutograd")
def _backward(*args: Any) -> Gradients:
    problem, saved, upstream, needs_grad, kernel = _split_backward(args)
    if kernel not in TAKES_NONE:
        saved = Results(*[problem.query.new_empty(0) if tensor is None else tensor for tensor in saved])
    with without_autocast(problem.query):
        return Gradients(*kernels.load(kernel).backward(problem, saved, upstream, needs_grad))


@torch.library.register_fake("attemper::forward")
def _fake_forward(*args: Any) -> Results:
    sign_bits, kernel = args[N_PROBLEM:]
    return empty_results(Problem(*args[:N_PROBLEM]), sign_bits, as_query=kernel in KEEP_LAYOUT)


@torch.library.register_fake("attemper::backward")
def _fake_backward(*args: Any) -> Gradients:
    problem, _, _, needs_grad, kernel = _split_backward(args)
    vectors = problem[:3] if kernel in KEEP_LAYOUT else ()

    def like(needed: bool, tensor: Tensor | None) -> Tensor:
        if not needed or tensor is None:
            return problem.query.new_empty(0)
        return empty_vectors(tensor) if any(tensor is one for one in vectors) else tensor.new_empty(tensor.shape)

    return Gradients(*(like(*pair) for pair in zip(needs_grad, problem.tensors, strict=False)))


def _split_backward(args: Any) -> tuple[Problem, Results, Upstream, NeedsGrad, str]:
    """The arguments of the backward op, by group. What was not saved is None."""
    a, b = N_PROBLEM + N_RESULTS, N_PROBLEM + N_RESULTS + N_UPSTREAM
    needs_grad, kernel = args[b:]
    return Problem(*args[:N_PROBLEM]), Results(*args[N_PROBLEM:a]), Upstream(*args[a:b]), NeedsGrad(*needs_grad), kernel


def calling(op: Any) -> Any:
    """The forward of a Function: an op that gets a problem, the bits of the signs and the kernel."""

    # Dynamo counts the parameters of this signature, so they are spelled out
    def forward(  # type: ignore[no-untyped-def]
        query, key, value, mask, gain, weight, seed, scale, left, right, softcap, dropout, sign_bits, kernel
    ) -> Any:
        return op(query, key, value, mask, gain, weight, seed, scale, left, right, softcap, dropout, sign_bits, kernel)

    return staticmethod(forward)


class _Attention(torch.autograd.Function):
    """From the problem, the bits of the signs and the kernel to `Results`."""

    forward = calling(torch.ops.attemper.forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        problem, results = Problem(*inputs[:N_PROBLEM]), Results(*output)
        ctx.save_for_backward(*problem.tensors, *results)
        ctx.numbers, ctx.sign_bits, ctx.kernel = tuple(problem[N_TENSORS:]), inputs[-2], inputs[-1]
        ctx.additive = problem.weight is not None
        ctx.mark_non_differentiable(results.output_low, results.argmax, results.lse_low, results.visible)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        needs_grad = [bool(needed) for needed in ctx.needs_input_grad[:N_GRADS]]
        arrived = dict(zip(Results._fields, grads, strict=True))
        upstream = Upstream(*(arrived[name] for name in Upstream._fields))
        upstream = _measured_only(upstream, ctx.sign_bits, NeedsGrad(*needs_grad))
        problem, results = Problem(*saved[:N_TENSORS], *ctx.numbers), Results(*saved[N_TENSORS:])
        found = differentiate(problem, results, upstream, needs_grad, ctx.kernel)
        return (*found, *[None] * (N_PROBLEM + 2 - N_GRADS))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _vmap_forward(_EagerAttention.apply, info, in_dims, *args)


def _measured_only(upstream: Upstream, sign_bits: int, needs_grad: NeedsGrad) -> Upstream:
    """Without the gradients of what was not measured, or can reach nothing: a compiled graph sends zeros for those."""
    logits = needs_grad.logits
    if logits and upstream.peak is not None and sign_bits & BIT["peak"] and not sign_bits & ARGMAX_BIT:
        raise KernelUnavailable(
            "attention(): a gradient of `peak` arrived, but no input of the call required one. "
            "Leave 'peak' out of signs=, or use kernel='reference'."
        )
    bits = {name: BIT.get(name, 0) | (ARGMAX_BIT if name == "peak" else 0) for name in Upstream._fields}
    kept = {
        name: grad
        if grad is not None and grad.numel() and (name == "output" or (logits and sign_bits & bit == bit))
        else None
        for (name, bit), grad in zip(bits.items(), upstream, strict=True)
    }
    return Upstream(**kept)


def differentiate(
    problem: Problem, results: Results, upstream: Upstream, needs_grad: list[bool], kernel: str
) -> list[Tensor | None]:
    """The gradients that are needed, from the op; None for the others."""
    args = (*problem, *results, *upstream, needs_grad, kernel)
    # a compiled graph refuses second derivatives by itself
    compiling = torch.compiler.is_compiling()
    out = torch.ops.attemper.backward(*args) if compiling else _AttentionBackward.apply(*args)
    return [grad if needed else None for grad, needed in zip(out, needs_grad, strict=True)]


class _EagerAttention(_Attention):
    """Outside of a compiled graph, where Dynamo allows a `jvp`: one whose error names the alternative."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_derivative(ctx, "forward-mode")


class _AttentionBackward(torch.autograd.Function):
    """The first derivative, as a function with an error for the second."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.attemper.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel, ctx.additive = inputs[-1], inputs[Problem._fields.index("weight")] is not None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_derivative(ctx, "second")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _vmap_backward(_AttentionBackward.apply, info, in_dims, *args)


def _vmap_forward(run: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> Any:
    """Join the vmapped dimension with the batch and run once."""
    size = info.batch_size
    sign_bits, kernel = args[N_PROBLEM:]
    problem = _join_problem(Problem(*args[:N_PROBLEM]), Problem(*in_dims[:N_PROBLEM]), size)
    out = run(*problem, with_bits_of_gradients(problem, sign_bits), kernel)
    split = tuple(_split_batch(t, size) if t.dim() > 1 else t for t in out)
    return split, tuple(0 if t.dim() > 1 else None for t in out)


def _vmap_backward(run: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    problem, saved, upstream, needs_grad, kernel = _split_backward(args)
    if problem.seed is not None:
        raise KernelUnavailable(
            f"attention(): kernel={kernel!r} cannot repeat its dropout in a batched backward (jacrev, "
            "is_grads_batched). Use kernel='reference', or no dropout."
        )
    dims = _split_backward((*in_dims[:-2], in_dims[-2] or [None] * len(NeedsGrad._fields), None))
    batch = problem.query.shape[0 if dims[0].query is None else 1]
    joined = _join_problem(problem, dims[0], size)
    flat_saved = [_join_batch(t, d, size) if _has_rows(t, d) else t for t, d in zip(saved, dims[1], strict=True)]
    flat_upstream = [None if t is None else _join_batch(t, d, size) for t, d in zip(upstream, dims[2], strict=True)]
    out = run(*joined, *flat_saved, *flat_upstream, needs_grad, kernel)
    split = [_split_batch(t, size) if t.dim() > 1 else t for t in out]
    place = Gradients._fields.index("mask")
    if problem.mask is not None and split[place].dim() > 1:
        shared = problem.mask.shape[0 if dims[0].mask is None else 1] == 1 and batch != 1
        split[place] = split[place].sum(1, keepdim=True) if shared else split[place]
    return tuple(split), tuple(0 if t.dim() > 1 else None for t in split)


# A tracer may look through the Function at the bare op (Dynamo does, inside torch.func.grad), so both have the same rules.
torch.library.register_autograd("attemper::forward", _Attention.backward, setup_context=_Attention.setup_context)
torch.library.register_vmap("attemper::forward", partial(_vmap_forward, torch.ops.attemper.forward))
torch.library.register_vmap("attemper::backward", partial(_vmap_backward, torch.ops.attemper.backward))


def _split_batch(tensor: Tensor, size: int) -> Tensor:
    return tensor.unflatten(0, (size, tensor.shape[0] // size))


def _has_rows(tensor: Tensor | None, dim: Any) -> bool:
    return tensor is not None and tensor.dim() - (dim is not None) > 1


def _join_batch(tensor: Tensor, dim: Any, size: int) -> Tensor:
    """Join a vmapped dimension with the batch; what is not vmapped is repeated."""
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten(0, 1)


def _join_problem(problem: Problem, dims: Any, size: int) -> Problem:
    if problem.seed is not None and dims.seed is None:
        raise KernelUnavailable(
            "attention(): dropout under vmap draws one mask per sample. Call torch.vmap(..., randomness='different')."
        )
    batch = problem.query.shape[0 if dims.query is None else 1]
    mask = problem.mask
    if mask is not None:
        own = mask.unsqueeze(0).expand(size, *mask.shape) if dims.mask is None else mask.movedim(dims.mask, 0)
        mask = own.expand(size, batch, *own.shape[2:]).flatten(0, 1)
    return problem._replace(
        query=_join_batch(problem.query, dims.query, size),
        key=_join_batch(problem.key, dims.key, size),
        value=None if problem.value is None else _join_batch(problem.value, dims.value, size),
        mask=mask,
        gain=None if problem.gain is None else _join_batch(problem.gain, dims.gain, size),
        weight=None if problem.weight is None else _join_batch(problem.weight, dims.weight, size),
        seed=None if problem.seed is None else problem.seed.select(dims.seed, 0),
    )


def _no_derivative(ctx: Any, order: str) -> KernelUnavailable:
    if ctx.additive:
        return KernelUnavailable(
            f"additive_attention(): {order} derivatives are not computed. Where Lq × Lk × E fits in memory, pass "
            "torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ weight as the mask of "
            "attention(query, key, value, scale=0.0, kernel='reference')."
        )
    return KernelUnavailable(
        f"attention(): kernel={ctx.kernel!r} does not compute {order} derivatives. "
        "Use kernel='reference', which PyTorch differentiates any number of times (it stores Lq × Lk)."
    )


def attend(problem: Problem, names: tuple[str, ...], kernel: str) -> tuple[Tensor, Vitals]:
    """Run a checked problem on a kernel; output (B, H, Lq, Ev), empty without values, and the signs named, (B, H, Lq) each."""
    if kernel == "reference":
        return _by_definition(problem, names)
    sign_bits = with_bits_of_gradients(problem, bits_of(names))
    if torch.compiler.is_compiling():
        results = Results(*_Attention.apply(*with_distinct_tensors(problem), sign_bits, kernel))
    elif not is_recording() and not is_forward_mode():
        # nothing is differentiated: a Function's apply, or the bare op's rule of autograd, costs as much as a small call
        with _AutoDispatchBelowAutograd():
            results = Results(*torch.ops.attemper.forward(*problem, sign_bits, kernel))
    elif _get_tracing_state() is not None:
        results = Results(*torch.ops.attemper.forward(*problem, sign_bits, kernel))  # a graph holds no Function
    else:
        results = Results(*_EagerAttention.apply(*problem, sign_bits, kernel))
    return results.output, _vitals_of(results, names)


def with_distinct_tensors(problem: Problem) -> Problem:
    """The problem with views of key and value: Dynamo refuses one tensor as two arguments, as in ``attention(x, x, x)``."""
    key, value = problem.key, problem.value
    return problem._replace(key=key.view_as(key), value=None if value is None else value.view_as(value))


def attend_without_autograd_and_modes(problem: Problem, names: tuple[str, ...], kernel: str) -> tuple[Tensor, Vitals]:
    """`attend` where nothing is differentiated, traced or transformed: the kernel itself, without the op around it."""
    if kernel == "reference":
        return _by_definition(problem, names)
    results = kernels.load(kernel).forward(problem, bits_of(names))
    return results.output, _vitals_of(results, names)


def _vitals_of(results: Results, names: tuple[str, ...]) -> Vitals:
    """The signs that were asked for."""
    low = results.output_low if results.output_low.dim() > 1 else None  # an op gives an empty one for none
    return Vitals(**{name: getattr(results, name) for name in names})._with_low(results.lse_low, low)


def bits_of(names: tuple[str, ...]) -> int:
    """The signs to measure, as a kernel is asked for them."""
    sign_bits = sum(BIT[name] for name in names)
    if sign_bits & (BIT["mean"] | BIT["variance"]):
        sign_bits |= BIT["visible"] | BIT["mean"]  # their gradients need these
    return sign_bits


def with_bits_of_gradients(problem: Problem, sign_bits: int) -> int:
    """The bits, with those of what the backward needs if an input may get a gradient."""
    return with_gradient_bits(sign_bits, problem.query, problem.key, problem.mask, problem.gain, problem.weight)


def matrix(problem: Problem) -> Tensor:
    """The weights of a checked problem, (B, H, Lq, Lk)."""
    with without_autocast(problem.query):
        return reference.matrix(_widened(problem))


def _by_definition(problem: Problem, names: tuple[str, ...]) -> tuple[Tensor, Vitals]:
    with without_autocast(problem.query):
        definition = reference.define(_widened(problem))
    output = problem.query.new_empty(0) if definition.output is None else definition.output.to(problem.query.dtype)
    vitals = Vitals(**{name: getattr(definition, name) for name in names})
    if "lse" not in names:
        return output, vitals
    low = None
    if output.dtype in HALVES and definition.output is not None and is_recording():
        low = rounded_off(definition.output.detach(), output.detach())
    return output, vitals._with_low(reference.lse_low(definition), low)


def _widened(problem: Problem) -> Problem:
    """Half precision raised to the vitals' dtype."""
    wide = measuring_dtype(problem.query.dtype)
    value = None if problem.value is None else problem.value.to(wide)
    return problem._replace(query=problem.query.to(wide), key=problem.key.to(wide), value=value)
