"""additive_attention(): the score of Bahdanau, Cho and Bengio (2014), wᵀ tanh(q + k)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .. import kernels
from ..errors import InputError, checked_options
from ..kernels.contract import measuring_dtype, savable
from ..operation.checks import Signs, prepare
from ..operation.direct import attend
from ..vitals import Attended, in_dtype, in_shape


@checked_options
def additive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool | str = False,
    window: int | None = None,
    dropout: float = 0.0,
    signs: Signs = "all",
) -> Attended:
    """Additive attention, ``logits = Σ_e weight_e · tanh(query_e + key_e)``, with the vital signs of :func:`attention`.

    Query and key come already projected. There is no scale: no logit is larger than ``‖weight‖₁``, the sum of the sizes of
    ``weight``, which may well be above 1. It costs one tanh for each number that a dot product multiplies, and memory that
    grows with the length, not with its square. ``query``, ``key``, ``value``, ``mask``, ``causal``, ``window``, ``dropout``
    and ``signs`` are those of :func:`attention`.

    Args:
        weight: ``(E,)`` for all heads, or ``(H, E)`` for each its own.

    Returns:
        ``Attended(output, vitals)`` as :func:`attention` does, with first derivatives to ``query``, ``key``, ``value``,
        ``weight`` and an additive ``mask``.

    Example:
        >>> q, k = torch.zeros(1, 3), torch.full((2, 3), 100.0)
        >>> output, vitals = attemper.additive_attention(q, k, k, torch.tensor([1.0, 2.0, -0.5]))
        >>> vitals.peak                           # tanh 100 = 1, so 1 + 2 - 0.5
        tensor([2.5000])
    """
    problem, request, names, shape = prepare(
        "additive_attention", query, key, value, mask=mask, causal=causal, scale=1.0, window=window, dropout=dropout,
        signs=signs, no_value="For signs alone pass value=key.",
    )  # fmt: skip
    weight = _check_weight(weight, problem.query)
    # once more: the weight may be all that is learned
    query, key, value, mask, weight = savable(problem.query, problem.key, problem.value, problem.mask, weight)
    problem = problem._replace(query=query, key=key, value=value, mask=mask, weight=weight)
    kernel = kernels.choose("additive_attention", replace(request, additive=True), "auto")
    output, vitals = attend(problem, names, kernel)
    return in_shape(in_dtype(output, vitals, request.dtype), shape)


def _check_weight(weight: Tensor, query: Tensor) -> Tensor:
    """The weight as (B, H, E) in the dtype of measuring."""
    batch, heads, _, dim = query.shape
    if not isinstance(weight, Tensor):
        raise InputError(
            f"additive_attention(): `weight` must be a torch.Tensor; got {type(weight).__name__}. "
            f"Use torch.nn.Parameter(torch.randn({dim}) / {dim}**0.5) to learn it."
        )
    if not weight.is_floating_point():
        raise InputError(
            f"additive_attention(): `weight` must be floating point; got {weight.dtype}. Use weight.float()."
        )
    if tuple(weight.shape) not in ((dim,), (heads, dim)):
        raise InputError(
            f"additive_attention(): `weight` must have shape ({dim},) for all heads or ({heads}, {dim}) for each its own; "
            f"got {tuple(weight.shape)}. Use torch.randn({dim}) / {dim}**0.5 to begin with."
        )
    if weight.device != query.device:
        raise InputError(
            f"additive_attention(): `weight` must be on query's device {query.device}; got {weight.device}. "
            f"Use weight.to({str(query.device)!r})."
        )
    return weight.to(measuring_dtype(query.dtype)).expand(batch, heads, dim)
