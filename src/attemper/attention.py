"""attention(), measure(), weights() and sdpa(): check → kernel → output and vitals.

Letters: B batch, H query heads, G key/value heads, Lq and Lk lengths, E head dim (d_k), Ev value dim.
A logit is the score after scale, softcap and bias, before softmax.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .errors import checked_options
from .operation.call import Offsets, Signs, prepare
from .operation.run import AS_USUAL, Execution, attend, matrix
from .operation.shapes import NO_VALUE
from .vitals import Attended, Vitals


@checked_options
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    kernel: str = "auto",
) -> Attended:
    """Scaled dot-product attention that also reports its vital signs.

    ``logits = scale * query @ key^T``, then softcap and mask; ``output = softmax(logits) @ value``. The vitals come from the
    same pass and can be part of a loss; asking for them does not change a bit of ``output``.

    Args:
        query: ``(B, H, Lq, E)``; also ``(L, E)``, ``(H, L, E)`` or more leading dimensions. Any strides.
        key: ``(B, G, Lk, E)``; ``H`` must be a multiple of ``G`` (grouped-query attention).
        value: ``(B, G, Lk, Ev)``.
        mask: broadcastable to ``(B, H, Lq, Lk)``. Boolean: True = keep. Floating point: added to the logits, with its
            gradient; a value of -1e4 or less counts as hidden in ``visible``, ``mean`` and ``variance``.
        causal: ``True`` aligns the first query with the first key (top-left); ``"lower_right"`` the last with the last,
            which is what a KV cache needs.
        scale: ``None`` is ``1/sqrt(E)``; a number; or a tensor to be learned: ``()``, ``(H,)`` one per head, or
            broadcastable to ``(B, H, Lq, 1)``.
        window: query i sees keys within ``window - 1`` steps, on both sides unless causal. With ``"lower_right"``, i is
            counted from the end.
        softcap: replaces a score s by ``softcap * tanh(s / softcap)``.
        dropout: probability of dropping a weight, applied whenever it is asked for. Vitals precede it.
        documents: where the documents of a packed sequence begin, and its end: integers ``(N + 1,)``, as ``cu_seqlens``, or
            ``(B, N + 1)``, a row for each item; two such tensors where the keys have others than the queries. No query sees a
            key of another document, and ``causal`` and ``window`` count within each. The cost
            is that of the visible keys. Offsets on a GPU cost one synchronisation a call; keep them on the CPU.
        sink: ``(H,)``, one learned logit per head, which takes its share of the weight and gives no value. It counts
            as a key in every sign but ``peak``; -inf disables it for that head.
        signs: ``"all"``, some names, or ``()``. What is not asked for is not computed.
        kernel: ``"auto"`` takes the fastest that serves the call; a named kernel runs or raises.

    Returns:
        ``Attended(output, vitals)``: output ``(B, H, Lq, Ev)`` in query's dtype; vitals ``(B, H, Lq)`` in float32 (float64
        for float64 inputs). A row that sees no key has zero output and finite gradients.

    Example:
        >>> q = torch.eye(4).reshape(1, 4, 4)
        >>> output, vitals = attemper.attention(q, q, q, causal=True)
        >>> vitals.entropy[0, 0].item()              # the first token sees one key: ln 1 = 0
        0.0
        >>> vitals.peak[0, 3].item()                 # e·e / sqrt(4)
        0.5
    """
    return attend(
        "attention", query, key, value, signs, Execution(kernel), mask=mask, causal=causal, scale=scale, window=window,
        softcap=softcap, dropout=dropout, documents=documents, sink=sink, no_value=NO_VALUE,
    )  # fmt: skip


@checked_options
def measure(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Offsets = None,
    sink: Tensor | None = None,
    signs: Signs = "all",
    kernel: str = "auto",
) -> Vitals:
    """The vital signs alone: no values, no output. Arguments as in :func:`attention`.

    Example:
        >>> k = torch.zeros(5, 8)
        >>> attemper.measure(k[:1], k).effective_keys      # five equal keys
        tensor([5.])
    """
    return attend(
        "measure", query, key, None, signs, Execution(kernel), mask=mask, causal=causal, scale=scale, window=window,
        softcap=softcap, documents=documents, sink=sink,
    ).vitals  # fmt: skip


@checked_options
def weights(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    documents: Offsets = None,
    sink: Tensor | None = None,
) -> Tensor:
    """The whole matrix of attention weights; it stores Lq × Lk numbers. Arguments as in :func:`attention`.

    Returns:
        the weights, ``(B, H, Lq, Lk)``, in the dtype of vitals; a row that sees no key is zero.

    Example:
        >>> q = torch.zeros(3, 8)
        >>> attemper.weights(q, q, causal=True)[1]          # the second row sees two equal keys
        tensor([0.5000, 0.5000, 0.0000])
    """
    options: dict[str, Any] = {"mask": mask, "causal": causal, "scale": scale, "window": window, "softcap": softcap}
    options |= {"documents": documents, "sink": sink}
    call = prepare("weights", query, key, None, signs=(), **options)
    matrices = matrix(call.problem)
    return matrices.reshape(*call.shape, matrices.shape[-1])


@checked_options
def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, argument for argument, on attemper's kernels.

    Causal is top-left, True in a boolean mask means keep, a fully masked row gives zeros, and dropout applies whenever it is
    asked for. Dropout has the same distribution as torch's, but a different random mask. Jagged tensors, ``(B, H, j, E)``, are
    one call with their offsets as ``documents``.

    Example:
        >>> q = torch.randn(2, 4, 10, 8)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.allclose(attemper.sdpa(q, q, q, is_causal=True), expected, atol=1e-6)
        True
    """
    return attend(
        "sdpa", query, key, value, (), AS_USUAL, mask=attn_mask, dropout=dropout_p, causal=is_causal, scale=scale,
        no_value=NO_VALUE, like_torch=True, grouped=bool(enable_gqa),
    ).output  # fmt: skip
