"""The routes of torch's own packed sequences: torch.nn.attention.varlen, whose ops take offsets, and SDPA on jagged tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..._torch_private import jagged_sdpa as jagged_sdpa
from ..attach.running import Frame, Pass, Switch, running
from ..call import AttentionCall
from .packed import packed_call, spans
from .sdpa import Reader, arguments_by_name, unreadable

if TYPE_CHECKING:
    from ..attach.intercept import Interception

VARLEN = ("_varlen_attn", "_varlen_attn_out")


def readers() -> dict[Any, Reader]:
    """The ops of torch.nn.attention.varlen, once that was imported: it takes seconds."""
    ops = [getattr(torch.ops.torch_attn, name, None) for name in VARLEN]
    return {packet.default: _varlen for packet in ops if packet is not None}


def _varlen(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frames: tuple[Frame, ...]) -> AttentionCall | str:
    given = arguments_by_name(func, args, kwargs)
    query, key, keys = given["query"], given["key"], given["cu_seq_k"]
    if given["block_table"] is not None or keys is None:
        return "a paged cache"
    reason = unreadable(query, key)
    if reason is not None:
        return reason
    left, right = given["window_size"] or (-1, -1)
    causal = given["is_causal"] or right == 0
    if not causal and left != right:
        return f"a window of {left} keys before each query and {right} after it; -1 is all"
    documents = spans(given["cu_seq_q"], keys, (len(query), len(key)), (None, given["seqused_k"]))
    if isinstance(documents, str):
        return documents
    window, scale = None if left < 0 else left + 1, given["scale"]
    return packed_call("sdpa", frames, (query, key), documents, _of_tokens, scale=scale, causal=causal, window=window)


def _of_tokens(tensor: Tensor) -> Tensor:
    """(tokens, H, E) → (1, H, tokens, E)."""
    return tensor.transpose(0, 1).unsqueeze(0)


def is_jagged(query: Any = None, *_: Any, **__: Any) -> bool:
    """Whether the first argument of SDPA is jagged along its sequences: (B, H, j, E)."""
    return (
        isinstance(query, Tensor) and query.is_nested and getattr(query, "_ragged_idx", None) == 2 and query.dim() == 4
    )


def jagged(interception: Interception, original: Callable[..., Any], switch: Switch) -> Callable[..., Any]:
    """SDPA on jagged tensors: it runs, and then its call is read. A pass in which it runs is followed in full each time."""

    def jagged_scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        current, attachment, reads = running.current, interception.attachment, False
        if current is not None and switch.on:
            try:
                reads = _begins(interception, current, args, kwargs)
            except Exception as error:
                attachment.give_up(error)
        if not reads:
            return original(*args, **kwargs)
        running.current = None  # what its ops do to parts of these tensors is not looked at
        try:
            out = original(*args, **kwargs)
        finally:
            running.current = current
        try:
            frames = tuple(running.frames)
            call = _read(frames, *args, **kwargs)
            if isinstance(call, str):
                attachment.unmeasured(frames, f"scaled_dot_product_attention on {call}")
            else:
                attachment.begin(call)(frames)
        except Exception as error:
            attachment.failed(error)
        return out

    return jagged_scaled_dot_product_attention


def _begins(interception: Interception, current: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call is to be read. If another dimension is ragged, torch's SDPA gets what is dense, and is read there."""
    if current.counts_for_none(interception.attachment.observers) or not is_jagged(*args, **kwargs):
        return False
    if current.intercepted is not None:
        interception.attachment.fall_back(current)
    current.spoil()
    return True


def _read(
    frames: tuple[Frame, ...],
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall | str:
    if not is_jagged(key):
        return "jagged queries and keys that are not"
    totals = [tensor.values().shape[1] for tensor in (query, key)]
    documents = spans(query.offsets(), key.offsets(), totals, (query.lengths(), key.lengths()))
    if isinstance(documents, str):
        return f"jagged tensors with {documents}"
    if is_causal and any(last - first != stop - start for first, last, start, stop in documents):
        return "jagged tensors, causal, whose keys are not as many as their queries"  # kernels align them differently
    tensors = query, key
    return packed_call("sdpa", frames, tensors, documents, _of_jagged, scale=scale, causal=is_causal, dropout=dropout_p)


def _of_jagged(tensor: Any) -> Tensor:
    """(B, H, j, E) → (1, H, tokens, E)."""
    values: Tensor = tensor.values()
    return values.unsqueeze(0)
