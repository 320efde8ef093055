"""Biases: masks whose class answers for torch. A CausalBias is read as what it means to torch; any other is refused."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from .._torch_private import _disabled_torch_function_impl
from ..errors import InputError


def answers_for_torch(mask: object) -> bool:
    """Whether a tensor's class overrides `__torch_function__`: what torch's SDPA does with it is then up to that class."""
    if type(mask) is Tensor:  # while torch 2.15 compiles, a plain tensor's function is another object
        return False
    given = getattr(type(mask), "__torch_function__", None)
    if not isinstance(mask, Tensor) or given is _disabled_torch_function_impl:
        return False
    return getattr(given, "__func__", given) is not Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def causal_bias(mask: object) -> bool | str | None:
    """What a `torch.nn.attention.bias.CausalBias` means, as a value of `causal`; None for any other mask.

    Its memory holds no numbers. To torch a square one is causal from the top left, whichever corner it names.
    """
    library = sys.modules.get("torch.nn.attention.bias")  # there is no such mask before someone imports this
    variant = getattr(mask, "variant", None)  # views of such a mask have none
    if library is None or type(mask) is not library.CausalBias or variant is None:
        return None
    bias: Any = mask
    if variant == library.CausalVariant.UPPER_LEFT or bias.seq_len_q == bias.seq_len_kv:
        return True
    return "lower_right"


def _if_it_holds_them(name: str, mask: object) -> str:
    if type(mask).__name__ == "CausalBias":  # a view of one
        return ", or the whole CausalBias"
    return f", or {name}.as_subclass(torch.Tensor) if it holds them"


def without_bias(
    where: str, names: dict[str, str], mask: Tensor | None, causal: bool | str, sizes: tuple[int, int] | None
) -> tuple[Tensor | None, bool | str]:
    """The mask and `causal` of a call; a CausalBias becomes the latter. `names` are those of the arguments, for errors.

    `sizes` are how many queries and keys there are, None if these are cut into documents."""
    if not answers_for_torch(mask):
        return mask, causal
    name, other, meaning = names.get("mask", "mask"), names.get("causal", "causal"), causal_bias(mask)
    bias: Any = mask
    if meaning is None:
        raise InputError(
            f"{where}(): `{name}` must hold its values itself; got {type(mask).__name__}, whose class decides what torch does "
            f"with it. Pass a boolean tensor, in which True keeps a key{_if_it_holds_them(name, mask)}."
        )
    if causal:
        raise InputError(
            f"{where}(): `{name}` is a CausalBias, which is causal by itself; got {other}={causal!r} too. Leave {other} out."
        )
    if sizes is None:
        raise InputError(
            f"{where}(): a CausalBias aligns all queries with all keys, not those of each of `documents`. "
            "Pass causal=True or causal='lower_right' in place of it."
        )
    if meaning == "lower_right" and (bias.seq_len_q, bias.seq_len_kv) != sizes:
        raise InputError(
            f"{where}(): `{name}` is a CausalBias for {bias.seq_len_q} queries and {bias.seq_len_kv} keys; "
            f"got {sizes[0]} and {sizes[1]}. Use causal_lower_right{sizes}."
        )
    return None, meaning
