"""cpu: attention in C, with every sign from the same pass; AVX-512, AVX2 or portable vectors, on torch's threads."""

from __future__ import annotations

from torch import Tensor

from ..seam import Gradients, Measured, Problem, Upstream, Wants, room
from . import native
from .native import variant

__all__ = ["backward", "forward", "variant"]


def forward(problem: Problem, signs: int) -> Measured:
    measured = room(problem, signs)
    rest = (*native.NOWHERE, *native.NO_ROWS, 0, 0, 0, 0, 0, 0, *(0,) * 4, 0, 1)
    native.call("forward", (*_problem(problem, signs), *_results(measured), *rest), _reals(problem))
    return measured


def backward(problem: Problem, saved: Measured, upstream: Upstream, wants: Wants) -> Gradients:
    raise NotImplementedError


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
