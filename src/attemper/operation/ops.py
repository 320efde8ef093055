"""Ops: the operation as torch sees it where it must: two opaque ops, and two for compiled graphs, with their fakes.

An op returns tensors alone, so what was not asked for is an empty one there. Kernels are imported when an op runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..kernels.contract import (
    ALL_SIGNS,
    ARGMAX_BIT,
    BIT,
    FOR_OUTPUT,
    INTEGERS,
    KEEP_LAYOUT,
    OUTPUT_LOW_BIT,
    PACKED,
    Gradients,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    empty_results,
    empty_vectors,
    gathered,
    packed_size,
    with_gradient_bits,
    without_autocast,
)
from .parts.compute import kernel_of
from .parts.documents import check_offsets

PROBLEM_SCHEMA = (
    "Tensor query, Tensor key, Tensor? value, Tensor? mask, Tensor? gain, Tensor? weight, Tensor? sink, Tensor? documents, "
    "Tensor? seed, float scale, SymInt? left, SymInt? right, float? softcap, float dropout, bool from_end"
)
_SAVED = ", ".join(f"Tensor? {name}" for name in Results._fields)
_UPSTREAM = ", ".join(f"Tensor? g_{name}" for name in Upstream._fields)
N_PROBLEM, N_RESULTS, N_UPSTREAM = len(Problem._fields), len(Results._fields), len(Upstream._fields)
N_PACKED = len(FOR_OUTPUT) + 1


def _returns(count: int) -> str:
    return f"({', '.join(['Tensor'] * count)})"


def _define(name: str, arguments: str, returned: int) -> None:
    torch.library.define(f"attemper::{name}", f"({arguments}) -> {_returns(returned)}")


_define("forward", f"{PROBLEM_SCHEMA}, int sign_bits, str kernel", N_RESULTS)
_define("forward_packed", f"{PROBLEM_SCHEMA}, int sign_bits, str kernel", N_PACKED)
_define("backward", f"{PROBLEM_SCHEMA}, {_SAVED}, {_UPSTREAM}, bool[] needs_grad, str kernel", len(Gradients._fields))

FORWARD = torch.ops.attemper.forward.default
FORWARD_PACKED = torch.ops.attemper.forward_packed.default


@torch.library.impl("attemper::forward", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Results:
    problem, (sign_bits, kernel) = Problem(*args[:N_PROBLEM]), args[N_PROBLEM:]
    with without_autocast(problem.query):
        results = gathered(*kernel_of(problem, kernel).forward(problem, sign_bits, saved=True))
    like = results.lse
    for name, dtype in (("output", problem.query.dtype), ("output_low", torch.int16), *_ROW_DTYPES.items()):
        if getattr(results, name) is None:
            # a kernel may find it in the backward, if that needs it
            asked = name == "argmax" and sign_bits & ARGMAX_BIT
            empty = like.new_full(like.shape, -1, dtype=dtype) if asked else like.new_empty(0, dtype=dtype)
            results = results._replace(**{name: empty})
    return results


_ROW_DTYPES = {name: {"argmax": torch.int64, "visible": torch.int32}.get(name) for name in Results._fields[2:]}
"""The dtype of each result with one number per row; None stands for the dtype of lse."""


def packed_forward(*args: Any) -> tuple[Tensor, ...]:
    """The results of FOR_OUTPUT, and the signs of PACKED. Of the bits, only the one of `output_low` is read.

    As seven tensors the signs would take longer on the host, without CUDA graphs, than their kernel on a GPU.
    """
    problem, (sign_bits, kernel) = Problem(*args[:N_PROBLEM]), args[N_PROBLEM:]
    sign_bits = sign_bits & OUTPUT_LOW_BIT | ALL_SIGNS
    with without_autocast(problem.query):
        if kernel == "triton" and problem.documents is problem.sink is None:
            results, packed = kernels.load(kernel).forward_packed(problem, sign_bits)
        else:
            results = gathered(*kernel_of(problem, kernel).forward(problem, sign_bits, saved=True))
            packed = _pack(results)
    output, low, lse_low, lse = [getattr(results, name) for name in FOR_OUTPUT]
    return output, problem.query.new_empty(0, dtype=torch.int16) if low is None else low, lse_low, lse, packed


torch.library.impl("attemper::forward_packed", "CompositeExplicitAutograd", packed_forward)


def _pack(results: Results) -> Tensor:
    """The signs of another kernel, copied into one tensor."""
    lse = results.lse
    signs = [getattr(results, name).flatten() for name in PACKED]
    place = PACKED.index("visible")
    signs[place] = signs[place].to(INTEGERS[lse.dtype]).view(lse.dtype)
    more = packed_size(lse.numel()) - lse.numel()
    parts = [part for sign in signs for part in (sign, lse.new_zeros(more))] if more else signs
    return torch.cat(parts)


def op_backward(*args: Any) -> Gradients:
    problem, saved, upstream, needs_grad, kernel = split_backward(args)
    there: Any = [tensor if tensor is not None and tensor.numel() else None for tensor in saved]
    with without_autocast(problem.query):
        gradients = kernel_of(problem, kernel).backward(problem, Results(*there), upstream, needs_grad)
    return Gradients(*[problem.query.new_empty(0) if gradient is None else gradient for gradient in gradients])


torch.library.impl("attemper::backward", "CompositeExplicitAutograd", op_backward)


@torch.library.register_fake("attemper::forward")
def _fake_forward(*args: Any) -> Results:
    sign_bits, kernel = args[N_PROBLEM:]
    return empty_results(Problem(*args[:N_PROBLEM]), sign_bits, as_query=kernel in KEEP_LAYOUT)


@torch.library.register_fake("attemper::forward_packed")
def _fake_forward_packed(*args: Any) -> tuple[Tensor, ...]:
    problem, (sign_bits, kernel) = Problem(*args[:N_PROBLEM]), args[N_PROBLEM:]
    results = empty_results(problem, sign_bits & OUTPUT_LOW_BIT, as_query=kernel in KEEP_LAYOUT)
    packed = results.lse.new_empty(len(PACKED) * packed_size(results.lse.numel()))
    return *[getattr(results, name) for name in FOR_OUTPUT], packed


@torch.library.register_fake("attemper::backward")
def _fake_backward(*args: Any) -> Gradients:
    problem, _, _, needs_grad, kernel = split_backward(args)
    vectors = problem[:3] if kernel in KEEP_LAYOUT else ()

    def like(needed: bool, tensor: Tensor | None) -> Tensor:
        if not needed or tensor is None:
            return problem.query.new_empty(0)
        return empty_vectors(tensor) if any(tensor is one for one in vectors) else tensor.new_empty(tensor.shape)

    return Gradients(*(like(*pair) for pair in zip(needs_grad, problem.tensors, strict=False)))


torch.library.define("attemper::checked_offsets", "(Tensor documents, SymInt rows, SymInt keys) -> Tensor")


@torch.library.impl("attemper::checked_offsets", "CompositeExplicitAutograd")
def _checked_offsets(documents: Tensor, rows: int, keys: int) -> Tensor:
    """A copy of a problem's documents, whose numbers were read and checked: what traces the definition reads none."""
    check_offsets(documents.tolist(), rows, keys)
    return documents.clone()


