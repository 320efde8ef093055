"""The routes of torch's fused attention: the SDPA ops, and the two ops of the encoder's and MHA's fast path.

A fast-path op takes the layer's input and weights, so its queries and keys are computed here a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import layer_norm, linear

from ..attach.modes import without_autograd_and_modes
from ..attach.running import Frame, running
from ..call import AttentionCall, CallInfo
from .handwritten.layout import heads_of
from .handwritten.slices import find_slices, heads_at, heads_beside
from .kind import kind_of

SDPA = (
    "scaled_dot_product_attention",  # one op in inference mode only; otherwise it arrives as one of these
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math_for_mps",
)
FLASH = "aten::_scaled_dot_product_flash_attention"
PLAIN = (Tensor, Parameter)
ENCODER = "_transformer_encoder_layer_fwd"
MHA = "_native_multi_head_attention"

Reader = Callable[[Any, tuple[Any, ...], dict[str, Any], tuple[Frame, ...]], AttentionCall | str | None]
"""Reads an op's arguments: returns the call, or what about its tensors cannot be measured, or None if it is not attention."""


def readers() -> dict[Any, Reader]:
    """Op → how its arguments are read as a call; ops that this torch lacks are left out."""
    reader_of: dict[Any, Reader] = {}
    for name, reader in ((ENCODER, _encoder), (MHA, _mha), *((name, _sdpa) for name in SDPA)):
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None:
            reader_of[packet.default] = reader
    return reader_of


@cache
def _parameters(func: Any) -> dict[str, Any]:
    """An op's arguments and their defaults, in order."""
    return {argument.name: argument.default_value for argument in func._schema.arguments}


def arguments_by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, defaults filled in."""
    parameters = _parameters(func)
    return {**parameters, **dict(zip(parameters, args, strict=False)), **kwargs}


def wrapped(cls: type) -> str:
    """The name of tensors whose class is not torch's plain one, for a sentence."""
    if cls.__name__ == "DTensor":
        return "DTensors; call attention on their to_local() to measure it"
    return f"{cls.__name__} objects"


def unreadable(*tensors: Tensor | None) -> str | None:
    """Why these tensors cannot be measured; None if they can."""
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN:
            return wrapped(type(tensor))
        if tensor.is_nested or tensor.is_meta:
            return "nested tensors" if tensor.is_nested else "meta tensors"
        if not tensor.numel():
            return "empty tensors"
    return None


def _sdpa(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frames: tuple[Frame, ...]) -> AttentionCall | str:
    given = arguments_by_name(func, args, kwargs)
    query, key = given["query"], given["key"]
    mask = given.get("attn_mask") if "attn_mask" in given else given.get("attn_bias")
    reason = unreadable(query, key, mask)
    if reason is not None:
        return reason
    if query.dim() < 3:
        return f"{query.dim()} dimensions"
    groups: int | None = 1
    if query.dim() == 3:
        groups = heads_of(frames, query.shape[0], query.shape[1])
        heads, named = groups or 1, heads_beside(frames, groups or 1)
        if named is not None and (some := heads_at(query, named, len(query), frames)) is not None:
            groups = heads = len(some)
        query, key = (tensor.unflatten(0, (-1, heads)) for tensor in (query, key))
        mask = mask if mask is None or mask.dim() < 3 else mask.unflatten(0, (-1, min(heads, mask.shape[0])))
    causal = given["is_causal"]
    if causal and func.name() == FLASH:
        causal = "lower_right"  # of this op alone; torch calls it where both corners are the same, and for a CausalBias
    call = _call("sdpa", frames, query, key, mask, causal, given["scale"], given["dropout_p"])
    call.heads_known, call.by_sdpa, call.value = groups is not None, True, given["value"]
    find_slices(call)
    return call


def _call(
    route: str,
    frames: tuple[Frame, ...],
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool | str,
    scale: float | None,
    dropout: float = 0.0,
) -> AttentionCall:
    kind = kind_of(frames, query, key, (query.shape[-2], key.shape[-2]))
    info = CallInfo.of(route, kind, query, key, scale=scale, causal=causal is not False, mask=mask, dropout=dropout)
    return AttentionCall(info, frames, query, key, mask=mask, causal=causal, scale=scale)


