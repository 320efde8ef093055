"""The checks of the tensors of a call: types, dtypes, devices and shapes; and how they are broadcast to 4 dimensions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._torch_private import _is_any_autocast_enabled
from ..errors import InputError, nearest_divisors
from ..kernels.contract import FLOATS, HALVES, may_get_gradients, measuring_dtype

PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
NO_VALUE = "For signs alone use measure(query, key)."


def are_usual(query: Tensor, key: Tensor, value: Tensor | None) -> bool:
    """Whether they are certainly valid, dense and (B, H, L, E): then most of the checks below are left out.

    Not in a traced graph, where each comparison of sizes may become one of its conditions.
    """
    given = (query, key) if value is None else (query, key, value)
    if torch.compiler.is_compiling() or not PLAIN_TYPES.issuperset(map(type, given)) or _is_any_autocast_enabled():
        return False
    if any(t.layout is not torch.strided or t.is_nested for t in given):  # a nested tensor has no shape
        return False
    shape, key_shape, dtype, device = query.shape, key.shape, query.dtype, query.device
    if not (len(shape) == len(key_shape) == 4 and dtype in FLOATS and key.dtype is dtype and key.device == device):
        return False
    batch, groups, keys, dim = key_shape
    heads = shape[1]
    if shape[0] != batch or shape[3] != dim or (heads != groups and not (groups and heads and heads % groups == 0)):
        return False
    return value is None or (
        value.dim() == 4
        and value.shape[:3] == (batch, groups, keys)
        and value.dtype is dtype
        and value.device == device
    )


def check_tensors(
    where: str, query: Tensor, key: Tensor, value: Tensor | None, no_value: str | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is None and name == "value":
            if no_value is None:
                continue
            raise InputError(f"{where}(): `value` must be a torch.Tensor; got None. {no_value}")
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"{where}(): `{name}` must be a torch.Tensor; got {type(tensor).__name__}. Use torch.as_tensor({name})."
            )
        if tensor.is_nested or tensor.layout != torch.strided:
            raise InputError(
                f"{where}(): `{name}` must be a dense tensor; got {'nested' if tensor.is_nested else tensor.layout}. "
                "Pad it, and hide the padding with a mask."
            )
        if tensor.dim() < 2:
            raise InputError(
                f"{where}(): `{name}` must have at least 2 dimensions, (..., length, dim); got shape {tuple(tensor.shape)}. "
                f"Use {name}.unsqueeze(0) for a single vector."
            )
    return query, key, value


def check_dtypes(where: str, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    if query.dtype not in FLOATS:
        raise InputError(
            f"{where}(): `query` must be float16, bfloat16, float32 or float64; got {query.dtype}. Use query.float()."
        )
    for name, tensor in (("key", key), ("value", value)):
        if tensor is not None and tensor.dtype != query.dtype:
            raise InputError(
                f"{where}(): `{name}` must have query's dtype {query.dtype}; got {tensor.dtype}. "
                f"Use {name}.to(query.dtype)."
            )


def check_devices(where: str, tensors: dict[str, object]) -> None:
    home = tensors["query"].device  # type: ignore[attr-defined]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.device == home:
            continue
        if name == "scale" and tensor.dim() == 0 and tensor.device.type == "cpu":
            continue
        raise InputError(
            f"{where}(): `{name}` must be on query's device {home}; got {tensor.device}. Use {name}.to({str(home)!r})."
        )


def check_shapes(where: str, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[int, ...]:
    """The leading shape before (H, L, E), broadcast over query, key and value."""
    parts = [("query", query), ("key", key)] + ([("value", value)] if value is not None else [])
    for name, tensor in parts:
        if tensor.dim() != query.dim():
            raise InputError(
                f"{where}(): `{name}` must have {query.dim()} dimensions like `query`; got shape {tuple(tensor.shape)}. "
                f"Use {name if tensor.dim() < query.dim() else 'query'}.unsqueeze(0) to add one."
            )
    if key.shape[-1] != query.shape[-1]:
        raise InputError(
            f"{where}(): `key` must have head dim {query.shape[-1]} like `query`; "
            f"got {key.shape[-1]} (shape {tuple(key.shape)}). Project both to the same width."
        )
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise InputError(
            f"{where}(): `value` must have length {key.shape[-2]} like `key`; "
            f"got {value.shape[-2]} (shape {tuple(value.shape)}). Pass one value for each key."
        )
    if query.dim() > 2:
        _check_heads(where, query, key, value)
    lead: list[int] = []
    for index in range(query.dim() - 3):
        size = query.shape[index]
        for name, tensor in parts[1:]:
            if size == 1:
                size = tensor.shape[index]
            elif tensor.shape[index] != 1 and tensor.shape[index] != size:
                raise InputError(
                    f"{where}(): `{name}` must have query's leading dimensions {tuple(query.shape[:-3])} or 1s; "
                    f"got {tuple(tensor.shape[:-3])}. Pass one {name} for each query, or one for all."
                )
        lead.append(size)
    return tuple(lead)


def _check_heads(where: str, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    heads, groups = query.shape[-3], key.shape[-3]
    if value is not None and value.shape[-3] != groups:
        raise InputError(
            f"{where}(): `value` must have {groups} heads like `key`; got {value.shape[-3]}. "
            "Project both to the same number of heads."
        )
    if groups == heads or (groups and heads and heads % groups == 0):
        return
    for name, count in (("query", heads), ("key", groups)):
        if not count:
            raise InputError(
                f"{where}(): `{name}` has no heads: its third dimension from the end is 0. Pass at least one."
            )
    around = nearest_divisors(heads, groups)
    raise InputError(
        f"{where}(): query heads (={heads}) must be a multiple of key heads (={groups}). "
        f"Use {' or '.join(map(str, around))} key/value heads."
    )


def check_mask(
    where: str, name: str, mask: Tensor, lead: tuple[int, ...], heads: int, rows: int, keys: int, dims: int
) -> Tensor:
    """The mask in 4 dimensions, each of full size or 1. Only a mask with more dimensions is expanded, and copied."""
    if not isinstance(mask, Tensor):
        way = "Pass a boolean tensor, in which True keeps a key."
        if type(mask).__name__ == "BlockMask":
            way = "torch.nn.attention.flex_attention.create_mask makes a tensor of its mask_mod."
        raise InputError(f"{where}(): `{name}` must be a torch.Tensor; got {type(mask).__name__}. {way}")
    if mask.layout is not torch.strided:
        raise InputError(f"{where}(): `{name}` must be a dense tensor; got {mask.layout}. Use {name}.to_dense().")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f"{where}(): `{name}` must be boolean (True = keep) or floating point (added to the logits); "
            f"got {mask.dtype}. Use {name}.bool()."
        )
    full = (*lead, heads, rows, keys) if dims > 2 else (rows, keys)
    padded = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
    if not _broadcasts(padded, full):
        hint = "Its last two dimensions are queries and keys."
        if mask.dim() == 2 and len(full) == 4:
            hint = f"For a (B, Lk) padding mask pass {name}[:, None, None, :]."
        elif mask.dim() > len(full):
            hint = f"Remove its first dimension: {name}[0]."
        raise InputError(f"{where}(): `{name}` must broadcast to {full}; got {tuple(mask.shape)}. {hint}")
    mask = mask.reshape(padded)
    if mask.dim() <= 4:
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if all(size == 1 for size in padded[:-3]):
        return mask.reshape(1, *padded[-3:])
    return mask.expand(*lead, *padded[-3:]).flatten(0, -4)


def check_gain(where: str, scale: Tensor, query: Tensor, lead: tuple[int, ...], dims: int) -> Tensor:
    """A scale tensor as one factor per row, (B, H, Lq)."""
    heads, rows = query.shape[1], query.shape[2]
    if not scale.is_floating_point():
        raise InputError(f"{where}(): a `scale` tensor must be floating point; got {scale.dtype}. Use scale.float().")
    if scale.layout is not torch.strided:
        raise InputError(f"{where}(): a `scale` tensor must be dense; got {scale.layout}. Use scale.to_dense().")
    gain = scale.to(query.device, measuring_dtype(query.dtype))
    if gain.numel() == 1 and gain.dim() < 2:
        return gain.reshape(()).expand(query.shape[:3])
    if gain.dim() == 1 and gain.shape[0] == heads:
        return gain.view(1, heads, 1).expand(query.shape[:3])
    full = (*lead, heads, rows, 1) if dims > 2 else (rows, 1)
    padded = (1,) * (len(full) - gain.dim()) + tuple(gain.shape)
    if gain.dim() < 2 or not _broadcasts(padded, full):
        raise InputError(
            f"{where}(): a `scale` tensor must have shape (), ({heads},) for one number per head, or broadcast to {full}; "
            f"got {tuple(gain.shape)}. Begin with torch.ones({heads}) for one per head."
        )
    return gain.reshape(padded).expand(full).reshape(query.shape[:3])


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    # `==` and not `in`: under torch.compile a size may be symbolic
    return len(shape) == len(full) and all(
        size == 1 or size == wanted for size, wanted in zip(shape, full, strict=True)
    )


def as_4d(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    if tensor.dim() == 2:
        return tensor[None, None]
    if tensor.dim() == 3:
        return tensor[None]
    if tuple(tensor.shape[:-3]) != lead:
        tensor = tensor.expand(*lead, *tensor.shape[-3:])
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


def broadcast_like_torch(
    where: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast as torch's SDPA does and `attention()` does not: missing leading dimensions, and one head against many."""
    check_tensors(where, query, key, value, NO_VALUE)
    dims = max(query.dim(), key.dim(), value.dim())
    query, key, value = (t.reshape((1,) * (dims - t.dim()) + tuple(t.shape)) for t in (query, key, value))
    if dims < 3:
        return query, key, value
    heads, groups, value_groups = query.shape[-3], key.shape[-3], value.shape[-3]
    if enable_gqa:
        if groups != value_groups and groups and value_groups and heads % (both := math.lcm(groups, value_groups)) == 0:
            query, key, value = in_float32_for_gradients(query, key, value)
            key = key.repeat_interleave(both // groups, dim=-3)
            value = value.repeat_interleave(both // value_groups, dim=-3)
        return query, key, value
    full = max(heads, groups, value_groups)
    if any(size != 1 and size != full for size in (heads, groups, value_groups)):
        raise InputError(
            f"{where}(): `query`, `key` and `value` must have the same number of heads; "
            f"got {heads}, {groups} and {value_groups}. For grouped-query attention pass enable_gqa=True."
        )
    if heads != full or groups != value_groups:
        query, key, value = in_float32_for_gradients(query, key, value)
    if heads != full:
        query = query.expand(*query.shape[:-3], full, *query.shape[-2:])
    if groups != value_groups:
        key = key.expand(*key.shape[:-3], full, *key.shape[-2:])
        value = value.expand(*value.shape[:-3], full, *value.shape[-2:])
    return query, key, value


def in_float32_for_gradients(query: Tensor, key: Tensor, value: Any) -> tuple[Tensor, Tensor, Any]:
    """The inputs in float32 if a gradient may arrive: that of a repeated input is a sum, which is rounded once, at its end."""
    same = all(t is None or t.dtype == query.dtype for t in (key, value))
    # autocast would cast them down again, perhaps to the other half-precision dtype
    lowered = query.device.type != "meta" and torch.is_autocast_enabled(query.device.type)
    if query.dtype not in HALVES or not same or lowered or not may_get_gradients(query, key, value):
        return query, key, value
    return query.float(), key.float(), None if value is None else value.float()