@torch.library.register_fake("attemper::checked_offsets")
def _fake_checked_offsets(documents: Tensor, rows: int, keys: int) -> Tensor:
    return torch.empty_like(documents)


def split_backward(args: Any) -> tuple[Problem, Results, Upstream, NeedsGrad, str]:
    """The arguments of the backward op, by group. What was not saved is None."""
    a, b = N_PROBLEM + N_RESULTS, N_PROBLEM + N_RESULTS + N_UPSTREAM
    needs_grad, kernel = args[b:]
    return Problem(*args[:N_PROBLEM]), Results(*args[N_PROBLEM:a]), Upstream(*args[a:b]), NeedsGrad(*needs_grad), kernel


def bits_of(names: tuple[str, ...]) -> int:
    """The signs to measure, as a kernel is asked for them."""
    sign_bits = sum([BIT[name] for name in names])
    if sign_bits & (BIT["mean"] | BIT["variance"]):
        sign_bits |= BIT["visible"] | BIT["mean"]  # their gradients need these
    return sign_bits


def with_bits_of_gradients(problem: Problem, sign_bits: int) -> int:
    """The bits, with those of what the backward needs if an input may get a gradient."""
    return with_gradient_bits(
        sign_bits, problem.query, problem.key, problem.mask, problem.gain, problem.weight, problem.sink
    )
