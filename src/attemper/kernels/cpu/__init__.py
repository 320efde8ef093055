"""cpu: attention in C, with every sign from the same pass; AMX tiles, AVX-512, AVX2 or portable vectors, on torch's threads."""

from __future__ import annotations

import torch
from torch import Tensor

from ...vitals import SIGNS
from ..seam import Gradients, Measured, Problem, Upstream, Wants, measuring_dtype, room
from . import fold, native
from .native import variant

__all__ = ["backward", "fold", "forward", "variant"]


def forward(problem: Problem, signs: int) -> Measured:
    problem, measured = _readable(problem), room(problem, signs)
    rest = (*native.NOWHERE, *native.NO_ROWS, 0, 0, 0, 0, 0, 0, *(0,) * 4, 0, 1)
    native.call("forward", (*_problem(problem, signs), *_results(measured), *rest), _reals(problem))
    return measured


def backward(problem: Problem, saved: Measured, upstream: Upstream, wants: Wants) -> Gradients:
    asked, problem = problem.mask, _readable(problem)
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    wide = measuring_dtype(query.dtype)

    def space(wanted: bool, like: Tensor | None) -> Tensor:
        return like.new_empty(like.shape) if wanted and like is not None else query.new_empty(0)

    result = Gradients(
        query=space(wants.query, query),
        key=space(wants.key, key),
        value=space(wants.value, value),
        mask=query.new_empty(0),
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
        dmask = torch.zeros((lead, *mask.shape), dtype=torch.float64 if many else wide, device=mask.device)
    rows = {name: _row(tensor, wide) for name, tensor in upstream._asdict().items() if name != "output"}
    kept = Measured(
        *(t.contiguous() for t in saved)
    )  # addresses are taken below: what they point to lives until the call ends
    integers = (
        *_problem(problem, 0),
        *_results(kept),
        *native.strided(upstream.output),
        *(0, 0, 0, *(native.address(rows[name]) for name in SIGNS if name != "visible")),
        bits,
        *(native.address(gradient) for gradient in (result.query, result.key, result.value, result.gain, dmask)),
        *((0,) * 5 if dmask is None else _mask_steps(dmask)),
        parts,
    )
    native.call("backward", integers, _reals(problem))
    if dmask is not None and asked is not None:
        result = result._replace(mask=dmask.sum(0).to(asked.dtype))
    return result


def _row(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()


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
    query, key, value, mask = problem.query, problem.key, problem.value, problem.mask
    batch, heads, rows, dim = query.shape
    return (
        *native.strided(query),
        *native.strided(key),
        *native.strided(value),
        *native.strided(mask),
        *native.strided(problem.gain),
        *(batch, heads, key.shape[1], rows, key.shape[2], dim, 0 if value is None else value.shape[3]),
        native.DTYPES[query.dtype],
        native.NO_MASK if mask is None else native.DTYPES[mask.dtype],
        native.UNBOUND if problem.left is None else problem.left,
        native.UNBOUND if problem.right is None else problem.right,
        signs,
        0 if problem.seed is None else int(problem.seed),
    )


def _results(measured: Measured) -> tuple[int, ...]:
    return tuple(map(native.address, measured))


def _reals(problem: Problem) -> tuple[float, float, float]:
    return problem.scale, problem.softcap or 0.0, problem.dropout
