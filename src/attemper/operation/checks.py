"""Every input check of the operation and its error; a call that passes them becomes one 4-d `Problem`.

An error reads: where(): the argument, the rule, the value, the next step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, nearest, nearest_divisors
from ..kernels.contract import FLOATS, HALVES, LARGEST, Problem, Request, may_get_gradients, measuring_dtype, savable
from ..scale import RULES
from ..vitals import DERIVED, SIGNS
from .plain import band

Signs = str | Iterable[str]

NO_VALUE = "For signs alone use measure(query, key)."


class Prepared(NamedTuple):
    """A checked call: the problem for a kernel, the request by which one is chosen, the signs, and the caller's own shape."""

    problem: Problem
    request: Request
    signs: tuple[str, ...]
    shape: tuple[int, ...]  # of a sign: (..., H, Lq)


def prepare(
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    signs: Signs = "all",
    torch_names: bool = False,
    no_value: str | None = None,
) -> Prepared:
    """Check a call and bring it to (B, H, L, E).

    Args:
        where: the called function, for errors; most arguments are its own.
        torch_names: it takes the arguments of torch's SDPA, by their names there.
        no_value: what to do when value is missing; None: it may be.
    """
    names = check_signs(where, signs)
    spelt = _TORCH_NAMES if torch_names else {}
    dropout = check_dropout(where, dropout, spelt.get("dropout", "dropout"))
    tensors = _tensors(where, query, key, value, no_value)
    query, key, value = _autocast(*tensors)
    _check_dtypes(where, query, key, value)
    _check_devices(where, {"query": query, "key": key, "value": value, spelt.get("mask", "mask"): mask, "scale": scale})
    query, key, value, mask, scale = savable(query, key, value, mask, scale)
    lead = _check_shapes(where, query, key, value)
    asked = query.dtype
    if asked in HALVES and any(t is not None and tuple(t.shape[:-3]) != lead for t in (query, key, value)):
        query, key, value = _rounded_once(query, key, value)
    rows, keys, head_dim = query.shape[-2], key.shape[-2], query.shape[-1]
    heads = query.shape[-3] if query.dim() > 2 else 1

    shape = (*lead, heads, rows) if query.dim() > 2 else (rows,)
    query, key, value = _four(query, lead), _four(key, lead), None if value is None else _four(value, lead)
    if mask is not None:
        mask = _check_mask(where, spelt.get("mask", "mask"), mask, lead, heads, rows, keys, dims=tensors[0].dim())
    gain = _check_gain(where, scale, query, lead, tensors[0]) if isinstance(scale, Tensor) else None
    if torch_names and not isinstance(causal, bool):
        raise InputError(
            f"{where}(): `is_causal` must be False or True; got {causal!r}. attention() takes 'lower_right'."
        )
    left, right = _check_band(where, causal, window, rows, keys)
    problem = Problem(
        query=query,
        key=key,
        value=value,
        mask=mask,
        gain=gain,
        weight=None,
        seed=None if not dropout else torch.randint(2**62, (), dtype=torch.int64, device="cpu"),
        scale=1.0 if gain is not None else _check_scale(where, scale, head_dim),
        left=left,
        right=right,
        softcap=_check_softcap(where, softcap),
        dropout=dropout,
    )
    value_dim = 0 if value is None else value.shape[-1]
    request = Request(query.device.type, asked, rows=rows, keys=keys, head_dim=head_dim, value_dim=value_dim)
    return Prepared(problem, request, names, shape)


