"""The operation as torch sees it: two opaque ops with fakes, and the autograd Function around them.

`_Attention` gives the first derivative, vmap by folding into the batch, and a sentence where another derivative is asked for; the
same rules are registered on the bare op. Kernels are imported when an op runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import kernels
from ..errors import KernelUnavailable
from ..kernels import reference
from ..kernels.contract import (
    ARGMAX_BIT,
    BIT,
    Gradients,
    Measured,
    Problem,
    Upstream,
    Wants,
    for_gradients,
    is_recording,
    measuring_dtype,
    room,
)
from ..vitals import Vitals

_PROBLEM = (
    "Tensor query, Tensor key, Tensor? value, Tensor? mask, Tensor? gain, Tensor? seed, "
    "float scale, SymInt? left, SymInt? right, float? softcap, float dropout"
)
_MEASURED = ", ".join(f"Tensor {name}" for name in Measured._fields)
_UPSTREAM = ", ".join(f"Tensor? g_{name}" for name in Upstream._fields)
N_PROBLEM, N_MEASURED, N_UPSTREAM = len(Problem._fields), len(Measured._fields), len(Upstream._fields)


def _returns(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


torch.library.define("attemper::forward", f"({_PROBLEM}, int signs, str kernel) -> {_returns(N_MEASURED)}")
torch.library.define(
    "attemper::backward",
    f"({_PROBLEM}, {_MEASURED}, {_UPSTREAM}, bool[] wants, str kernel) -> {_returns(len(Gradients._fields))}",
)

FORWARD = torch.ops.attemper.forward.default


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast has lowered the inputs already; the arithmetic inside is ours."""
    device = tensor.device.type
    off = device == "meta" or not torch.is_autocast_enabled(device)  # meta tensors know no autocast
    return nullcontext() if off else torch.autocast(device, enabled=False)


