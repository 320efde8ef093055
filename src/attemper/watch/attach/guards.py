"""Guards: what must hold of a call of SDPA, so that what an earlier pass showed of it holds too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._torch_private import (
    _get_tracing_state,
    _is_any_autocast_enabled,
    _is_torch_function_mode_enabled,
    may_be_rewritten,
    peek_interpreter_stack,
)
from ...operation.biases import causal_bias
from ..routes import sdpa
from ..routes.kind import kind_by_name
from .running import Frame, Pass
from .storages import address


class SDPAArguments(NamedTuple):
    """The arguments of torch's SDPA."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


def sdpa_arguments(*args: Any, **kwargs: Any) -> SDPAArguments | None:
    """SDPA's arguments by name; None if they are not tensors that can be read as they are."""
    try:
        given = SDPAArguments(*args, **kwargs)
    except TypeError:
        return None  # torch's own error is raised
    query, key, value, mask = given[:4]
    if mask is not None:
        meaning = causal_bias(mask)
        if meaning is True and not given.is_causal:  # torch gives the other kind to an op that only a full pass sees
            given, mask = given._replace(attn_mask=None, is_causal=True), None
    plain = type(query) in sdpa.PLAIN and type(key) in sdpa.PLAIN and type(value) in sdpa.PLAIN
    if not plain or not (mask is None or type(mask) in sdpa.PLAIN) or query.is_nested or query.is_meta:
        return None
    if peek_interpreter_stack() is not None or _get_tracing_state() is not None:
        return None
    if _is_any_autocast_enabled() and any(tensor is not None and _is_cached(tensor) for tensor in given[:4]):
        return None
    return None if _is_torch_function_mode_enabled() and may_be_rewritten() else given


def form_of(given: SDPAArguments | None) -> object:
    """What of SDPA's arguments decides which op it becomes; None if they cannot be read."""
    if given is None or sdpa.unreadable(given.query, given.key, given.attn_mask) is not None:
        return None
    query, key, value, mask, dropout, causal, _, grouped = given
    shape, others = query.shape, key.shape
    return (
        *(query.dtype, query.device.type, query.dim(), shape[-1], shape[-1] == value.shape[-1], shape[-2] == 1),
        *(shape[-3:-2] == others[-3:-2], shape[:-3] == others[:-3], dropout > 0, causal, grouped),
        None if mask is None else (mask.dtype, mask.requires_grad, mask.dim()),
    )


def signature_of(given: SDPAArguments, current: Pass, frame: Frame, sequences: tuple[int | None, int | None]) -> object:
    """Everything that the info of a call in this module depends on; None if it also depends on the modules around it."""
    query, key, value, mask, dropout, causal, scale, grouped = given
    shape, module, interfaced = query.shape, frame.module, current.interfaced
    if len(shape) != 4:
        return None
    shown = frame.kind or kind_by_name(frame.name, type(module).__name__) or address(query) == address(key)
    return (
        *(id(module), shown, shape, key.shape, value.shape[-1], query.dtype, query.device),
        *(dropout, causal, scale, grouped, sequences),
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
