"""The input checks of the modules and their sentences."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..errors import InputError, nearest_divisors
from ..operation.biases import answers_for_torch

NESTED = (
    "MultiHeadAttention(): a nested tensor is accepted only for self-attention, batch first and without masks. "
    "Pad it with to_padded_tensor(0.0), and hide the padding with key_padding_mask."
)


def check_counts(where: str, least: int = 1, **counts: object) -> None:
    """Each must be a whole number; None is left to the caller."""
    for name, count in counts.items():
        if count is None:
            continue
        if isinstance(count, bool) or not isinstance(count, Integral) or int(count) < least:
            raise InputError(
                f"{where}: `{name}` must be a whole number, at least {least}; got {count!r}. Use {name}={_USUAL[name]}."
            )


_USUAL = {
    "d_model": 512, "heads": 8, "kv_heads": 8, "kdim": 512, "vdim": 512, "layer": 0, "hidden": 128, "key_dim": 512
}  # fmt: skip


def check_heads(d_model: int, heads: int, kv_heads: int) -> None:
    if d_model % heads:
        below = d_model // heads * heads
        widths = [str(width) for width in (below, below + heads) if width]
        raise InputError(
            f"MultiHeadAttention(): `d_model` (={d_model}) must be a multiple of `heads` (={heads}). "
            f"Use d_model={' or '.join(widths)}, or heads={_either(d_model, heads)}."
        )
    if heads % kv_heads:
        raise InputError(
            f"MultiHeadAttention(): `heads` (={heads}) must be a multiple of `kv_heads` (={kv_heads}). "
            f"Use kv_heads={_either(heads, kv_heads)}."
        )


def _either(number: int, wanted: int) -> str:
    return " or ".join(map(str, nearest_divisors(number, wanted)))


def check_torch_module(module: object) -> None:
    # a parametrised module has a class of its own, made under way
    if type(module) is not nn.MultiheadAttention and not is_parametrized(module):  # type: ignore[arg-type]
        raise InputError(
            f"from_torch(): `module` must be a torch.nn.MultiheadAttention; got {type(module).__name__}. "
            "For another attention build MultiHeadAttention(d_model, heads) and load a state dict."
        )


def check_plain(module: nn.MultiheadAttention, expected: set[str]) -> None:
    """Only a module whose parameters are where torch's constructor put them can be taken over."""
    names = {name for name, _ in module.named_parameters(recurse=False)}
    if names != expected:
        raise InputError(
            "from_torch(): `module` must hold its own weights; this one computes them (parametrised or pruned): it has "
            f"{', '.join(sorted(names))} where {', '.join(sorted(expected))} are needed. Make them plain first, with "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove."
        )


def check_inputs(
    where: str, widths: Mapping[str, int | None], inputs: Mapping[str, Tensor], batch_dim: int, order: str = ""
) -> None:
    """Tensors of one number of dimensions, 2 or 3; of the widths given; one batch; as many values as keys."""
    query = inputs["query"]
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            raise InputError(
                f"{where}: `{name}` must be a torch.Tensor; got {type(tensor).__name__}. Use torch.as_tensor({name})."
            )
        if tensor.is_nested != query.is_nested or (tensor.is_nested and tensor is not query):
            raise InputError(NESTED)
        if tensor.dim() != query.dim() or query.dim() not in (2, 3):
            raise InputError(
                f"{where}: `{name}` must be (length, width), or 3-d with a batch, and all with the same number of dimensions; "
                f"got shape {tuple(tensor.shape)}. Use {name}.unsqueeze({batch_dim}) to add a batch."
            )
        width = widths[name]
        if not tensor.is_nested and width is not None and tensor.shape[-1] != width:
            raise InputError(
                f"{where}: `{name}` must be {width} wide; got {tensor.shape[-1]} (shape {tuple(tensor.shape)}). "
                f"Give the constructor its width, or project it."
            )
    if query.is_nested:
        return
    key, value = inputs["key"], inputs["value"]
    if query.dim() == 3:
        for name, tensor in inputs.items():
            if tensor.shape[batch_dim] != query.shape[batch_dim]:
                raise InputError(
                    f"{where}: `{name}` must have query's batch of {query.shape[batch_dim]}; got {tensor.shape[batch_dim]} "
                    f"(shape {tuple(tensor.shape)}). The batch is dimension {batch_dim}{order}."
                )
    length = -2 if query.dim() == 2 or batch_dim == 0 else 0
    if key.shape[length] != value.shape[length]:
        raise InputError(
            f"{where}: `value` must have length {key.shape[length]} like `key`; got {value.shape[length]} "
            f"(shape {tuple(value.shape)}). Each key has one value."
        )


def check_mask(where: str, name: str, mask: object, true: str) -> None:
    if not isinstance(mask, Tensor):
        raise InputError(
            f"{where}: `{name}` must be a torch.Tensor; got {type(mask).__name__}. Use torch.as_tensor({name})."
        )
    if answers_for_torch(mask):
        raise InputError(
            f"{where}: `{name}` must hold its values itself; got {type(mask).__name__}, whose class decides what torch does with "
            f"it. Pass a boolean tensor (True = {true})."
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise InputError(
            f"{where}: `{name}` must be boolean (True = {true}) or floating point (added to the logits); "
            f"got {mask.dtype}. Use {name}.bool()."
        )
