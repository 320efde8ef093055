"""cosine_attention(): the angle between query and key as the score."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .. import kernels
from ..errors import InputError, checked_options
from ..kernels.contract import LARGEST, measuring_dtype, without_autocast
from ..operation.call import Offsets, Signs, prepare
from ..operation.run import Execution, as_asked, run
from ..vitals import Attended


@checked_options
def cosine_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool | str = False,
    window: int | None = None,
    dropout: float = 0.0,
    documents: Offsets = None,
    sink: Tensor | None = None,
    signs: Signs = "all",
    kernel: str = "auto",
) -> Attended:
    """Attention by angle: ``logits = scale * cos(query, key)``, so no logit is larger than ``|scale|``.

    The lengths of query and key play no part. ``query``, ``key``, ``value``, ``mask``, ``causal``, ``window``, ``dropout``,
    ``documents``, ``sink``, ``signs`` and ``kernel`` are those of :func:`attention`.

    Args:
        scale: must be given; a number, or a tensor to be learned: ``()``, ``(H,)`` one per head, or broadcastable to
            ``(B, H, Lq, 1)``. At 1 the most unequal weights possible are e² = 7.4 to 1.

    Returns:
        ``Attended(output, vitals)`` as :func:`attention` does. A vector of zeros has no direction: its logits are 0, and no
        gradient reaches it.

    Example:
        >>> q, k = torch.tensor([[3.0, 0.0]]), torch.tensor([[5.0, 0.0], [0.0, 0.1]])
        >>> output, vitals = attemper.cosine_attention(q, k, k, scale=10.0)
        >>> vitals.peak, vitals.mean              # cos 0° = 1 and cos 90° = 0, times 10
        (tensor([10.]), tensor([5.]))
    """
    return attend_by_angle(
        query, key, value, Execution(kernel), scale=scale, mask=mask, causal=causal, window=window, dropout=dropout,
        documents=documents, sink=sink, signs=signs,
    )  # fmt: skip


def attend_by_angle(
    query: Tensor, key: Tensor, value: Tensor, execution: Execution, *, scale: float | Tensor | None, **options: Any
) -> Attended:
    """:func:`cosine_attention`, run in this way."""
    _check_scale(scale)
    no_value = "For signs alone pass value=key."
    call = prepare("cosine_attention", query, key, value, scale=scale, no_value=no_value, **options)
    problem = call.problem
    # In half precision a direction would be rounded once more than the caller's own numbers, and `scale` would enlarge that
    # error: everything runs in the dtype of measuring, and only the output is rounded.
    wide = measuring_dtype(problem.query.dtype)
    assert problem.value is not None
    with without_autocast(problem.query):
        problem = problem._replace(
            query=direction(problem.query.to(wide)),
            key=direction(problem.key.to(wide)),
            value=problem.value.to(wide),
        )
        kernel = kernels.choose("cosine_attention", call.request._replace(dtype=wide), execution.kernel)
        attended = run(problem, call.signs, kernel, execution)
    return as_asked(call, *attended)


def direction(vectors: Tensor) -> Tensor:
    """Vectors scaled to length 1. Each is first divided by its largest entry, so that no square overflows or underflows."""
    if not vectors.shape[-1]:
        return vectors
    largest = vectors.detach().abs().amax(-1, keepdim=True)  # cancels out: no gradient goes through it
    nowhere = largest == 0
    part = vectors.masked_fill(nowhere, 1.0) / largest.masked_fill(nowhere, 1.0)
    return (part / torch.linalg.vector_norm(part, dim=-1, keepdim=True)).masked_fill(nowhere, 0.0)


def _check_scale(scale: object) -> None:
    if isinstance(scale, Tensor):
        return
    number = None if isinstance(scale, bool) or not isinstance(scale, Real) else float(scale)
    if number is None or not abs(number) <= LARGEST:
        raise InputError(
            f"cosine_attention(): `scale` must be a finite number or a tensor; got {scale!r}. A cosine is at most 1, which "
            "is nearly flat after softmax: use scale=10.0, or torch.nn.Parameter(torch.tensor(10.0)) to learn it."
        )
