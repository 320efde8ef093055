"""flash: attention() with the arguments of FlashAttention's functions, in its layout; what the kernel hub loads.

Causal and window are aligned at the last key, as in FlashAttention since 2.1. float32 works too; on a CPU, so does float64.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import InputError, checked_options
from .operation.run import AS_USUAL, attend

Window = tuple[int, int]
WITH_LSE = tuple[Tensor, Tensor, None]


@checked_options
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | WITH_LSE:
    """``flash_attn.flash_attn_func``, on attemper's kernels.

    Args:
        q: ``(B, Lq, H, E)``.
        k: ``(B, Lk, G, E)``; ``H`` must be a multiple of ``G``.
        v: ``(B, Lk, G, Ev)``.
        dropout_p: probability of dropping a weight.
        softmax_scale: None is ``1/sqrt(E)``.
        causal: the last query is aligned with the last key.
        window_size: how many keys before and after its own a query sees; -1 is all. (n, 0) is causal; (n, n) needs Lq = Lk.
        softcap: 0 is none.
        alibi_slopes: must be None.
        deterministic: ignored; results always are.
        return_attn_probs: also returns the log-sum-exp of each row, ``(B, H, Lq)``, and None in place of the weights.
        s_aux: ``(H,)``, a learned sink for each head, which takes its share of the weight.

    Returns:
        the output, ``(B, Lq, H, Ev)``; a row that sees no key is zero.
    """
    chosen = _Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    return _attend("flash_attn_func", [tensor.transpose(1, 2) for tensor in (q, k, v)], chosen, None, return_attn_probs)


@checked_options
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | WITH_LSE:
    """``flash_attn.flash_attn_varlen_func``, on attemper's kernels: packed sequences, which do not see each other.

    The call reads the offsets: on a GPU it waits for them, so keep them on the CPU.

    Args:
        q: ``(total, H, E)``.
        k: ``(total, G, E)``.
        v: ``(total, G, Ev)``.
        cu_seqlens_q: where sequences begin, and the end, ``(N + 1,)``.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: ignored.
        max_seqlen_k: ignored.
        dropout_p: as in :func:`flash_attn_func`; so are the others.
        softmax_scale: as there.
        causal: the last query of each sequence is aligned with its last key.
        window_size: as there, within each sequence.
        softcap: as there.
        alibi_slopes: as there.
        deterministic: as there.
        return_attn_probs: as there; the log-sum-exp is ``(H, total)``.
        block_table: must be None.
        s_aux: as there.

    Returns:
        the output, ``(total, H, Ev)``.
    """
    if block_table is not None:
        raise InputError("flash_attn_varlen_func(): `block_table` must be None: there is no paged cache. Leave it out.")
    chosen = _Options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, s_aux)
    tensors = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v)]
    output = _attend("flash_attn_varlen_func", tensors, chosen, (cu_seqlens_q, cu_seqlens_k), return_attn_probs)
    return output[0] if isinstance(output, Tensor) else (output[0][0], output[1][0], None)


class _Options(NamedTuple):
    dropout: float
    scale: float | None
    causal: bool
    window: Window
    softcap: float
    alibi_slopes: Tensor | None
    sink: Tensor | None


def _attend(where: str, tensors: list[Tensor], given: _Options, documents: Any, with_lse: bool) -> Tensor | WITH_LSE:
    """On (B, H, L, E); the output has queries before heads."""
    if given.alibi_slopes is not None:
        raise InputError(
            f"{where}(): `alibi_slopes` must be None. Use attemper.attention with a mask that is added to the logits."
        )
    query, key, value = tensors
    causal, window = _band(where, given, query, key, documents)
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "scale": given.scale,
        "softcap": given.softcap or None,
    }
    options |= {"dropout": given.dropout, "documents": documents, "sink": given.sink}
    output, vitals = attend(where, query, key, value, ("lse",) if with_lse else (), AS_USUAL, **options)
    output = output.transpose(1, 2)
    return (output, vitals.lse, None) if with_lse else output


def _band(where: str, given: _Options, query: Tensor, key: Tensor, documents: Any) -> tuple[bool | str, int | None]:
    """FlashAttention's window as ``causal`` and ``window``."""
    left, right = given.window
    if given.causal or right == 0:
        return "lower_right", None if left < 0 else left + 1
    if left < 0 and right < 0:
        return False, None
    if left == right and _is_square(query, key, documents):
        return False, left + 1
    raise InputError(
        f"{where}(): `window_size` must be (n, 0), (-1, -1), or (n, n) where there are as many queries as keys; got "
        f"{tuple(given.window)!r}. Use attemper.attention with a boolean mask."
    )


def _is_square(query: Tensor, key: Tensor, documents: Any) -> bool:
    """Whether each sequence has as many queries as keys."""
    if documents is None:
        return query.shape[2] == key.shape[2]
    rows, keys = documents
    return rows is keys or (rows.shape == keys.shape and torch.equal(rows, keys))
