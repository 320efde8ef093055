"""vmap: a vmapped dimension is joined with the batch, so that one call computes all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelUnavailable
from ..kernels.contract import Gradients, NeedsGrad, Problem
from .ops import N_PROBLEM, split_backward, with_bits_of_gradients


def vmap_forward(run: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> Any:
    """Join the vmapped dimension with the batch and run once."""
    size = info.batch_size
    sign_bits, kernel = args[N_PROBLEM:]
    problem = _join_problem(Problem(*args[:N_PROBLEM]), Problem(*in_dims[:N_PROBLEM]), size)
    out = run(*problem, with_bits_of_gradients(problem, sign_bits), kernel)
    split = tuple(_split_batch(t, size) if t.dim() > 1 else t for t in out)
    return split, tuple(0 if t.dim() > 1 else None for t in out)


def vmap_backward(run: Callable[..., Any], info: Any, in_dims: Any, *args: Any) -> Any:
    size = info.batch_size
    problem, saved, upstream, needs_grad, kernel = split_backward(args)
    if problem.seed is not None:
        raise KernelUnavailable(
            f"attention(): kernel={kernel!r} cannot repeat its dropout in a batched backward (jacrev, "
            "is_grads_batched). Use kernel='reference', or no dropout."
        )
    dims = split_backward((*in_dims[:-2], in_dims[-2] or [None] * len(NeedsGrad._fields), None))
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


def vmap_offsets(info: Any, in_dims: Any, documents: Tensor, rows: int, keys: int) -> Any:
    joined = documents if in_dims[0] is None else documents.movedim(in_dims[0], 1).flatten(1, 2)
    checked = torch.ops.attemper.checked_offsets(joined, rows, keys)
    return (checked, None) if in_dims[0] is None else (checked.unflatten(1, (info.batch_size, -1)), 1)


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
        sink=None if problem.sink is None else _join_batch(problem.sink, dims.sink, size),
        documents=_join_documents(problem.documents, dims.documents, size, batch),
        seed=None if problem.seed is None else problem.seed.select(dims.seed, 0),
    )


def _join_documents(documents: Tensor | None, dim: Any, size: int, batch: int) -> Tensor | None:
    """Offsets of every item of the joined batch; those that all items share stay as they are."""
    if documents is None or (dim is None and documents.shape[1] == 1):
        return documents
    own = documents.unsqueeze(0).expand(size, *documents.shape) if dim is None else documents.movedim(dim, 0)
    return own.expand(size, own.shape[1], batch, own.shape[3]).transpose(0, 1).flatten(1, 2)
