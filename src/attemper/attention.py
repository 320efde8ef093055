"""attention(), measure(), weights() and sdpa(): check → kernel → output and vitals.

Letters: B batch, H query heads, G key/value heads, Lq and Lk lengths, E head dim (d_k), Ev value dim.
A logit is the score after scale, softcap and bias, before softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from . import kernels
from .errors import checked_options
from .kernels.contract import Problem
from .operation.checks import Signs, check_signs, prepare
from .operation.direct import attend, attend_again, attend_unchecked, plain_vitals
from .operation.listen import TallyTarget
from .operation.ops import attend_without_autograd_and_modes, matrix
from .operation.plain import is_plain_call
from .operation.shapes import NO_VALUE, broadcast_like_torch
from .vitals import SIGNS, Attended, Vitals, in_dtype, in_shape

ProblemRunner = Callable[[Problem, tuple[str, ...], str], tuple[Tensor, Vitals]]
"""Runs a checked problem for some signs on a kernel."""


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
    if is_plain_call(query, key, value, causal, scale, window, softcap, dropout) and value is not None:
        signs = names = SIGNS if isinstance(signs, str) and signs == "all" else check_signs("attention", signs)
        found = attend_unchecked(query, key, value, mask, causal, scale, window, softcap, names, kernel)
        if found is not None:
            return Attended(found[0], plain_vitals(names, found[1:]))
    options = {"mask": mask, "causal": causal, "scale": scale, "window": window, "softcap": softcap, "dropout": dropout}
    options["no_value"] = NO_VALUE
    return _run("attention", query, key, value, signs, kernel, options)


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
    signs: Signs = "all",
    kernel: str = "auto",
) -> Vitals:
    """The vital signs alone: no values, no output. Arguments as in :func:`attention`.

    Example:
        >>> k = torch.zeros(5, 8)
        >>> attemper.measure(k[:1], k).effective_keys      # five equal keys
        tensor([5.])
    """
    names = check_signs("measure", signs)
    return _measure(query, key, mask, causal, scale, window, softcap, names, kernel, attend)


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
    problem, _, _, shape = prepare("weights", query, key, None, signs=(), **options)
    found = matrix(problem)
    return found.reshape(*shape, found.shape[-1])


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
    asked for. Dropout has the same distribution as torch's, but a different random mask.

    Example:
        >>> q = torch.randn(2, 4, 10, 8)
        >>> expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> torch.allclose(attemper.sdpa(q, q, q, is_causal=True), expected, atol=1e-6)
        True
    """
    plain = type(is_causal) is bool and value is not None
    if plain and is_plain_call(query, key, value, is_causal, scale, None, None, dropout_p):
        grouped = bool(enable_gqa)
        found = attend_unchecked(query, key, value, attn_mask, is_causal, scale, None, None, (), "auto", grouped)
        if found is not None:
            return found[0]
    inputs = broadcast_like_torch("sdpa", query, key, value, enable_gqa)
    options = {"mask": attn_mask, "dropout": dropout_p, "causal": is_causal, "scale": scale, "torch_names": True}
    output = _run("sdpa", *inputs, (), "auto", options).output
    return output if inputs[0].dtype == query.dtype else output.to(query.dtype)


def attention_with_detached_signs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    signs: tuple[str, ...],
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> Attended:
    """:func:`attention` for a watch, which has checked `signs` and lets no gradient reach them."""
    if is_plain_call(query, key, value, causal, scale, None, softcap, dropout):
        options = (mask, causal, scale, None, softcap)
        found = attend_unchecked(query, key, value, *options, signs, "auto", detached=True)
        if found is not None:
            return Attended(found[0], plain_vitals(signs, found[1:]))
    return attention(
        query, key, value, mask=mask, causal=causal, scale=scale, softcap=softcap, dropout=dropout, signs=signs
    )


def attention_again(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: None,  # as in `attention_with_detached_signs`
    causal: bool,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> tuple[Tensor, Any] | None:
    """`attention_with_detached_signs` for a call like an earlier one on a GPU: its output, and all signs as rows of memory.

    None if no earlier call was like it, or this one is not plain.
    """
    if not is_plain_call(query, key, value, causal, scale, None, softcap, dropout):
        return None
    return attend_again(query, key, value, causal, scale, softcap)


def measure_without_autograd_and_modes(
    query: Tensor,
    key: Tensor,
    *,
    signs: tuple[str, ...],
    kernel: str,
    mask: Tensor | None = None,
    causal: bool | str = False,
    scale: float | Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Vitals:
    """:func:`measure` for a watch, which has checked `signs`, and has switched autograd and every mode off."""
    run = attend_without_autograd_and_modes
    return _measure(query, key, mask, causal, scale, window, softcap, signs, kernel, run)


def _measure(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool | str,
    scale: float | Tensor | None,
    window: int | None,
    softcap: float | None,
    names: tuple[str, ...],
    kernel: str,
    run: ProblemRunner,
) -> Vitals:
    if is_plain_call(query, key, None, causal, scale, window, softcap, 0.0):
        found = attend_unchecked(query, key, None, mask, causal, scale, window, softcap, names, kernel)
        if found is not None:
            return plain_vitals(names, found[1:])
    options = {"mask": mask, "causal": causal, "scale": scale, "window": window, "softcap": softcap}
    return _run("measure", query, key, None, names, kernel, options, run).vitals


def attention_into(
    target: TallyTarget,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    signs: Signs = (),
    kernel: str = "auto",
    **options: Any,
) -> Attended:
    """:func:`attention` with its vitals added to a tally, whether or not signs are asked for; options as there."""
    run = partial(attend, target=target)
    return _run("attention", query, key, value, signs, kernel, {**options, "no_value": NO_VALUE}, run)


def _run(
    where: str,
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    signs: Signs,
    kernel: str,
    options: dict[str, Any],
    run: ProblemRunner = attend,
) -> Attended:
    """Check, choose a kernel, run it, and return results in the caller's shape."""
    problem, request, names, shape = prepare(where, query, key, value, signs=signs, **options)
    output, vitals = run(problem, names, kernels.choose(where, request, kernel))
    attended = in_dtype(output, vitals, request.dtype)
    return attended if query.dim() == 4 else in_shape(attended, shape)
