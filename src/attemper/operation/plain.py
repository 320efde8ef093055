"""A plain call: plain tensors on one device, and nothing that traces, transforms or records. It needs no op around its kernel.

The checks of checks.py, an op of torch.library and a Function that can be transformed take several times as long as a small
attention. A few quick tests recognise most plain calls. Every other call, valid or not, goes through checks.py and ops.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from .._torch_private import _dispatch_keys, at_rest, is_autocast_on
from ..kernels.contract import FLOATS, LARGEST, Problem
from .listen import listening, tallying

_TYPES = frozenset({Tensor, torch.nn.Parameter})
_LARGEST_INT = torch.iinfo(torch.int64).max
_MASKS = frozenset({*FLOATS, torch.bool})


@cache
def _plain_keys(cuda: bool) -> frozenset[int]:
    """The dispatch keys of an ordinary dense tensor on this device, made outside and inside inference mode."""
    found = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            found.add(_dispatch_keys(torch.empty(0, device="cuda" if cuda else "cpu")).raw_repr())
    return frozenset(found)


def is_plain(tensor: Tensor) -> bool:
    """Whether a kernel may read a tensor by its address, sizes and strides. Ask only if `at_rest()`."""
    # the dispatch keys show what the Python type does not: sparse layouts, wrappers, a lazy negation or conjugation
    return type(tensor) in _TYPES and _dispatch_keys(tensor).raw_repr() in _plain_keys(tensor.is_cuda)


def are_plain(tensors: Iterable[Tensor | None]) -> bool:
    """`is_plain` of several tensors on one device, in less time."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not given or not _TYPES.issuperset(map(type, given)):
        return not given
    return _plain_keys(given[0].is_cuda).issuperset([_dispatch_keys(tensor).raw_repr() for tensor in given])


def all_plain(problem: Problem) -> bool:
    """Whether a checked problem is a plain call."""
    return not torch.compiler.is_compiling() and at_rest() and are_plain(problem.tensors)


def _is_cast(query: Tensor) -> bool:
    """Whether autocast gives the query another dtype."""
    device = "cuda" if query.is_cuda else "cpu"
    return is_autocast_on(device) and torch.get_autocast_dtype(device) != query.dtype


def is_plain_call(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    causal: bool | str,
    scale: float | Tensor | None,
    window: int | None,
    softcap: float | None,
    dropout: float,
) -> bool:
    """Whether this is a plain call without dropout and with valid numbers. Shapes and dtypes are not checked here.

    A call with values is not plain while a watch listens or a tally is active: `attend` has to announce it.
    """
    return (
        is_plain_pair(query, key, causal, scale)
        and ((listening.listener is None and not tallying.targets) or value is None)
        and (value is None or (is_plain(value) and query.get_device() == value.get_device()))
        and type(dropout) is float
        and dropout == 0.0
        and (window is None or (type(window) is int and 0 < window <= _LARGEST_INT))
        and (softcap is None or (type(softcap) is float and 0 < softcap <= LARGEST))
    )


def is_plain_pair(query: Tensor, key: Tensor, causal: bool | str, scale: float | Tensor | None) -> bool:
    """`is_plain_call` of a call without values, window, softcap and dropout."""
    return (
        not torch.compiler.is_compiling()
        and at_rest()
        and is_plain(query)
        and is_plain(key)
        and query.get_device() == key.get_device()
        and not _is_cast(query)  # a plain problem has one dtype
        and (scale is None or (type(scale) is float and abs(scale) <= LARGEST))
        and (causal is False or causal is True or (type(causal) is str and causal == "lower_right"))
    )


def plain_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    causal: bool | str,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Problem | None:
    """The problem of a plain call in 4 dimensions whose shapes and dtypes are valid; None for any other call."""
    dtype, shape, key_shape = query.dtype, query.shape, key.shape
    value_shape = key_shape if value is None else value.shape
    if not (len(shape) == len(key_shape) == len(value_shape) == 4 and dtype is key.dtype and dtype in FLOATS):
        return None
    batch, heads, rows, dim = shape
    key_batch, groups, keys, key_dim = key_shape
    if value_shape != (batch, groups, keys, value_shape[3]) or batch != key_batch or dim != key_dim:
        return None
    if 0 in shape or 0 in value_shape or heads % groups or not (value is None or value.dtype is dtype):
        return None
    if not (mask is None or _fits(mask, query.device, (batch, heads, rows, keys))):
        return None
    return unchecked_problem(query, key, value, mask, causal, scale, window, softcap)


def unchecked_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    mask: Tensor | None,
    causal: bool | str,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Problem:
    """The problem of a plain call in 4 dimensions, none of which is 0."""
    left, right = band(causal, window, query.shape[2], key.shape[2])
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return Problem(query, key, value, mask, None, None, None, scale, left, right, softcap, 0.0)


def _fits(mask: Tensor, device: torch.device, full: tuple[int, ...]) -> bool:
    return (
        isinstance(mask, Tensor)
        and is_plain(mask)
        and mask.device == device
        and mask.dtype in _MASKS
        and mask.dim() == 4
        and all(size in (1, wanted) for size, wanted in zip(mask.shape, full, strict=True))
    )


def band(causal: bool | str, window: int | None, rows: int, keys: int) -> tuple[int | None, int | None]:
    """Causal and window as one band: query i sees keys i - left … i + right. `find_band` in kernels/cpu/c/plain.c is the same."""
    offset = keys - rows if causal == "lower_right" else 0
    right = offset if causal else None
    if window is None:
        return None, right
    window = min(int(window), rows + keys)  # a larger window shows no more keys
    return window - 1 - offset, (window - 1 if right is None else right)