def broadcast_like_torch(
    where: str, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """What torch's SDPA broadcasts beyond `attention()`: missing leading dimensions, and heads of 1 against many."""
    _tensors(where, query, key, value, NO_VALUE)
    dims = max(query.dim(), key.dim(), value.dim())
    query, key, value = (t.reshape((1,) * (dims - t.dim()) + tuple(t.shape)) for t in (query, key, value))
    if dims < 3:
        return query, key, value
    heads, groups, value_groups = query.shape[-3], key.shape[-3], value.shape[-3]
    if enable_gqa:
        if groups != value_groups and groups and value_groups and heads % (both := math.lcm(groups, value_groups)) == 0:
            query, key, value = _rounded_once(query, key, value)
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
        query, key, value = _rounded_once(query, key, value)
    if heads != full:
        query = query.expand(*query.shape[:-3], full, *query.shape[-2:])
    if groups != value_groups:
        key = key.expand(*key.shape[:-3], full, *key.shape[-2:])
        value = value.expand(*value.shape[:-3], full, *value.shape[-2:])
    return query, key, value


def _rounded_once(query: Tensor, key: Tensor, value: Any) -> tuple[Tensor, Tensor, Any]:
    """In float32 where a gradient may arrive: that of a half-precision input which is repeated is a sum, rounded at its end."""
    same = all(t is None or t.dtype == query.dtype for t in (key, value))
    # autocast would lower them again, perhaps to another half
    lowered = query.device.type != "meta" and torch.is_autocast_enabled(query.device.type)
    if query.dtype not in HALVES or not same or lowered or not may_get_gradients(query, key, value):
        return query, key, value
    return query.float(), key.float(), None if value is None else value.float()


def check_signs(where: str, signs: Signs) -> tuple[str, ...]:
    """The stored signs to measure, in order; the name of a derived sign asks for those it is computed from."""
    if isinstance(signs, str):
        signs = SIGNS if signs == "all" else (signs,)
    elif not isinstance(signs, Iterable) or isinstance(signs, Tensor):
        raise InputError(
            f"{where}(): `signs` must be 'all', a sign's name or several; got {_shown(signs)}. Use signs=() for none."
        )
    wanted: set[str] = set()
    for name in signs:
        if not isinstance(name, str):
            raise InputError(f"{where}(): `signs` must hold names; got {type(name).__name__}. Use signs='all'.")
        if name in DERIVED:
            wanted.update(DERIVED[name])
        elif name in SIGNS:
            wanted.add(name)
        else:
            raise InputError(f"{where}(): unknown sign {name!r} in `signs`. {nearest(name, ('all', *SIGNS, *DERIVED))}")
    return tuple(name for name in SIGNS if name in wanted)


def _shown(thing: object) -> str:
    return type(thing).__name__ if isinstance(thing, Tensor) else repr(thing)


_TORCH_NAMES = {"mask": "attn_mask", "dropout": "dropout_p"}


def _tensors(
    where: str, query: Tensor, key: Tensor, value: Tensor | None, no_value: str | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is None and name == "value":
            if no_value is None:
                continue
            raise InputError(f"{where}(): `value` must be a torch.Tensor; got None. {no_value}")
        if not isinstance(tensor, Tensor):
            raise InputError(f"{where}(): `{name}` must be a torch.Tensor; got {type(tensor).__name__}.")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise InputError(
                f"{where}(): `{name}` must be a dense tensor; got {'nested' if tensor.is_nested else tensor.layout}. "
                "Pad it, and hide the padding with a mask."
            )
        if tensor.dim() < 2:
            raise InputError(
                f"{where}(): `{name}` must have at least 2 dimensions, (..., length, dim); got shape {tuple(tensor.shape)}."
            )
    return query, key, value


def _autocast(query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Under autocast torch's SDPA runs in the low dtype; so do we. float64 is left alone, as torch leaves it."""
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors know no autocast
        return query, key, value
    low = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(low) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(query), cast(key), None if value is None else cast(value)


def _check_dtypes(where: str, query: Tensor, key: Tensor, value: Tensor | None) -> None:
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


def _check_devices(where: str, tensors: dict[str, object]) -> None:
    home = tensors["query"].device  # type: ignore[attr-defined]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.device == home:
            continue
        if name == "scale" and tensor.dim() == 0 and tensor.device.type == "cpu":
            continue
        raise InputError(
            f"{where}(): `{name}` must be on query's device {home}; got {tensor.device}. Use {name}.to({str(home)!r})."
        )


def _check_shapes(where: str, query: Tensor, key: Tensor, value: Tensor | None) -> tuple[int, ...]:
    """The leading shape before (H, L, E), broadcast over query, key and value."""
    parts = [("query", query), ("key", key)] + ([("value", value)] if value is not None else [])
    for name, tensor in parts:
        if tensor.dim() != query.dim():
            raise InputError(
                f"{where}(): `{name}` must have {query.dim()} dimensions like `query`; got shape {tuple(tensor.shape)}."
            )
    if key.shape[-1] != query.shape[-1]:
        raise InputError(
            f"{where}(): `key` must have head dim {query.shape[-1]} like `query`; "
            f"got {key.shape[-1]} (shape {tuple(key.shape)})."
        )
    if value is not None and value.shape[-2] != key.shape[-2]:
        raise InputError(
            f"{where}(): `value` must have length {key.shape[-2]} like `key`; "
            f"got {value.shape[-2]} (shape {tuple(value.shape)})."
        )
    if query.dim() > 2:
        _check_heads(where, query, key, value)
    lead: list[int] = []
    for place in range(query.dim() - 3):
        size = query.shape[place]
        for name, tensor in parts[1:]:
            if size == 1:
                size = tensor.shape[place]
            elif tensor.shape[place] != 1 and tensor.shape[place] != size:
                raise InputError(
                    f"{where}(): `{name}` must have query's leading dimensions {tuple(query.shape[:-3])} or 1s; "
                    f"got {tuple(tensor.shape[:-3])}."
                )
        lead.append(size)
    return tuple(lead)


def _check_heads(where: str, query: Tensor, key: Tensor, value: Tensor | None) -> None:
    heads, groups = query.shape[-3], key.shape[-3]
    if value is not None and value.shape[-3] != groups:
        raise InputError(f"{where}(): `value` must have {groups} heads like `key`; got {value.shape[-3]}.")
    if groups == heads or (groups and heads and heads % groups == 0):
        return
    around = nearest_divisors(heads, groups)
    raise InputError(
        f"{where}(): query heads (={heads}) must be a multiple of key heads (={groups}). "
        f"Use {' or '.join(map(str, around))} key/value heads."
    )


def _four(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    if tensor.dim() == 2:
        return tensor[None, None]
    if tensor.dim() == 3:
        return tensor[None]
    if tuple(tensor.shape[:-3]) != lead:
        tensor = tensor.expand(*lead, *tensor.shape[-3:])
    return tensor if tensor.dim() == 4 else tensor.flatten(0, -4)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    # `==` and not `in`: under torch.compile a size may be symbolic
    return len(shape) == len(full) and all(
        size == 1 or size == wanted for size, wanted in zip(shape, full, strict=True)
    )


def _check_mask(
    where: str, name: str, mask: Tensor, lead: tuple[int, ...], heads: int, rows: int, keys: int, dims: int
) -> Tensor:
    """The mask as 4 dimensions, each full or 1: up to four, what it repeats is not copied."""
    if not isinstance(mask, Tensor):
        raise InputError(f"{where}(): `{name}` must be a torch.Tensor; got {type(mask).__name__}.")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f"{where}(): `{name}` must be boolean (True = keep) or floating point (added to the logits); "
            f"got {mask.dtype}. Use {name}.bool()."
        )
    full = (*lead, heads, rows, keys) if dims > 2 else (rows, keys)
    padded = (1,) * (len(full) - mask.dim()) + tuple(mask.shape)
    if not _broadcasts(padded, full):
        hint = (
            f" For a (B, Lk) padding mask pass {name}[:, None, None, :]." if mask.dim() == 2 and len(full) == 4 else ""
        )
        raise InputError(f"{where}(): `{name}` must broadcast to {full}; got {tuple(mask.shape)}.{hint}")
    mask = mask.reshape(padded)
    if mask.dim() <= 4:
        return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if all(size == 1 for size in padded[:-3]):
        return mask.reshape(1, *padded[-3:])
    return mask.expand(*lead, *padded[-3:]).flatten(0, -4)


def _check_scale(where: str, scale: object, head_dim: int) -> float:
    if scale is None:
        return float(head_dim) ** -0.5 if head_dim else 1.0  # a traced size would be rounded to float32
    try:
        number = float(scale)  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError):
        way = f"{head_dim}**-0.5 for 1/sqrt({head_dim})"
        if isinstance(scale, str) and scale in RULES:
            way = f"attemper.rule({scale!r}).scale(head_dim={head_dim})"
        raise InputError(f"{where}(): `scale` must be a number, a tensor or None; got {scale!r}. Use {way}.") from None
    if not abs(number) <= LARGEST:
        raise InputError(f"{where}(): `scale` must be finite; got {number}. Leave it out for 1/sqrt({head_dim}).")
    return number


def _check_gain(where: str, scale: Tensor, query: Tensor, lead: tuple[int, ...], asked: Tensor) -> Tensor:
    """A scale tensor as one factor per row, (B, H, Lq)."""
    heads, rows = query.shape[1], query.shape[2]
    if not scale.is_floating_point():
        raise InputError(f"{where}(): a `scale` tensor must be floating point; got {scale.dtype}. Use scale.float().")
    gain = scale.to(query.device, measuring_dtype(query.dtype))
    if gain.numel() == 1 and gain.dim() < 2:
        return gain.reshape(()).expand(query.shape[:3])
    if gain.dim() == 1 and gain.shape[0] == heads:
        return gain.view(1, heads, 1).expand(query.shape[:3])
    full = (*lead, heads, rows, 1) if asked.dim() > 2 else (rows, 1)
    padded = (1,) * (len(full) - gain.dim()) + tuple(gain.shape)
    if gain.dim() < 2 or not _broadcasts(padded, full):
        raise InputError(
            f"{where}(): a `scale` tensor must have shape (), ({heads},) for one number per head, or broadcast to {full}; "
            f"got {tuple(gain.shape)}."
        )
    return gain.reshape(padded).expand(full).reshape(query.shape[:3])


def _check_band(
    where: str, causal: bool | str, window: int | None, rows: int, keys: int
) -> tuple[int | None, int | None]:
    """Causal and window as one band: query i sees keys i - left … i + right."""
    if isinstance(causal, str):
        if causal != "lower_right":
            raise InputError(
                f"{where}(): `causal` must be False, True (top-left) or 'lower_right'; got {causal!r}. "
                "Use 'lower_right' when the last query belongs to the last key (a KV cache)."
            )
    elif not isinstance(causal, bool):
        raise InputError(f"{where}(): `causal` must be False, True or 'lower_right'; got {causal!r}.")
    if window is not None and (
        isinstance(window, bool) or not isinstance(window, (Integral, torch.SymInt)) or window < 1
    ):
        raise InputError(
            f"{where}(): `window` must be a whole number of keys, at least 1; got {window!r}. Leave it out for no window."
        )
    return band(causal, window, rows, keys)


def _check_softcap(where: str, softcap: float | None) -> float | None:
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, Real) or not 0 < softcap <= LARGEST:
        raise InputError(
            f"{where}(): `softcap` must be a finite number above 0; got {softcap!r}. Leave it out for no cap (Gemma 2 uses 50)."
        )
    return float(softcap)


def check_dropout(where: str, dropout: float, name: str = "dropout") -> float:
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= dropout <= 1:
        raise InputError(f"{where}(): `{name}` must be a probability from 0 to 1; got {_shown(dropout)}.")
    return float(dropout)
