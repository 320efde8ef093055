"""Documents: attention within each document of a packed call, by any kernel, on slices of its tensors; no kernel knows of them.

Nothing between two documents is computed, so a call costs what its visible keys cost. Reading the offsets waits for their device
once a call, unless they are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import kernels
from ...errors import InputError, KernelUnavailable
from ...kernels.contract import (
    N_GRADS,
    Gradients,
    NeedsGrad,
    Problem,
    Results,
    Upstream,
    bare_results,
    empty_vectors,
    gathered,
    measuring_dtype,
)

ODD = 0x1E3779B97F4A7C15  # 2^64 / φ, below 2^63: its multiples lie far apart
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
OFFSETS = "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)) makes offsets of lengths."


def check_documents(where: str, documents: object, query: Tensor, keys: int, lead: tuple[int, ...]) -> Tensor:
    """Offsets as a problem holds them, (1 or 2, 1 or B, N + 1).

    Numbers that can be read at once are checked here, where the name of the function is known; all are where the call runs.
    """
    offsets = _check_form(where, documents, query, lead)
    if not torch.compiler.is_compiling() and offsets.is_cpu and kernels.fast_guard()(offsets):
        check_offsets(offsets.tolist(), query.shape[2], keys, where)
    return offsets


def _check_form(where: str, documents: object, query: Tensor, lead: tuple[int, ...]) -> Tensor:
    several = isinstance(documents, (tuple, list)) and any(isinstance(document, Tensor) for document in documents)
    both: Any = documents if several else (documents,)
    if several and len(both) != 2:
        raise InputError(
            f"{where}(): `documents` must be one tensor of offsets, or two, for queries and for keys; got {len(both)}. {OFFSETS}"
        )
    offsets = [_one(where, side, query, lead) for side in both]
    if len(offsets) == 1:
        return _kept(offsets[0].unsqueeze(0))
    of_rows, of_keys = offsets
    if of_rows.shape[1] != of_keys.shape[1]:
        raise InputError(
            f"{where}(): `documents` must name as many documents for queries as for keys; "
            f"got {of_rows.shape[1] - 1} and {of_keys.shape[1] - 1}. Repeat an offset for a document without keys."
        )
    of_rows, of_keys = torch.broadcast_tensors(of_rows, of_keys.to(of_rows.device))
    return torch.stack((of_rows, of_keys))


def _kept(offsets: Tensor) -> Tensor:
    """As a backward may keep it: it must not save a tensor that was made in inference mode."""
    return offsets.clone() if not torch.compiler.is_compiling() and offsets.is_inference() else offsets


def _one(where: str, offsets: Any, query: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(N + 1,) for all items or (..., N + 1), a row for each, as (1 or B, N + 1)."""
    if not isinstance(offsets, Tensor):
        raise InputError(
            f"{where}(): `documents` must be a torch.Tensor; got {type(offsets).__name__}. "
            "Use torch.tensor([0, ..., length]), the offsets of all documents."
        )
    if offsets.dtype not in INTEGERS:
        raise InputError(
            f"{where}(): `documents` must be of int64, or of int32, int16, int8 or uint8; got {offsets.dtype}. "
            "Use documents.long()."
        )
    if offsets.device != query.device and offsets.device.type != "cpu":
        there = "" if query.device.type == "cpu" else f" or on query's device {query.device}"
        raise InputError(
            f"{where}(): `documents` must be on the CPU{there}; got {offsets.device}. Use documents.cpu()."
        )
    shape = tuple(offsets.shape)
    fits = len(shape) == 1 + len(lead) and all(n in (1, size) for n, size in zip(shape[:-1], lead, strict=True))
    if not shape or not shape[-1] or not (len(shape) == 1 or fits):
        rows = f", or {(*lead, 'N + 1')}, a row for each item".replace("'", "") if lead else ""
        raise InputError(f"{where}(): `documents` must have shape (N + 1,){rows}; got {shape}. {OFFSETS}")
    shared = all(n == 1 for n in shape[:-1])
    return (offsets if shared else offsets.expand(*lead, shape[-1])).long().reshape(-1, shape[-1])


class OneDocument(NamedTuple):
    """A document of some items of the batch: the place of its rows and keys, and its own problem."""

    items: slice
    rows: slice
    keys: slice
    problem: Problem

    def of_rows(self, tensor: Tensor | None) -> Any:
        """The rows of one of `Results` or `Upstream`; None for what was not saved, or did not arrive."""
        return None if tensor is None else tensor[self.items, :, self.rows]

    def of_mask(self, mask: Tensor) -> Tensor:
        """What a mask, or its gradient, holds for this document."""
        items, rows, keys = (
            slice(None) if size == 1 else place
            for size, place in zip((mask.shape[0], *mask.shape[2:]), (self.items, self.rows, self.keys), strict=True)
        )
        return mask[items, :, rows, keys]


def forward(kernel: ModuleType, problem: Problem, sign_bits: int, saved: bool, as_query: bool) -> Results:
    """The results of all documents in one set of tensors; the output lies as the query does, or by head."""
    query, value = problem.query, problem.value
    results = bare_results(query, None if value is None else value.shape[3], sign_bits, saved, as_query)
    for documents in _documents(problem):
        documents = [document for document in documents if document.problem.query.shape[2]]
        by_document = [gathered(*kernel.forward(document.problem, sign_bits, saved)) for document in documents]
        for name, whole, *parts in zip(Results._fields, results, *by_document, strict=True):
            if whole is None or not whole.numel():
                continue
            if parts[0] is None:  # a kernel may find the arg-max in the backward
                nothing: Any = {name: None}
                results = results._replace(**nothing)
                continue
            if name == "argmax":
                parts = [_moved(part, one.keys.start) for part, one in zip(parts, documents, strict=True)]
            torch.cat(parts, 2, out=whole[documents[0].items])
    return results


