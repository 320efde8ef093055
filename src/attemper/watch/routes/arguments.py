"""Arguments: those of torch's SDPA as an intercepted call has them, and what of them decides how it is read."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch_private import (
    _get_tracing_state,
    _is_any_autocast_enabled,
    may_be_rewritten,
    peek_interpreter_stack,
)
from ...operation.biases import causal_bias
from ..attach.running import Pass, running
from ..attach.storages import address
from . import sdpa as fused


class SDPAArguments(NamedTuple):
    """The arguments of SDPA."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def bound(*args: Any, **kwargs: Any) -> SDPAArguments | None:
    """SDPA's arguments by name; None if they are not tensors that can be read as they are."""
    try:
        given = SDPAArguments(*args, **kwargs)
    except TypeError:
        return None  # torch's own error is raised
    meaning = causal_bias(given.attn_mask)
    if meaning is True and not given.is_causal:  # torch gives the other kind to an op that only a full pass sees
        given = given._replace(attn_mask=None, is_causal=True)
    query, key, value, mask = given[:4]
    plain = type(query) in fused.PLAIN and type(key) in fused.PLAIN and type(value) in fused.PLAIN
    if not plain or not (mask is None or type(mask) in fused.PLAIN) or query.is_nested or query.is_meta:
        return None
    if _is_any_autocast_enabled() and any(tensor is not None and _is_cached(tensor) for tensor in given[:4]):
        return None
    return (
        None
        if may_be_rewritten() or peek_interpreter_stack() is not None or _get_tracing_state() is not None
        else given
    )


def form_of(given: SDPAArguments | None) -> object:
    """What of SDPA's arguments decides which op it becomes; None if they cannot be read."""
    if given is None or fused.unreadable(given.query, given.key, given.attn_mask) is not None:
        return None
    query, key, value, mask, dropout, causal, _, grouped = given
    shape, others = query.shape, key.shape
    return (
        *(query.dtype, query.device.type, query.dim(), shape[-1], shape[-1] == value.shape[-1], shape[-2] == 1),
        *(shape[-3:-2] == others[-3:-2], shape[:-3] == others[:-3], dropout > 0, causal, grouped),
        None if mask is None else (mask.dtype, mask.requires_grad, mask.dim()),
    )


def signature_of(given: SDPAArguments, current: Pass) -> object:
    """Everything that the facts of a call depend on; None if they also depend on the modules around it."""
    query, key, value, mask, dropout, causal, scale, grouped = given
    frame, shape, interfaced = running.frames[-1], query.shape, current.interfaced
    if len(shape) != 4:
        return None
    return (
        *(id(frame.module), frame.kind, shape, key.shape, value.shape[-1], query.dtype, query.device),
        *(dropout, causal, scale, grouped, address(query) == address(key)),
        current.sequences.of_call(query, key),
        None if mask is None else (mask.dtype, mask.requires_grad, mask.dim()),
        None if interfaced is None else interfaced.signature,
    )


def lowered(given: SDPAArguments) -> SDPAArguments:
    """The arguments as autocast gives them to the op."""
    dtype = torch.get_autocast_dtype(given.query.device.type)
    query, key, value = (_lower(tensor, dtype) for tensor in given[:3])
    mask = None if given.attn_mask is None else _lower(given.attn_mask, dtype)
    return given._replace(query=query, key=key, value=value, attn_mask=mask)


def _lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if _is_lowered(tensor, dtype) else tensor


def _is_lowered(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)


def _is_cached(tensor: Tensor) -> bool:
    """Whether autocast gives an op the copy of a parameter that it keeps; only the op shows that copy."""
    device = tensor.device.type
    if not (tensor.is_leaf and tensor.requires_grad and torch.is_autocast_enabled(device)):
        return False
    return _is_lowered(tensor, torch.get_autocast_dtype(device))
