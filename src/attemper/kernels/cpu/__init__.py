"""cpu: attention in C, with every sign from the same pass; AMX tiles, AVX-512, AVX2 or portable vectors, on torch's threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..seam import Gradients, Measured, Problem, Upstream, Wants, bare_room, measuring_dtype, room
from . import fold, native
from .native import variant

__all__ = ["backward", "bare_backward", "bare_forward", "fold", "forward", "variant"]

# the fields of Call that a forward does not have: g_output, upstream, wants, five gradients, the mask's steps; one part
_NO_BACKWARD = (*native.NOWHERE, *native.NO_ROWS, 0, 0, 0, 0, 0, 0, *(0,) * 4, 0, 1)


def forward(problem: Problem, signs: int) -> Measured:
    return _measure(problem, signs, room(problem, signs))


def bare_forward(problem: Problem, signs: int, saved: bool = False) -> Measured:
    """`forward` for a caller that is no op: see `bare_room`."""
    return _measure(problem, signs, bare_room(problem, signs, saved))


def _measure(problem: Problem, signs: int, measured: Measured) -> Measured:
    problem = _readable(problem)
    # what `room` gives has no address where it is empty
    results = [0 if tensor is None else tensor.data_ptr() for tensor in measured]
    native.call("forward", _reals(problem), *_problem(problem, signs), *results, *_NO_BACKWARD)
    return measured


def backward(problem: Problem, saved: Measured, upstream: Upstream, wants: Wants) -> Gradients:
    found = bare_backward(problem, saved, upstream, wants)
    return Gradients(*(problem.query.new_empty(0) if gradient is None else gradient for gradient in found))


def bare_backward(problem: Problem, saved: Measured, upstream: Upstream, wants: Wants) -> Gradients:
    """`backward` for a caller that is no op: None where no gradient is wanted."""
    asked, problem = problem.mask, _readable(problem)
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    wide = measuring_dtype(query.dtype)

    def space(wanted: bool, like: Tensor | None) -> Any:
        return torch.empty_like(like, memory_format=torch.contiguous_format) if wanted and like is not None else None

    result = Gradients(
        query=space(wants.query, query),
        key=space(wants.key, key),
        value=space(wants.value, value),
        mask=space(False, None),
        gain=space(wants.gain, problem.gain),
    )
    apart = (key.shape[0], key.shape[1]) if mask is None or not wants.mask else _writers(mask, problem)
    parts = _parts(problem, max(1, apart[0] * apart[1]))
    bits = sum(1 << place for place, wanted in enumerate(wants) if wanted)
    bits |= native.MASK_BY_BATCHES if apart[0] < key.shape[0] else 0
    bits |= native.MASK_BY_GROUPS if apart[1] < key.shape[1] else 0
    dmask = None
    if wants.mask and mask is not None:
        many = 1 in mask.shape[2:]  # rows or keys share a number: many add up to one
        bits |= native.MASK_WIDE if many else 0
        # where all keys share a number, each part of the keys has its own
        lead = parts if mask.shape[3] == 1 else 1
        dmask = torch.zeros((lead, *mask.shape), dtype=torch.float64 if many else wide)
    # addresses are taken below: what they point to lives until the call ends
    kept = [None if tensor is None else tensor.contiguous() for tensor in saved]
    arriving = [None if tensor is None else tensor.to(wide).contiguous() for tensor in upstream[1:]]
    native.call(
        "backward",
        _reals(problem),
        *_problem(problem, 0),
        *map(native.address, kept),
        *native.strided(upstream.output),
        *(0, 0, 0, *map(native.address, arriving)),
        bits,
        *map(native.address, (result.query, result.key, result.value, result.gain, dmask)),
        *((0,) * 5 if dmask is None else _mask_steps(dmask)),
        parts,
    )
    if dmask is not None and asked is not None:
        result = result._replace(mask=dmask.sum(0).to(asked.dtype))
    return result


def _writers(mask: Tensor, problem: Problem) -> tuple[int, int]:
    """Over how many of the batch and of the key/value heads work may spread, so that no two add to one entry of the mask's."""
    batch, groups = problem.key.shape[:2]
    return batch if mask.shape[0] == batch else 1, 1 if mask.shape[1] == 1 else groups


def _parts(problem: Problem, heads: int) -> int:
    """How many parts the keys are cut into, so that every thread has work where `heads` are worked on side by side."""
    keys, threads = problem.key.shape[2], torch.get_num_threads()
    if heads % threads == 0 or heads >= 4 * threads:
        return 1
    return max(1, min(-(-keys // native.BACK_KEYS), -(-2 * threads // heads)))


def _mask_steps(dmask: Tensor) -> tuple[int, ...]:
    _, *steps = (0 if size == 1 else step for size, step in zip(dmask.shape, dmask.stride(), strict=True))
    return (*steps, dmask.stride(0) if dmask.shape[0] > 1 else 0)


def _readable(problem: Problem) -> Problem:
    """With a mask of a dtype that the library reads: a float8 one is widened."""
    mask = problem.mask
    if mask is None or mask.dtype in native.DTYPES:
        return problem
    return problem._replace(mask=mask.to(torch.float32))


def _problem(problem: Problem, signs: int) -> tuple[int, ...]:
    query, key, value, mask, gain, seed, _, left, right, _, _ = problem
    batch, heads, rows, dim = query.shape
    _, groups, keys, _ = key.shape
    return (
        query.data_ptr(),
        *query.stride(),
        key.data_ptr(),
        *key.stride(),
        *(native.NOWHERE if value is None else (value.data_ptr(), *value.stride())),
        *native.strided(mask),
        *native.strided(gain),
        *(batch, heads, groups, rows, keys, dim, 0 if value is None else value.shape[3]),
        native.DTYPES[query.dtype],
        native.NO_MASK if mask is None else native.DTYPES[mask.dtype],
        native.UNBOUND if left is None else left,
        native.UNBOUND if right is None else right,
        signs,
        0 if seed is None else int(seed),
    )


def _reals(problem: Problem) -> tuple[float, float, float]:
    return problem.scale, problem.softcap or 0.0, problem.dropout