def backward(
    kernel: ModuleType, problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad, as_input: bool
) -> Gradients:
    """The gradients of all documents; those of vectors lie as these do, or by head."""
    asked, whole = problem.mask, {}
    if problem.mask is not None and needs_grad.mask:
        # documents may share an entry: it is rounded once, at its end
        problem = problem._replace(mask=problem.mask.to(measuring_dtype(problem.query.dtype)))
    for name, needed in zip(Gradients._fields, needs_grad, strict=True):
        tensor = getattr(problem, name)
        if tensor is None or not needed or name == "sink":
            continue
        shared = name in ("mask", "weight")
        lies = (
            empty_vectors(tensor) if as_input and tensor.dim() == 4 and not shared else tensor.new_empty(tensor.shape)
        )
        whole[name] = lies.zero_() if shared else lies
    for documents in _documents(problem):
        gradients = [_differentiate(kernel, document, saved, upstream, needs_grad) for document in documents]
        for name, target in whole.items():
            parts = [getattr(part, name) for part in gradients]
            if name == "mask":
                for one, part in zip(documents, parts, strict=True):
                    one.of_mask(target).add_(part)
            elif name == "weight":
                target[documents[0].items].add_(sum(parts))
            elif target.numel():
                torch.cat(parts, 2, out=target[documents[0].items])
    if asked is not None and "mask" in whole:
        whole["mask"] = whole["mask"].to(asked.dtype)
    return Gradients(**{name: whole.get(name) for name in Gradients._fields})  # type: ignore[arg-type]


def _differentiate(
    kernel: ModuleType, document: OneDocument, saved: Results, upstream: Upstream, needs_grad: NeedsGrad
) -> Gradients:
    if not document.problem.query.shape[2] * document.problem.key.shape[2]:
        zeros: Any = [None if t is None else t.new_zeros(t.shape) for t in document.problem.tensors[:N_GRADS]]
        return Gradients(*zeros)
    own, arriving = ([document.of_rows(tensor) for tensor in tensors] for tensors in (saved, upstream))
    kept = Results(*own)
    if kept.argmax is not None:
        kept = kept._replace(argmax=_moved(kept.argmax, -document.keys.start))
    gradients: Gradients = kernel.backward(document.problem, kept, Upstream(*arriving), needs_grad)
    return gradients


def _moved(argmax: Tensor, by: int) -> Tensor:
    """The places of keys, counted from another one; -1, for no key, stays."""
    return torch.where(argmax < 0, argmax, argmax + by) if by else argmax


def _documents(problem: Problem) -> Iterator[list[OneDocument]]:
    """The documents of all items of the batch, or of one item after another where each has its own."""
    query, key, value, mask, gain = problem[:5]
    assert problem.documents is not None
    if problem.documents.is_cuda and torch.cuda.is_current_stream_capturing():
        raise KernelUnavailable(
            "attention(): `documents` on a GPU cannot be read while a CUDA graph is captured. Pass documents.cpu(), which every "
            "replay then has, or a mask."
        )
    offsets = check_offsets(problem.documents.tolist(), query.shape[2], key.shape[2])
    number = 0
    for item, (of_rows, of_keys) in enumerate(offsets):
        items = slice(None) if len(offsets) == 1 else slice(item, item + 1)
        pieces = []
        for (first, last), (start, stop) in zip(pairwise(of_rows), pairwise(of_keys), strict=True):
            number += 1
            if first == last and start == stop:
                continue
            shift = stop - start - (last - first) if problem.from_end else 0
            document = OneDocument(items, slice(first, last), slice(start, stop), problem)
            own = problem._replace(
                query=query[items, :, first:last],
                key=key[items, :, start:stop],
                value=None if value is None else value[items, :, start:stop],
                weight=None if problem.weight is None else problem.weight[items],
                sink=None if problem.sink is None else problem.sink[items, :, first:last],
                mask=None if mask is None else document.of_mask(mask),
                gain=None if gain is None else gain[items, :, first:last],
                documents=None,
                seed=_seed_of(problem.seed, number),
                left=None if problem.left is None else problem.left - shift,
                right=None if problem.right is None else problem.right + shift,
                from_end=False,
            )
            pieces.append(document._replace(problem=own))
        if pieces:
            yield pieces


def _seed_of(seed: Tensor | None, number: int) -> Tensor | None:
    """The dropout seed of one document, which differs from those of its neighbours."""
    return None if seed is None else seed.new_tensor((int(seed) + number * ODD) % 2**62)


def check_offsets(
    offsets: list[list[list[int]]], rows: int, keys: int, where: str = "attention"
) -> list[tuple[list[int], list[int]]]:
    """For each item, or for all, the offsets for queries and those for keys; an error if they are none."""
    for own, length, of in ((offsets[0], rows, "queries"), (offsets[-1], keys, "keys")):
        for ends in own:
            if ends[0] != 0 or ends[-1] != length or any(a > b for a, b in pairwise(ends)):
                shown = ", ".join(map(str, ends[:4])) + (", …, " if len(ends) > 5 else ", " if len(ends) > 4 else "")
                shown += str(ends[-1]) if len(ends) > 4 else ""
                raise InputError(
                    f"{where}(): `documents` must begin with 0, never fall, and end with the number of {of} (={length}); "
                    f"got [{shown}]. {OFFSETS}"
                )
    return list(zip(offsets[0], offsets[-1], strict=True))
