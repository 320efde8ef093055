"""Jagged: SDPA on torch's jagged tensors, whose sequences lie one after another: one call, with their offsets as documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import raise_if_false
from ...errors import InputError

_OTHER_SEQUENCES = "sdpa(): a jagged `value` must have the sequences of `key`. Pass one value for each key."


def is_jagged(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.is_nested and tensor.layout == torch.jagged


def attend_sequences(run: Callable[..., Tensor], query: Any, key: Any, value: Any, mask: object) -> Tensor:
    """`run` on the sequences of jagged tensors, (B, H, j, E), none of which sees another. `run` takes dense ones, and documents.

    With another dimension ragged, (B, j, H, L, E), as torch has it: their dense parts.
    """
    tensors = {"query": query, "key": key, "value": value}
    for name, tensor in tensors.items():
        if not is_jagged(tensor):
            got = f"{tensor.layout}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise InputError(
                f"sdpa(): `{name}` must be a jagged tensor where another input is one; got {got}. "
                "Use torch.nested.nested_tensor(list, layout=torch.jagged)."
            )
        if tensor.dim() < 4 or tensor._ragged_idx not in (1, 2) or tensor._ragged_idx != query._ragged_idx:
            raise InputError(
                f"sdpa(): a jagged `{name}` must be (B, H, j, E), ragged along its sequences; got {tuple(tensor.shape)}, ragged "
                f"at dimension {tensor._ragged_idx}. Use {name}.transpose(1, 2) on (B, j, H, E)."
            )
        if tensor.lengths() is not None:
            raise InputError(
                f"sdpa(): a jagged `{name}` must have no holes between its sequences; got one with lengths. "
                f"Use {name}.transpose(1, 2).contiguous().transpose(1, 2)."
            )
    if mask is not None:
        raise InputError(
            "sdpa(): `attn_mask` must be None for jagged tensors, as torch has it. Leave it out, or pad the sequences."
        )
    for name, tensor in tensors.items():
        if tensor.offsets().shape != query.offsets().shape:
            raise InputError(
                f"sdpa(): a jagged `{name}` must have {len(query.offsets()) - 1} sequences like `query`; "
                f"got {len(tensor.offsets()) - 1}. Pass one {name} for each query."
            )
    if not _have_same_sequences(key, value):
        raise InputError(_OTHER_SEQUENCES)
    flat = [tensor.values() for tensor in tensors.values()]
    if query._ragged_idx == 2:
        documents = query.offsets() if query.offsets() is key.offsets() else (query.offsets(), key.offsets())
        output = run(*(flattened.unsqueeze(0) for flattened in flat), documents=documents).squeeze(0)
    else:
        output = run(*flat)
    return torch.nested.nested_tensor_from_jagged(output, query.offsets(), jagged_dim=query._ragged_idx)


def _have_same_sequences(key: Any, value: Any) -> bool:
    of_keys, of_values = key.offsets(), value.offsets()
    if of_keys is of_values:
        return True
    if of_keys.shape != of_values.shape or key.values().shape[-2] != value.values().shape[-2]:
        return False
    if torch.compiler.is_compiling():  # a graph has no numbers yet: it raises when it runs
        raise_if_false((of_keys == of_values).all(), _OTHER_SEQUENCES)
        return True
    return bool(torch.equal(of_keys, of_values))