def _mha(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frames: tuple[Frame, ...]) -> AttentionCall | str:
    given = arguments_by_name(func, args, kwargs)
    source = given["query"]
    reason = unreadable(given["qkv_weight"], *(() if source.is_nested else (source, given["key"], given["mask"])))
    if reason is not None:
        return reason
    if source.data_ptr() != given["key"].data_ptr():
        return "keys that are not the queries"  # torch takes this path for self-attention only
    return _fused(given, frames)


def _encoder(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frames: tuple[Frame, ...]
) -> AttentionCall | str:
    given = arguments_by_name(func, args, kwargs)
    source = given["src"]
    reason = unreadable(given["qkv_weight"], *(() if source.is_nested else (source, given["mask"])))
    if reason is not None:
        return reason
    return _fused(given, _with_attention(frames))


def _with_attention(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """The fused layer does not call its attention module; its calls are recorded as that module's."""
    layer = frames[-1]
    inner = getattr(layer.module, "self_attn", None)
    if inner is None:
        return frames
    return (*frames, Frame(inner, f"{layer.name}.self_attn", ()))


def _fused(given: dict[str, Any], frames: tuple[Frame, ...]) -> AttentionCall:
    query, key, mask, keep = projected(given)
    current = running.current
    if current is not None and current.planned is None:
        # q and k are new tensors: they belong to the sequence of the op's input
        number = current.sequences.of(given["src"] if "src" in given else given["query"])
        for made in (query, key):
            current.sequences.put(made, number)
    call = _call("fused", frames, query, key, mask, False, None)
    call.rows, call.recomputed = keep, True
    return call


def projected(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The q and k of a fused op, computed a second time from its input and weights; its mask, and which rows count."""
    source, heads = (given["src"], given["num_heads"]) if "src" in given else (given["query"], given["num_head"])
    with without_autograd_and_modes(source.device.type):
        keep = None
        if given.get("norm_first"):
            width = given["norm_weight_1"].shape
            source = layer_norm(source, width, given["norm_weight_1"], given["norm_bias_1"], given["eps"])
        if source.is_nested:
            # TransformerEncoder packs padded sequences; real lengths are the rows that count
            lengths = torch.tensor([part.shape[0] for part in source.unbind()], device=source.device)
            source = source.to_padded_tensor(0.0)
            keep = torch.arange(source.shape[1], device=source.device) < lengths[:, None]
        batch, length, width = source.shape
        both = linear(source, given["qkv_weight"][: 2 * width], given["qkv_bias"][: 2 * width])
        query, key = both.view(batch, length, 2, heads, width // heads).permute(2, 0, 3, 1, 4).unbind()
        mask = given["mask"] if keep is None else keep[:, None, None, :]
        if keep is None and mask is not None:
            mask = _visible(mask, given["mask_type"], batch, length)
    return query, key, mask, keep


def form_of_fused(given: dict[str, Any]) -> object:
    """All arguments of a fused op that the info of its call depends on; None if they do not show these."""
    source, weight, mask = given.get("src", given.get("query")), given["qkv_weight"], given["mask"]
    if type(source) is not Tensor or type(weight) not in PLAIN or source.is_nested or source.is_meta:
        return None
    if "key" in given and given["key"] is not source:
        return None
    if mask is not None and (type(mask) is not Tensor or mask.dtype is not torch.bool):
        return None
    heads = given["num_heads"] if "num_heads" in given else given["num_head"]
    return source.shape, source.dtype, source.device, heads, None if mask is None else (mask.shape, given["mask_type"])


def _visible(mask: Tensor, mask_type: int | None, batch: int, length: int) -> Tensor:
    """The fast path's mask (True or -inf = hidden) as attemper's; type 0 is (L, L), 1 is (B, L), 2 is (B, H, L, L)."""
    shape = (1, 1, length, length) if mask.dim() == 2 and mask_type == 0 else (batch, 1, 1, length)
    mask = mask.reshape(shape) if mask.dim() == 2 else mask
    return ~mask if mask.dtype == torch.bool else mask
