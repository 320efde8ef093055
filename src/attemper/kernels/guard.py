"""guard(): whether a call may go straight to its kernel, or torch has to see it as an op."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._torch_private import _dispatch_keys, at_rest, is_autocast_on

PLAIN, RECORDED = 1, 2
_TYPES = (Tensor, torch.nn.Parameter)


def guard(*tensors: Any) -> int:
    """Whether a call is plain: ``PLAIN``, ``PLAIN | RECORDED`` if autograd records it, or 0 if it may be anything else.

    A plain call needs no op around its kernel: its tensors are dense memory on one device, not empty and of torch's own types; no
    mode, transform, trace, profiler or forward-mode derivative is active. The first tensor is the query; None stands for one
    that is not there. Ask ``torch.compiler.is_compiling()`` first: Dynamo cannot trace this. The native library has the same
    function, compiled.
    """
    given = [*tensors[:1], *(tensor for tensor in tensors[1:] if tensor is not None)]
    if not given or not at_rest() or not all(map(_is_memory, given)):
        return 0
    if len({tensor.device for tensor in given}) > 1 or _is_cast(given[0]):
        return 0
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in given):
        return PLAIN
    # a backward must not save what was made in inference mode
    return 0 if any(tensor.is_inference() for tensor in given) else PLAIN | RECORDED


def _is_memory(tensor: Any) -> bool:
    if type(tensor) not in _TYPES or not (tensor.is_cpu or tensor.is_cuda) or tensor.is_complex():
        return False
    # the dispatch keys show what the Python type does not: sparse layouts, wrappers, a lazy negation or conjugation
    return _dispatch_keys(tensor).raw_repr() in _plain_keys(tensor.device) and tensor.data_ptr() != 0


@cache
def _plain_keys(device: torch.device) -> frozenset[int]:
    """The dispatch keys of an ordinary dense tensor on this device, made outside and inside inference mode."""
    keys = set()
    for inference in (False, True):
        with torch.inference_mode(inference):
            keys.add(_dispatch_keys(torch.empty(0, device=device)).raw_repr())
    return frozenset(keys)


def _is_cast(query: Tensor) -> bool:
    device = query.device.type
    return is_autocast_on(device) and torch.get_autocast_dtype(device) != query.dtype
