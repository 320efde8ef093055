"""Autograd: three Functions. One around a kernel, one around an op, and one for the first derivative, which has no second.

Kernels have a first derivative. Any other raises an error that names the alternative.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import kernels
from .._torch_private import _AutoDispatchBelowAutograd, _current_graph_task_id, apply_of, is_forward_mode
from ..errors import KernelUnavailable
from ..kernels.contract import (
    ARGMAX_BIT,
    BIT,
    FOR_OUTPUT,
    N_GRADS,
    N_TENSORS,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    block_results,
    is_recording,
)
from ..kernels.guard import PLAIN
from .ops import FORWARD, FORWARD_PACKED, N_PACKED, N_PROBLEM, packed_forward
from .parts.compute import kernel_of
from .vmap import vmap_backward, vmap_forward, vmap_offsets

NOT_DIFFERENTIABLE = ("output_low", "argmax", "lse_low", "visible")


class KernelCall(NamedTuple):
    """A call that a kernel has computed, besides the tensors that may get a gradient: torch looks at each argument in turn."""

    problem: Problem
    kernel: str
    output: Tensor | None
    signs: Any
    fields: tuple[str, ...]  # of `Results`: what the Function returns
    packed: Packed | None = None
    """The signs that it returns besides in one tensor: torch wraps each tensor that a Function returns."""


class Packed:
    """The signs with a derivative that one tensor holds, and those that a gradient reached while a backward runs.

    The gradient of that tensor is zero for a sign that was not used. Such a zero must not meet an inf, and which of them are zero
    could be read on a GPU only by waiting for it.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._reached: dict[int, set[str]] = {}  # by the backward that runs

    def part(self, tensor: Tensor, name: str, layout: Any) -> Tensor:
        """What is of one sign in that tensor, or in its gradient."""
        return layout.part(tensor, name) if hasattr(layout, "part") else tensor[self.names.index(name)]

    def read(self, tensor: Tensor, name: str, layout: Any) -> Tensor:
        """A sign, which notes when a gradient reaches it."""
        part = self.part(tensor, name, layout)
        if part.requires_grad:
            part.register_hook(partial(self._note, name))
        return part

    def _note(self, name: str, gradient: Tensor) -> None:
        self._reached.setdefault(_current_graph_task_id(), set()).add(name)

    def gradients(self, arrived: Tensor, layout: Any) -> dict[str, Tensor]:
        """The gradients of the signs that one reached in the backward that runs."""
        reached = self._reached.pop(_current_graph_task_id(), self.names)
        return {name: self.part(arrived, name, layout) for name in self.names if name in reached}


class PackedSigns:
    """The signs of a call: those of one tensor with a derivative, the others as the kernel returned them."""

    def __init__(self, tensor: Tensor, packed: Packed, others: Any) -> None:
        self._tensor, self._packed, self._others = tensor, packed, others

    def __getattr__(self, name: str) -> Tensor | None:
        if name in self._packed.names:
            if torch.compiler.is_compiling() or is_recording():
                return self._packed.read(self._tensor, name, self._others)
            with torch.inference_mode(False), torch.enable_grad():  # the call was recorded, wherever its sign is read
                return self._packed.read(self._tensor, name, self._others)
        found: Tensor | None = getattr(self._others, name)
        return found


