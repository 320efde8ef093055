"""additive attention as torch sees it: an opaque op, its fake, its derivative, and a sentence for what has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import KernelUnavailable
from ..kernels.blockwise import additive as blocks
from ..kernels.blockwise.additive import Gradients, Wants
from ..kernels.contract import ARGMAX_BIT, BIT, Measured, Problem, Upstream, room
from ..operation.ops import without_autocast

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor weight, Tensor? mask, Tensor? seed, "
    "SymInt? left, SymInt? right, float dropout, int signs"
)
N_INPUTS, N_TENSORS = _INPUTS.count(",") + 1, _INPUTS.count("Tensor")
_MEASURED = ", ".join(f"Tensor {name}" for name in Measured._fields)
_UPSTREAM = ", ".join(f"Tensor? g_{name}" for name in Upstream._fields)


def _returns(fields: tuple[str, ...]) -> str:
    return f"({', '.join(['Tensor'] * len(fields))})"


torch.library.define("attemper::additive_forward", f"({_INPUTS}) -> {_returns(Measured._fields)}")
torch.library.define(
    "attemper::additive_backward",
    f"({_INPUTS}, {_MEASURED}, {_UPSTREAM}, bool[] wants) -> {_returns(Gradients._fields)}",
)


def _problem(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, mask: Tensor | None, seed: Tensor | None,
    left: int | None, right: int | None, dropout: float, signs: int,
) -> Problem:  # fmt: skip
    return Problem(query, key, value, mask, None, seed, 1.0, left, right, None, dropout)


def _split(args: Any) -> tuple[Any, Measured, Upstream, Wants]:
    """The arguments of the backward op, by group."""
    a = N_INPUTS + len(Measured._fields)
    return args[:N_INPUTS], Measured(*args[N_INPUTS:a]), Upstream(*args[a:-1]), Wants(*args[-1])


@torch.library.impl("attemper::additive_forward", "CompositeExplicitAutograd")
def _forward(*args: Any) -> Measured:
    with without_autocast(args[0]):
        return blocks.forward(_problem(*args), args[3], args[-1])


@torch.library.impl("attemper::additive_backward", "CompositeExplicitAutograd")
def _backward(*args: Any) -> Gradients:
    inputs, saved, upstream, wants = _split(args)
    with without_autocast(inputs[0]):
        return blocks.backward(_problem(*inputs), inputs[3], saved, upstream, wants)


@torch.library.register_fake("attemper::additive_forward")
def _fake_forward(*args: Any) -> Measured:
    return room(_problem(*args), args[-1])


@torch.library.register_fake("attemper::additive_backward")
def _fake_backward(*args: Any) -> Gradients:
    inputs, _, _, wants = _split(args)
    likes = zip(wants, inputs, strict=False)  # the first inputs are those with gradients, in the same order
    return Gradients(*(like.new_empty(like.shape) if wanted else inputs[3].new_empty(0) for wanted, like in likes))


class _Additive(torch.autograd.Function):
    """The inputs of the op in; `Measured` out."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.attemper.additive_forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        measured = Measured(*output)
        ctx.save_for_backward(*inputs[:N_TENSORS], *measured)
        ctx.rest = tuple(inputs[N_TENSORS:])
        ctx.mark_non_differentiable(measured.output_low, measured.argmax, measured.lse_low, measured.visible)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors, arrived = ctx.saved_tensors, dict(zip(Measured._fields, grads, strict=True))
        signs = ctx.rest[-1]

        def kept(name: str) -> Tensor | None:
            # a compiled graph sends zeros for what was not measured
            needed = 0 if name == "output" else ARGMAX_BIT if name == "peak" else BIT[name]
            return arrived[name] if signs & needed == needed else None

        wants = [bool(needed) for needed in ctx.needs_input_grad[: len(Wants._fields)]]
        upstream = (kept(name) for name in Upstream._fields)
        args = (*tensors[:N_TENSORS], *ctx.rest, *tensors[N_TENSORS:], *upstream, wants)
        # a compiled graph refuses second derivatives by itself
        compiling = torch.compiler.is_compiling()
        found = torch.ops.attemper.additive_backward(*args) if compiling else _AdditiveBackward.apply(*args)
        masked = (grad if wanted else None for grad, wanted in zip(found, wants, strict=True))
        return (*masked, *[None] * (N_INPUTS - len(wants)))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise _no_derivative("forward-mode")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise _no_vmap()


class _AdditiveBackward(torch.autograd.Function):
    """The first derivative, as a function that says so when it is differentiated again."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return torch.ops.attemper.additive_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _no_derivative("second")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise _no_vmap()


def _no_derivative(which: str) -> KernelUnavailable:
    return KernelUnavailable(
        f"additive_attention(): {which} derivatives are not computed. Where Lq × Lk × E fits in memory, pass "
        "torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ weight as the mask of "
        "attention(query, key, value, scale=0.0, kernel='reference')."
    )


def _no_vmap() -> KernelUnavailable:
    return KernelUnavailable(
        "additive_attention(): does not run under torch.vmap or a batched derivative (jacrev, is_grads_batched). "
        "It takes any leading dimensions: pass the whole batch, (..., H, L, E)."
    )


# A compiled graph holds the op itself, which Dynamo can look into: it has the Function's derivative.
torch.library.register_autograd("attemper::additive_forward", _Additive.backward, setup_context=_Additive.setup_context)


def additive(*args: Any) -> Measured:
    """Run the op on its inputs, in the order of the schema."""
    in_graph = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    # in inference mode the op has no autograd either, and a Function under enable_grad would
    bare = in_graph or torch.is_inference_mode_enabled()
    run = torch.ops.attemper.additive_forward if bare else _Additive.apply
    return Measured(*run(*args))
