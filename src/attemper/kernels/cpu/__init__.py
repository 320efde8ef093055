"""cpu: attention in C, with every sign from the same pass; AMX tiles, AVX-512, AVX2 or portable vectors, on torch's threads.

__init__.py   forward and backward: tensors become addresses and strides, one packed call
native.py     finds and loads the library; the layout of a packed call
c/            native.c and plain.c: the entries; call.h: a packed call; fold.c: rows summed by head
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
    empty_results,
    measuring_dtype,
)
from . import native, summary
from .native import variant

__all__ = ["backward", "bare_backward", "bare_forward", "forward", "plain_forward", "summary", "variant"]

assert Results._fields[2:] == tuple(name for name, *_ in native.RowsLayout._fields_)

# the fields that only a backward uses: g_output, upstream, needs_grad, five gradients, the mask's steps, how many parts
_NO_BACKWARD = (*native.NOWHERE, *native.NO_ROWS, 0, 0, 0, 0, 0, 0, *(0,) * 4, 0, 1)
_NO_STEPS = (0,) * 5
_CAUSAL = {False: 0, True: 1, "lower_right": 2}  # as plain.c counts them


def forward(problem: Problem, sign_bits: int) -> Results:
    return _write(problem, sign_bits, empty_results(problem, sign_bits))


def bare_forward(problem: Problem, sign_bits: int, saved: bool = False) -> Results:
    """`forward` for a caller that is not an op: see `bare_results`."""
    value_dim = None if problem.value is None else problem.value.shape[3]
    return _write(problem, sign_bits, bare_results(problem.query, value_dim, sign_bits, saved))


def plain_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sign_bits: int,
    grouped: bool,
    causal: bool | str,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> Results | None:
    """`bare_forward` for plain tensors that nobody checked: the library checks them. None if it finds them invalid."""
    if query.dim() != 4 or not (dim := query.shape[3]):
        return None
    results = bare_results(query, dim, sign_bits, saved=False)
    rows = None
    if sign_bits:
        rows = native.pack_rows(*[0 if tensor is None else tensor.data_ptr() for tensor in results[2:]])
    scale = dim**-0.5 if scale is None else scale
    how = (sign_bits, grouped, _CAUSAL[causal], window or 0, scale, softcap or 0.0)
    failed = native.plain_forward(query, key, value, results.output.data_ptr(), rows, *how)
    if failed == native.NOT_PLAIN:
        return None
    native.check("forward", failed)
    return results


def _write(problem: Problem, sign_bits: int, results: Results) -> Results:
    """Run a forward that writes into `results`."""
    problem = _readable(problem)
    # address 0: do not write it (an empty tensor has that address too)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in results]
    packed = native.pack(*_problem(problem, sign_bits), *addresses, *_NO_BACKWARD, *native.how(), *_reals(problem))
    native.run("forward", packed)
    return results


def backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    there: Any = [tensor if tensor.numel() else None for tensor in saved]
    found = bare_backward(problem, Results(*there), upstream, needs_grad)
    return Gradients(*(problem.query.new_empty(0) if gradient is None else gradient for gradient in found))


def bare_backward(problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
    """`backward` for a caller that is not an op: None where no gradient is needed."""
    asked, problem = problem.mask, _readable(problem)
    query, key, value, mask, gain = problem[:5]
    wide = measuring_dtype(query.dtype)
    _check_saved(problem, saved, wide)
    query_bit, key_bit, value_bit, mask_bit, gain_bit, _ = needs_grad
    bits = query_bit | key_bit << 1 | value_bit << 2 | mask_bit << 3 | gain_bit << 4  # GRAD_… of call.h
    dmask: Any = None
    steps: tuple[int, ...] = _NO_STEPS
    if needs_grad.mask and mask is not None:
        dmask, parts, more = _empty_mask_gradient(mask, problem, wide)
        steps, bits = _mask_steps(dmask), bits | more
    else:
        parts = _parts(problem, key.shape[0] * key.shape[1])
    results: list[Any] = [
        _like(query) if needs_grad.query else None,
        _like(key) if needs_grad.key else None,
        _like(value) if needs_grad.value and value is not None else None,
        _like(gain) if needs_grad.gain and gain is not None else None,
        dmask,
    ]
    # named, so that these tensors live until the call ends: only their addresses are passed
    rows = [None if t is None else t.contiguous() for t in saved]
    arriving = [None if t is None else t.to(wide).contiguous() for t in upstream[1:]]
    g_output = upstream.output
    packed = native.pack(
        *_problem(problem, 0),
        *[0 if t is None else t.data_ptr() for t in rows],
        *(native.NOWHERE if g_output is None else (g_output.data_ptr(), *g_output.stride())),
        *(0, 0, 0),
        *[0 if t is None else t.data_ptr() for t in arriving],
        bits,
        *[0 if t is None else t.data_ptr() for t in results],
        *steps,
        parts,
        *native.how(),
        *_reals(problem),
    )
    native.run("backward", packed)
    d_query, d_key, d_value, d_gain, _ = results
    d_mask: Any = None if dmask is None or asked is None else dmask.sum(0).to(asked.dtype)
    return Gradients(d_query, d_key, d_value, d_mask, d_gain, None)  # type: ignore[arg-type]


def _check_saved(problem: Problem, saved: Results, wide: torch.dtype) -> None:
    """Refuse saved tensors whose shape or dtype changed (`.data =`, a hook): the library reads them by address."""
    query, key, value, mask, gain = problem[:5]
    batch, heads, rows, dim = query.shape
    full, real = (batch, heads, rows), query.dtype
    same = (
        key.dtype is real
        and key.shape[0] == batch
        and (heads % key.shape[1] == 0 if key.shape[1] else not heads)
        and key.shape[3] == dim
        and (value is None or (value.dtype is real and value.shape[:3] == key.shape[:3]))
        and (value is None or _is_output(saved.output, real, (*full, value.shape[3])))
        and (saved.output_low is None or saved.output_low.shape == saved.output.shape)
        and all(t is None or t.shape == full for t in (*saved[2:], gain))
        and all(t is None or t.dtype is wide for t in (saved.lse_low, *saved[5:]))
        and (mask is None or all(n in (1, size) for n, size in zip(mask.shape, (*full, key.shape[2]), strict=True)))
    )
    if not same:
        raise InputError(
            "attention(): a tensor that was saved for the backward has another shape or dtype now. Do not set `.data` of an "
            "input before the backward, and let saved-tensor hooks give back what they were given."
        )


def _is_output(tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    """Whether a saved output has this dtype and shape. An empty one comes back from an op as None."""
    return 0 in shape if tensor is None else tensor.dtype is dtype and tensor.shape == shape


def _like(tensor: Tensor) -> Any:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _empty_mask_gradient(mask: Tensor, problem: Problem, wide: torch.dtype) -> tuple[Tensor, int, int]:
    """Zeros for the gradient of a mask; how many parts the keys are cut into; the bits that say who may add to which entry."""
    batch, groups = problem.key.shape[:2]
    apart = _writers(mask, problem)
    parts = _parts(problem, apart[0] * apart[1])
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


def _parts(problem: Problem, heads: int) -> int:
    """How many parts the keys are cut into, so that every thread has work if `heads` heads run at once."""
    keys, threads, heads = problem.key.shape[2], torch.get_num_threads(), max(1, heads)
    if heads % threads == 0 or heads >= 4 * threads:
        return 1
    return max(1, min(-(-keys // native.BACK_KEYS), -(-2 * threads // heads)))


def _mask_steps(dmask: Tensor) -> tuple[int, ...]:
    _, *steps = (0 if size == 1 else step for size, step in zip(dmask.shape, dmask.stride(), strict=True))
    return (*steps, dmask.stride(0) if dmask.shape[0] > 1 else 0)


def _readable(problem: Problem) -> Problem:
    """The problem with its mask in a dtype that the library reads: a float8 mask becomes float32."""
    mask = problem.mask
    if mask is None or mask.dtype in native.DTYPES:
        return problem
    return problem._replace(mask=mask.to(torch.float32))


def _problem(problem: Problem, sign_bits: int) -> tuple[int, ...]:
    query, key, value, mask, gain, _, seed, _, left, right, _, _ = problem
    batch, heads, rows, dim = query.shape
    _, groups, keys, _ = key.shape
    return (
        query.data_ptr(),
        *query.stride(),
        key.data_ptr(),
        *key.stride(),
        *(native.NOWHERE if value is None else (value.data_ptr(), *value.stride())),
        *(native.NOWHERE if mask is None else native.strided(mask)),
        *(native.NOWHERE if gain is None else native.strided(gain)),
        *(batch, heads, groups, rows, keys, dim, 0 if value is None else value.shape[3]),
        native.DTYPES[query.dtype],
        native.NO_MASK if mask is None else native.DTYPES[mask.dtype],
        native.UNBOUND if left is None else left,
        native.UNBOUND if right is None else right,
        sign_bits,
        0 if seed is None else int(seed),
    )


def _reals(problem: Problem) -> tuple[float, float, float]:
    return problem.scale, problem.softcap or 0.0, problem.dropout