class KernelFunction(torch.autograd.Function):
    """The derivative of a plain call, without an op."""

    @staticmethod
    def forward(ctx: Any, query, key, value, mask, gain, weight, sink, call: KernelCall) -> Any:  # type: ignore[no-untyped-def]
        problem, kernel, output, signs, fields, ctx.packed = call
        ctx.numbers, ctx.fields, ctx.kernel = problem[N_TENSORS:], fields, kernel
        ctx.set_materialize_grads(False)
        # the signs of a block are read as copies, so that nobody can write into what the backward reads
        read = FOR_OUTPUT if fields == ("output",) else _SIGNS
        kept = [getattr(signs, name) if name in read else None for name in _SIGNS] if isinstance(signs, tuple) else ()
        ctx.block, *rows = (None, *kept) if kept else signs.saved()
        ctx.save_for_backward(*problem[:N_TENSORS], output, *rows)
        if ctx.packed:
            return signs.packed if output is None else (output, signs.packed)
        found = {"output": output, **dict(zip(_SIGNS, kept, strict=False))}
        found |= {name: getattr(signs, name) for name in fields if name not in found}
        ctx.mark_non_differentiable(*[found[name] for name in NOT_DIFFERENTIABLE if name in fields])
        return tuple([found[name] for name in fields])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved, needs_grad = ctx.saved_tensors, NeedsGrad(*ctx.needs_input_grad[:N_GRADS])
        output, rows, block = saved[N_TENSORS], saved[N_TENSORS + 1 :], ctx.block
        # hooks of saved tensors may return others than those that were saved
        read = (*saved[:N_GRADS], *saved[N_TENSORS:], *grads)
        plain = not torch.compiler.is_compiling() and kernels.fast_guard()(*read) == PLAIN
        arrived = dict(zip(ctx.fields, grads, strict=False))
        if ctx.packed and grads[-1] is not None:
            arrived |= ctx.packed.gradients(grads[-1], block)
        if not needs_grad.logits:
            arrived = {"output": arrived.get("output")}  # no sign depends on the values
        upstream = Upstream(*[arrived.get(name) for name in Upstream._fields])
        if plain and block is not None and ctx.kernel == "cpu":
            needs = sum([needed << index for index, needed in enumerate(needs_grad[:5])])
            gradients = block.backward(*saved[:5], output, *rows, (*upstream,), needs)
            if gradients is not None:
                return (*gradients, None, None, None)
        problem = Problem(*saved[:N_TENSORS], *ctx.numbers)
        if block is None:
            results = Results(output, *rows)
        elif ctx.kernel == "cpu":
            results = block_results(block.places, rows[0], problem.query, output)
        else:
            results = block.results(rows, output, upstream)
        if plain:
            gradients = kernel_of(problem, ctx.kernel).backward(problem, results, upstream, needs_grad)
        else:
            gradients = differentiate(problem, results, upstream, needs_grad, ctx.kernel)
        return (*gradients, None)


_SIGNS = Results._fields[1:]
apply_kernel = apply_of(KernelFunction)


class OpFunction(torch.autograd.Function):
    """The forward op, or with `packed` the one whose signs are one tensor: only its output has a derivative.

    In a compiled graph a sign of its own would get zeros as a gradient.
    """

    # Dynamo counts the parameters of this signature, so they are spelled out
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        query,
        key,
        value,
        mask,
        gain,
        weight,
        sink,
        documents,
        seed,
        scale,
        left,
        right,
        softcap,
        dropout,
        from_end,
        sign_bits,
        kernel,
        packed,
    ) -> Any:
        tensors = (query, key, value, mask, gain, weight, sink, documents, seed)
        op = FORWARD_PACKED if packed else FORWARD
        return op(*tensors, scale, left, right, softcap, dropout, from_end, sign_bits, kernel)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        problem, packed = Problem(*inputs[:N_PROBLEM]), len(output) == N_PACKED
        ctx.fields = FOR_OUTPUT if packed else Results._fields
        ctx.save_for_backward(*problem.tensors, *output[: len(ctx.fields)])
        ctx.numbers, ctx.n_inputs = tuple(problem[N_TENSORS:]), len(inputs)
        ctx.sign_bits, ctx.kernel = inputs[N_PROBLEM : N_PROBLEM + 2]
        if packed:
            ctx.mark_non_differentiable(*output[1:])
        else:
            results = Results(*output)
            ctx.mark_non_differentiable(results.output_low, results.argmax, results.lse_low, results.visible)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        problem = Problem(*saved[:N_TENSORS], *ctx.numbers)
        kept = dict(zip(ctx.fields, saved[N_TENSORS:], strict=True))
        results = Results(*[kept.get(name) for name in Results._fields])  # type: ignore[arg-type]
        needs_grad = NeedsGrad(*[bool(needed) for needed in ctx.needs_input_grad[:N_GRADS]])
        arrived = dict(zip(ctx.fields, grads, strict=False)) if len(ctx.fields) == len(grads) else {"output": grads[0]}
        upstream = Upstream(*[arrived.get(name) for name in Upstream._fields])
        upstream = _measured_only(upstream, ctx.sign_bits, needs_grad)
        gradients = differentiate(problem, results, upstream, needs_grad, ctx.kernel)
        return (*gradients, *[None] * (ctx.n_inputs - N_GRADS))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        run = partial(_apply_op, packed=args[-1])
        return vmap_forward(run, info, in_dims[:-1], *args[:-1])


