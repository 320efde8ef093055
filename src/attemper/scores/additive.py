"""additive_attention(): the score of Bahdanau, Cho and Bengio (2014), wᵀ tanh(q + k)."""

from __future__ import annotations

from torch import Tensor

from .. import kernels
from ..errors import InputError, checked_options
from ..kernels.contract import measuring_dtype, savable
from ..operation.call import Offsets, Signs, prepare
from ..operation.run import as_asked, run
from ..vitals import Attended


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
    documents: Offsets = None,
    sink: Tensor | None = None,
    signs: Signs = "all",
) -> Attended:
    """Additive attention, ``logits = Σ_e weight_e · tanh(query_e + key_e)``, with the vital signs of :func:`attention`.

    Query and key come already projected. There is no scale: no logit is larger than ``‖weight‖₁``, the sum of the sizes of
    ``weight``, which may well be above 1. It costs one tanh for each number that a dot product multiplies, and memory that
    grows with the length, not with its square. ``query``, ``key``, ``value``, ``mask``, ``causal``, ``window``, ``dropout``,
    ``documents``, ``sink`` and ``signs`` are those of :func:`attention`.

    Args:
        weight: ``(E,)``, shared by all heads, or ``(H, E)``, one per head.

    Returns:
        ``Attended(output, vitals)`` as :func:`attention` does, with first derivatives to ``query``, ``key``, ``value``,
        ``weight`` and an additive ``mask``.

    Example:
        >>> q, k = torch.zeros(1, 3), torch.full((2, 3), 100.0)
        >>> output, vitals = attemper.additive_attention(q, k, k, torch.tensor([1.0, 2.0, -0.5]))
        >>> vitals.peak                           # tanh 100 = 1, so 1 + 2 - 0.5
        tensor([2.5000])
    """
    call = prepare(
        "additive_attention", query, key, value, mask=mask, causal=causal, scale=1.0, window=window, dropout=dropout,
        documents=documents, sink=sink, signs=signs, no_value="For signs alone pass value=key.",
    )  # fmt: skip
    problem = call.problem
    weight = _check_weight(weight, problem.query)
    # once more: the weight may be all that is learned
    *inputs, weight = savable(problem.query, problem.key, problem.value, problem.mask, problem.sink, weight)
    problem = problem._replace(
        **dict(zip(("query", "key", "value", "mask", "sink"), inputs, strict=True)), weight=weight
    )
    kernel = kernels.choose("additive_attention", call.request._replace(additive=True), "auto")
    return as_asked(call, *run(problem, call.signs, kernel))


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
    shape = weight.shape  # compared number by number: Dynamo finds no tuple of symbolic sizes among others
    if not (len(shape) in (1, 2) and shape[-1] == dim and (len(shape) == 1 or shape[0] == heads)):
        raise InputError(
            f"additive_attention(): `weight` must have shape ({dim},), shared by all heads, or ({heads}, {dim}), one per head; "
            f"got {tuple(weight.shape)}. Begin with torch.randn({dim}) / {dim}**0.5."
        )
    if weight.device != query.device:
        raise InputError(
            f"additive_attention(): `weight` must be on query's device {query.device}; got {weight.device}. "
            f"Use weight.to({str(query.device)!r})."
        )
    return weight.to(measuring_dtype(query.dtype)).expand(batch, heads, dim)
