"""Call: an attention call, every argument of it checked, as one 4-d `Problem`. The checks of its tensors are in shapes.py.

An error reads: where(): the argument, the rule, the value, the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError, nearest
from ..kernels.contract import HALVES, LARGEST, Problem, Request, band, savable
from ..scale import RULES
from ..vitals import DERIVED, SIGNS
from .biases import without_bias
from .parts.documents import check_documents
from .parts.sink import check_sink
from .shapes import (
    are_usual,
    as_4d,
    check_devices,
    check_dtypes,
    check_gain,
    check_mask,
    check_shapes,
    check_tensors,
    in_float32_for_gradients,
)

Signs = str | Iterable[str]
Offsets = Tensor | tuple[Tensor, Tensor] | None


class Call(NamedTuple):
    """A checked call: the problem for the kernel, the request that chooses the kernel, the signs, and the caller's shape."""

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
    documents: Offsets = None,
    sink: Tensor | None = None,
    signs: Signs = "all",
    torch_names: bool = False,
    no_value: str | None = None,
) -> Call:
    """Check a call and bring it to (B, H, L, E).

    Args:
        where: the name of the called function, for errors.
        torch_names: errors name the arguments as torch's SDPA does (`attn_mask`, `is_causal`, `dropout_p`).
        no_value: what the error tells the user to do if value is None; without it, value may be None.
    """
    names = check_signs(where, signs)
    spelt = _TORCH_NAMES if torch_names else {}
    dropout = check_dropout(where, dropout, spelt.get("dropout", "dropout"))
    usual = are_usual(query, key, value) and (value is not None or no_value is None)
    if not usual:
        query, key, value = check_tensors(where, query, key, value, no_value)
    dims = query.dim()
    if torch_names and not isinstance(causal, bool):
        raise InputError(
            f"{where}(): `is_causal` must be False or True; got {causal!r}. attention() takes 'lower_right'."
        )
    if mask is not None:
        sizes = None if documents is not None else (query.shape[-2], key.shape[-2])
        mask, causal = without_bias(where, spelt, mask, causal, sizes)
    if not usual:
        query, key, value = _autocast(query, key, value)
        check_dtypes(where, query, key, value)
    if not usual or mask is not None or isinstance(scale, Tensor):
        others = {spelt.get("mask", "mask"): mask, "scale": scale}
        check_devices(where, {"query": query, "key": key, "value": value, **others})
    query, key, value, mask, scale, sink = savable(query, key, value, mask, scale, sink)
    lead: tuple[int, ...]
    shape: tuple[int, ...]
    if usual:
        asked, lead, shape = query.dtype, (query.shape[0],), query.shape[:3]
    else:
        lead = check_shapes(where, query, key, value)
        asked = query.dtype
        if asked in HALVES and any(t is not None and tuple(t.shape[:-3]) != lead for t in (query, key, value)):
            query, key, value = in_float32_for_gradients(query, key, value)
        shape = (*lead, *query.shape[-3:-1]) if dims > 2 else query.shape[-2:-1]
        query, key, value = as_4d(query, lead), as_4d(key, lead), None if value is None else as_4d(value, lead)
    _, heads, rows, head_dim = query.shape
    keys = key.shape[2]
    if mask is not None:
        mask = check_mask(where, spelt.get("mask", "mask"), mask, lead, heads, rows, keys, dims=dims)
    gain = check_gain(where, scale, query, lead, dims) if isinstance(scale, Tensor) else None
    offsets = None if documents is None else check_documents(where, documents, query, keys, lead)
    sink = None if sink is None else check_sink(where, sink, query)
    from_end = offsets is not None and causal == "lower_right"  # each document is aligned by itself
    left, right = _check_band(where, from_end or causal, window, rows, keys)
    seed = torch.randint(2**62, (), dtype=torch.int64, device="cpu") if dropout else None
    scale = 1.0 if gain is not None else _check_scale(where, scale, head_dim)
    softcap = _check_softcap(where, softcap)
    tensors = (query, key, value, mask, gain, None, sink, offsets, seed)
    problem = Problem(*tensors, scale, left, right, softcap, dropout, from_end)
    value_dim = 0 if value is None else value.shape[3]
    return Call(problem, Request(query.device.type, asked, rows, keys, head_dim, value_dim), names, shape)


def check_signs(where: str, signs: Signs) -> tuple[str, ...]:
    """The stored signs to measure, in order; the name of a derived sign asks for those it is computed from."""
    if signs is SIGNS:
        return SIGNS
    if isinstance(signs, str):
        if signs == "all":
            return SIGNS
        signs = (signs,)
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


_TORCH_NAMES = {"mask": "attn_mask", "dropout": "dropout_p", "causal": "is_causal"}


def _autocast(query: Tensor, key: Tensor, value: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Under autocast torch's SDPA runs in the low dtype; so do we. float64 is left alone, as torch leaves it."""
    device = query.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # meta tensors know no autocast
        return query, key, value
    low = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(low) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(query), cast(key), None if value is None else cast(value)


def _check_scale(where: str, scale: object, head_dim: int) -> float:
    if type(scale) is float and abs(scale) <= LARGEST:
        return scale
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


def _check_band(
    where: str, causal: bool | str, window: int | None, rows: int, keys: int
) -> tuple[int | None, int | None]:
    """Causal and window as one band: query i sees keys i - left … i + right."""
    if causal is False and window is None:
        return None, None
    if isinstance(causal, str):
        if causal != "lower_right":
            raise InputError(
                f"{where}(): `causal` must be False, True (top-left) or 'lower_right'; got {causal!r}. "
                "Use 'lower_right' when the last query belongs to the last key (a KV cache)."
            )
    elif not isinstance(causal, bool):
        raise InputError(
            f"{where}(): `causal` must be False, True or 'lower_right'; got {causal!r}. Use causal=True for a decoder."
        )
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
    if type(dropout) is float and dropout == 0.0:
        return dropout
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= dropout <= 1:
        raise InputError(
            f"{where}(): `{name}` must be a probability from 0 to 1; got {_shown(dropout)}. Leave it out to drop nothing."
        )
    return float(dropout)