def _apply_op(*args: Any, packed: bool) -> Any:
    return OpFunction.apply(*args, packed)


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
    problem: Problem, results: Results, upstream: Upstream, needs_grad: NeedsGrad, kernel: str
) -> list[Tensor | None]:
    """The gradients that are needed, from the op; None for the others."""
    args = (*problem, *results, *upstream, list(needs_grad), kernel)
    # a compiled graph refuses second derivatives by itself
    compiling = torch.compiler.is_compiling()
    out = torch.ops.attemper.backward(*args) if compiling else BackwardFunction.apply(*args)
    return [grad if needed else None for grad, needed in zip(out, needs_grad, strict=True)]


class BackwardFunction(torch.autograd.Function):
    """The first derivative, as a function with an error for the second."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.attemper.backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.kernel, ctx.additive = inputs[-1], inputs[Problem._fields.index("weight")] is not None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_derivative(ctx.kernel, ctx.additive, "second")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return vmap_backward(BackwardFunction.apply, info, in_dims, *args)


def check_no_tangent(problem: Problem, kernel: str) -> None:
    """Raise if a forward-mode derivative is asked of a kernel. A Function has no `jvp` for it: Dynamo would not trace it."""
    if is_forward_mode() and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in problem.tensors[:N_GRADS]
    ):
        raise _no_derivative(kernel, problem.weight is not None, "forward-mode")


def _no_derivative(kernel: str, additive: bool, order: str) -> KernelUnavailable:
    if additive:
        return KernelUnavailable(
            f"additive_attention(): {order} derivatives are not computed. Where Lq × Lk × E fits in memory, pass "
            "torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ weight as the mask of "
            "attention(query, key, value, scale=0.0, kernel='reference')."
        )
    return KernelUnavailable(
        f"attention(): kernel={kernel!r} does not compute {order} derivatives. "
        "Use kernel='reference', which PyTorch differentiates any number of times (it stores Lq × Lk)."
    )


# A tracer may look through a Function at its op (Dynamo does, inside torch.func.grad), so the bare ops have the same rules.
torch.library.register_autograd("attemper::forward", OpFunction.backward, setup_context=OpFunction.setup_context)
torch.library.register_vmap("attemper::forward", partial(vmap_forward, torch.ops.attemper.forward))
torch.library.register_vmap("attemper::backward", partial(vmap_backward, torch.ops.attemper.backward))
torch.library.register_vmap("attemper::checked_offsets", vmap_offsets)


def differentiable(*args: Any) -> Any:
    if is_recording() and any(argument is not None and argument.requires_grad for argument in args[:N_GRADS]):
        return OpFunction.apply(*args, True)
    if kernels.fast_guard()(*args[:N_GRADS]) == PLAIN:
        return packed_forward(*args)
    with _AutoDispatchBelowAutograd():
        return torch.ops.attemper.forward_packed(*args)


# `torch.library.register_autograd` would add 15 µs to each call of a compiled graph, where nothing is differentiated any more
torch.library.impl("attemper::forward_packed", "Autograd", differentiable)