@torch.library.impl("attemper::forward", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Measured:
    problem, (signs, kernel) = Problem(*args[:N_PROBLEM]), args[N_PROBLEM:]
    with without_autocast(problem.query):
        return Measured(*kernels.load(kernel).forward(problem, signs))


@torch.library.impl("attemper::backward", "CompositeExplicitAutograd")
def _backward(*args: Any) -> Gradients:
    problem, saved, upstream, wants, kernel = _split_backward(args)
    with without_autocast(problem.query):
        return Gradients(*kernels.load(kernel).backward(problem, saved, upstream, wants))


@torch.library.register_fake("attemper::forward")
def _fake_forward(*args: Any) -> Measured:
    return room(Problem(*args[:N_PROBLEM]), args[N_PROBLEM])


@torch.library.register_fake("attemper::backward")
def _fake_backward(*args: Any) -> Gradients:
    problem, _, _, wants, _ = _split_backward(args)

    def like(wanted: bool, tensor: Tensor | None) -> Tensor:
        if not wanted or tensor is None:
            return problem.query.new_empty(0)
        return tensor.new_empty(tensor.shape)

    return Gradients(*(like(getattr(wants, name), getattr(problem, name)) for name in Gradients._fields))


def _split_backward(args: Any) -> tuple[Problem, Measured, Upstream, Wants, str]:
    """The arguments of the backward op, by group."""
    a, b = N_PROBLEM + N_MEASURED, N_PROBLEM + N_MEASURED + N_UPSTREAM
    wants, kernel = args[b:]
    return Problem(*args[:N_PROBLEM]), Measured(*args[N_PROBLEM:a]), Upstream(*args[a:b]), Wants(*wants), kernel


class _Attention(torch.autograd.Function):
    """Problem, signs and kernel in; `Measured` out."""

    # Dynamo counts the parameters of this signature, so they are spelled out
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        query, key, value, mask, gain, seed, scale, left, right, softcap, dropout, signs, kernel
    ) -> Any:
        return torch.ops.attemper.forward(
            query, key, value, mask, gain, seed, scale, left, right, softcap, dropout, signs, kernel
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        problem, measured = Problem(*inputs[:N_PROBLEM]), Measured(*output)
        ctx.save_for_backward(*problem[:6], *measured)
        ctx.numbers, ctx.signs, ctx.kernel = tuple(problem[6:]), inputs[-2], inputs[-1]
        ctx.mark_non_differentiable(measured.output_low, measured.argmax, measured.lse_low, measured.visible)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        needs = dict(zip(Problem._fields, ctx.needs_input_grad, strict=False))
        wants = [bool(needs[name]) for name in Wants._fields]
        arrived = dict(zip(Measured._fields, grads, strict=True))
        upstream = _measured_only(Upstream(*(arrived[name] for name in Upstream._fields)), ctx.signs, Wants(*wants))
        problem, measured = Problem(*saved[:6], *ctx.numbers), Measured(*saved[6:])
        found = dict(zip(Wants._fields, differentiate(problem, measured, upstream, wants, ctx.kernel), strict=True))
        return (*(found.get(name) for name in Problem._fields), None, None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _vmap_forward(_EagerAttention.apply, info, in_dims, *args)


def _measured_only(upstream: Upstream, signs: int, wants: Wants) -> Upstream:
    """Without the gradients of what was not measured, or can reach nothing: a compiled graph sends zeros for those."""
    logits = wants.query or wants.key or wants.mask or wants.gain
    if logits and upstream.peak is not None and signs & BIT["peak"] and not signs & ARGMAX_BIT:
        raise KernelUnavailable(
            "attention(): a gradient of `peak` arrived, but nothing showed in the call that one would. "
            "Leave 'peak' out of signs=, or use kernel='reference'."
        )
    bits = {name: BIT.get(name, 0) | (ARGMAX_BIT if name == "peak" else 0) for name in Upstream._fields}
    kept = {
        name: grad
        if grad is not None and grad.numel() and (name == "output" or (logits and signs & bit == bit))
        else None
        for (name, bit), grad in zip(bits.items(), upstream, strict=True)
    }
    return Upstream(**kept)


def differentiate(
    problem: Problem, measured: Measured, upstream: Upstream, wants: list[bool], kernel: str
) -> list[Tensor | None]:
    """The gradients that are wanted, from the op; None for the others."""
    args = (*problem, *measured, *upstream, wants, kernel)
    # a compiled graph refuses second derivatives by itself
    compiling = torch.compiler.is_compiling()
    out = torch.ops.attemper.backward(*args) if compiling else _AttentionBackward.apply(*args)
    return [grad if want else None for grad, want in zip(out, wants, strict=True)]


class _EagerAttention(_Attention):
    """Outside of a compiled graph, where Dynamo does not object to a `jvp`: one that says what to use instead."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_derivative(ctx.kernel, "forward-mode derivatives")


class _AttentionBackward(torch.autograd.Function):
    """The first derivative, as a function that says so when it is differentiated again."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.attemper.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel = inputs[-1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_derivative(ctx.kernel, "second derivatives")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _vmap_backward(_AttentionBackward.apply, info, in_dims, *args)


def _vmap_forward(run: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> Any:
    """Fold the vmapped dimension into the batch and run once."""
    size = info.batch_size
    signs, kernel = args[N_PROBLEM:]
    problem = _fold_problem(Problem(*args[:N_PROBLEM]), Problem(*in_dims[:N_PROBLEM]), size)
    out = run(*problem, _with_gradients(problem, signs), kernel)
    split = tuple(_unfold(t, size) if t.dim() > 1 else t for t in out)
    return split, tuple(0 if t.dim() > 1 else None for t in out)


def _vmap_backward(run: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    problem, saved, upstream, wants, kernel = _split_backward(args)
    if problem.seed is not None:
        raise KernelUnavailable(
            f"attention(): kernel={kernel!r} cannot repeat its dropout in a batched backward (jacrev, "
            "is_grads_batched). Use kernel='reference', or no dropout."
        )
    dims = _split_backward((*in_dims[:-2], in_dims[-2] or [None] * len(Wants._fields), None))
    batch = problem.query.shape[0 if dims[0].query is None else 1]
    folded = _fold_problem(problem, dims[0], size)
    flat_saved = [_fold(t, d, size) if _has_rows(t, d) else t for t, d in zip(saved, dims[1], strict=True)]
    flat_upstream = [None if t is None else _fold(t, d, size) for t, d in zip(upstream, dims[2], strict=True)]
    out = run(*folded, *flat_saved, *flat_upstream, wants, kernel)
    split = [_unfold(t, size) if t.dim() > 1 else t for t in out]
    place = Gradients._fields.index("mask")
    if problem.mask is not None and split[place].dim() > 1:
        shared = problem.mask.shape[0 if dims[0].mask is None else 1] == 1 and batch != 1
        split[place] = split[place].sum(1, keepdim=True) if shared else split[place]
    return tuple(split), tuple(0 if t.dim() > 1 else None for t in split)


# A tracer may look through the Function at the bare op (Dynamo does, inside torch.func.grad): it must differ in nothing.
torch.library.register_autograd("attemper::forward", _Attention.backward, setup_context=_Attention.setup_context)
torch.library.register_vmap("attemper::forward", partial(_vmap_forward, torch.ops.attemper.forward))
torch.library.register_vmap("attemper::backward", partial(_vmap_backward, torch.ops.attemper.backward))


def _unfold(tensor: Tensor, size: int) -> Tensor:
    return tensor.unflatten(0, (size, tensor.shape[0] // size))


def _has_rows(tensor: Tensor, dim: Any) -> bool:
    return tensor.dim() - (dim is not None) > 1


def _fold(tensor: Tensor, dim: Any, size: int) -> Tensor:
    """Move a vmapped dimension into the batch; what is not vmapped is repeated."""
    tensor = tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return tensor.flatten(0, 1)


def _fold_problem(problem: Problem, dims: Any, size: int) -> Problem:
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
        query=_fold(problem.query, dims.query, size),
        key=_fold(problem.key, dims.key, size),
        value=None if problem.value is None else _fold(problem.value, dims.value, size),
        mask=mask,
        gain=None if problem.gain is None else _fold(problem.gain, dims.gain, size),
        seed=None if problem.seed is None else problem.seed.select(dims.seed, 0),
    )


def _no_derivative(kernel: str, what: str) -> KernelUnavailable:
    return KernelUnavailable(
        f"attention(): kernel={kernel!r} does not compute {what}. "
        "Use kernel='reference', which PyTorch differentiates any number of times (it stores Lq × Lk)."
    )


def attend(problem: Problem, names: tuple[str, ...], kernel: str) -> tuple[Tensor, Vitals]:
    """Run a checked problem on a kernel; output (B, H, Lq, Ev), empty without values, and the signs named, (B, H, Lq) each."""
    if kernel == "reference":
        return _by_definition(problem, names)
    signs = _with_gradients(problem, bits(names))
    if torch.compiler.is_compiling():
        # Dynamo refuses one tensor in two places, which self-attention without projections has
        key, value = problem.key, problem.value
        problem = problem._replace(key=key.view_as(key), value=None if value is None else value.view_as(value))
        measured = Measured(*_Attention.apply(*problem, signs, kernel))
    elif not is_recording() and forward_ad._current_level < 0:
        # nothing is differentiated: a Function's apply, or the bare op's rule of autograd, costs as much as a small call
        with torch._C._AutoDispatchBelowAutograd():
            measured = Measured(*torch.ops.attemper.forward(*problem, signs, kernel))
    elif torch._C._get_tracing_state() is not None:
        measured = Measured(*torch.ops.attemper.forward(*problem, signs, kernel))  # a graph holds no Function
    else:
        measured = Measured(*_EagerAttention.apply(*problem, signs, kernel))
    return measured.output, vitals_of(measured, names)


def attend_aside(problem: Problem, names: tuple[str, ...], kernel: str) -> tuple[Tensor, Vitals]:
    """`attend` where nothing is differentiated, traced or transformed: the kernel itself, without the op around it."""
    if kernel == "reference":
        return _by_definition(problem, names)
    measured = kernels.load(kernel).forward(problem, bits(names))
    return measured.output, vitals_of(measured, names)


def vitals_of(measured: Measured, names: tuple[str, ...]) -> Vitals:
    """The signs that were asked for."""
    return Vitals(**{name: getattr(measured, name) for name in names})._with_low(measured.lse_low)


def bits(names: tuple[str, ...]) -> int:
    """The signs to measure, as a kernel is asked for them."""
    signs = sum(BIT[name] for name in names)
    if signs & (BIT["mean"] | BIT["variance"]):
        signs |= BIT["visible"] | BIT["mean"]  # their gradients need these
    return signs


def _with_gradients(problem: Problem, signs: int) -> int:
    return for_gradients(signs, problem.query, problem.key, problem.mask, problem.gain)


def matrix(problem: Problem) -> Tensor:
    """The weights of a checked problem, (B, H, Lq, Lk)."""
    with without_autocast(problem.query):
        return reference.matrix(_widened(problem))


def _by_definition(problem: Problem, names: tuple[str, ...]) -> tuple[Tensor, Vitals]:
    with without_autocast(problem.query):
        definition = reference.define(_widened(problem))
    output = problem.query.new_empty(0) if definition.output is None else definition.output.to(problem.query.dtype)
    vitals = Vitals(**{name: getattr(definition, name) for name in names})
    return output, vitals._with_low(reference.lse_low(definition)) if "lse" in names else vitals


def _widened(problem: Problem) -> Problem:
    """Half precision raised to the vitals' dtype."""
    wide = measuring_dtype(problem.query.dtype)
    value = None if problem.value is None else problem.value.to(wide)
    return problem._replace(query=problem.query.to(wide), key=problem.key.to(wide), value=value)
