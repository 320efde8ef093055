"""The input checks of MultiHeadAttention and their sentences."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..errors import InputError

NESTED = (
    "MultiHeadAttention(): a nested tensor is taken for self-attention alone, batch first and without masks. "
    "Pad it with to_padded_tensor(0.0), and hide the padding with key_padding_mask."
)


def check_heads(d_model: int, heads: int, kv_heads: int) -> None:
    for name, size in (("d_model", d_model), ("heads", heads), ("kv_heads", kv_heads)):
        if not isinstance(size, int) or size < 1:
            raise InputError(f"MultiHeadAttention(): `{name}` must be a whole number, at least 1; got {size!r}.")
    if d_model % heads:
        below = d_model // heads * heads
        widths = [str(width) for width in (below, below + heads) if width]
        raise InputError(
            f"MultiHeadAttention(): `d_model` (={d_model}) must be a multiple of `heads` (={heads}). "
            f"Use d_model={' or '.join(widths)}, or heads={_around(d_model, heads)}."
        )
    if heads % kv_heads:
        raise InputError(
            f"MultiHeadAttention(): `heads` (={heads}) must be a multiple of `kv_heads` (={kv_heads}). "
            f"Use kv_heads={_around(heads, kv_heads)}."
        )


def _around(number: int, wanted: int) -> str:
    """The divisors of a number on both sides of the wanted one."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    sides = [
        max((n for n in divisors if n < wanted), default=None),
        min((n for n in divisors if n > wanted), default=None),
    ]
    return " or ".join(str(n) for n in sides if n is not None)


def check_inputs(widths: Mapping[str, int], query: Tensor, key: Tensor, value: Tensor) -> None:
    for (name, width), tensor in zip(widths.items(), (query, key, value), strict=True):
        if not isinstance(tensor, Tensor):
            raise InputError(f"MultiHeadAttention(): `{name}` must be a torch.Tensor; got {type(tensor).__name__}.")
        if tensor.is_nested != query.is_nested or (tensor.is_nested and tensor is not query):
            raise InputError(NESTED)
        if tensor.dim() != query.dim() or query.dim() not in (2, 3):
            raise InputError(
                f"MultiHeadAttention(): `{name}` must be (L, d_model), or with a batch 3-d like `query`; "
                f"got shape {tuple(tensor.shape)}."
            )
        if not tensor.is_nested and tensor.shape[-1] != width:
            raise InputError(
                f"MultiHeadAttention(): `{name}` must be {width} wide; got {tensor.shape[-1]} (shape {tuple(tensor.shape)})."
            )
