"""cpu: attention in C, with every sign from the same pass; AMX, AVX-512, AVX2, NEON or portable vectors, on torch's threads.

__init__.py   forward and backward of a checked problem, through the extension
native.py     finds and loads the extension; what torch hands to it
twin.py       what the extension does with the tensors of a plain call, in Python
c/            module.c: what Python sees; guard.c, attend.c, differ.c and fold.c: its functions; problem.c, tensors.c and block.c:
              tensors read and made; native.c: which build runs; call.h: a call as the kernel takes it. op_forward_packed,
              op_backward and op_tally_packed are what the dispatcher calls in a compiled graph
c/variants/   one file per instruction set and precision; each compiles c/kernel/kernel.h
c/kernel/     the passes: forward, decode (few rows), backward, and the sums of a row
c/blocks/     what the passes are built of: vectors, dtypes, packing, products, threads
summary.py    the rows of a call summed by head, for a watch
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ..contract import (
    Gradients,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    bare_results,
    measuring_dtype,
)
from . import native, summary
from .native import readable, variant

__all__ = ["backward", "forward", "summary", "variant"]


def forward(problem: Problem, sign_bits: int, saved: bool = False) -> tuple[Tensor | None, Results]:
    value_dim = None if problem.value is None else problem.value.shape[3]
    results = bare_results(problem.query, value_dim, sign_bits, saved)
    problem = _with_supported_mask(problem)  # keep a reference: C reads these tensors by address
    native.library.write(*_native_args(problem), sign_bits, readable(results))
    return results.output, results._replace(output=None)  # type: ignore[arg-type]


def backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    """The gradients that are needed; None for the others."""
    mask, wide, problem = problem.mask, measuring_dtype(problem.query.dtype), _with_supported_mask(problem)
    bits = sum(needed << index for index, needed in enumerate(needs_grad[:5]))  # GRAD_… of call.h
    dmask, parts = None, 0
    if needs_grad.mask and mask is not None:
        dmask, parts, more = _empty_mask_gradient(mask, problem, wide)
        bits |= more
    given: Any = (None, None, None, dmask, None)
    if not native.bound:  # it cannot make tensors
        made = [_like(t) if needed else None for t, needed in zip(problem[:5], needs_grad, strict=False)]
        given = (*made[:3], dmask, made[4])
    asked, gradients = _native_args(problem), readable(given)
    gradients_of_native = native.library.backward(*asked, readable(saved), readable(upstream), bits, gradients, parts)
    if gradients_of_native is None:
        rows = tuple(None if t is None else t.contiguous() for t in saved)
        arriving = (upstream.output, *(None if t is None else t.to(wide).contiguous() for t in upstream[1:]))
        gradients_of_native = native.library.backward(
            *asked, readable(rows), readable(arriving), bits, gradients, parts
        )
    if gradients_of_native is None:
        raise InputError(native.CHANGED)
    d_query, d_key, d_value, _, d_gain = gradients_of_native if native.bound else given
    d_mask: Any = None if dmask is None or mask is None else dmask.sum(0).to(mask.dtype)
    return Gradients(d_query, d_key, d_value, d_mask, d_gain, None)  # type: ignore[arg-type]


def _like(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _empty_mask_gradient(mask: Tensor, problem: Problem, wide: torch.dtype) -> tuple[Tensor, int, int]:
    """Zeros for the gradient of a mask, the number of key parts, and flags by which no two threads write one entry."""
    batch, groups, keys, _ = problem.key.shape
    apart = _writers(mask, problem)
    parts = native.library.parts(keys, apart[0] * apart[1])
    bits = native.MASK_BY_BATCHES if apart[0] < batch else 0
    bits |= native.MASK_BY_GROUPS if apart[1] < groups else 0
    many = 1 in mask.shape[2:]  # rows or keys share an entry: its gradient is a long sum
    bits |= native.MASK_WIDE if many else 0
    # if all keys share an entry, each part of the keys writes its own copy, and the copies are added at the end
    lead = parts if mask.shape[3] == 1 else 1
    return torch.zeros((lead, *mask.shape), dtype=torch.float64 if many else wide, device=mask.device), parts, bits


def _writers(mask: Tensor, problem: Problem) -> tuple[int, int]:
    """How many batch entries and key/value heads may be worked on at once without two adding to the same entry of the mask."""
    batch, groups = problem.key.shape[:2]
    return batch if mask.shape[0] == batch else 1, 1 if mask.shape[1] == 1 else groups


def _with_supported_mask(problem: Problem) -> Problem:
    """The problem with its mask in a dtype that the extension reads: a float8 mask becomes float32."""
    mask = problem.mask
    return problem if mask is None or mask.dtype in native.DTYPES else problem._replace(mask=mask.to(torch.float32))


def _native_args(problem: Problem) -> list[Any]:
    """The tensors and numbers of a problem as the extension takes them. It knows no additive scores."""
    tensors = readable(problem[:5])
    seed = None if problem.seed is None else int(problem.seed)
    return [*tensors, seed, problem.left, problem.right, problem.scale, problem.softcap, problem.dropout]
