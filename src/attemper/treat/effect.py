"""Whether a clip scales each head's logits by that head's factor alone, judged by derivatives, call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..watch.examine import AttentionCall
from .derivatives import Directional, share, tolerance
from .find import Made, along_rows
from .table import BY_LAYER, LayerProjections, factors_of

SAMPLED = 32
"""At most this many queries, keys and sequences of a call are recomputed: a fused kernel never stores the whole matrix."""
HIDDEN = -1e4

WITHOUT = (
    "scaling the parameters that make q and k does not scale its logits by the same factor: something between them and the "
    "softmax undoes or changes it"
)
MIXED = (
    "scaling the parameters of one head does not scale the logits of this head alone: scores of several heads are mixed before "
    "the softmax (talking heads), or its heads are not those of the weights"
)
ONE_SIDE = (
    "a term of its logits holds q without k, or k without q (relative positions), so that scaling q and k does not scale the "
    "logits as a whole. Bound q and k with attemper.add_qk_norm()"
)
ANOTHER = (
    "it attends several times in a pass, and the parameters that make the heads of one call do not make those of another: its "
    "heads run in parts (attention slicing), or several layers run in one module"
)


def reason_against(
    projections: LayerProjections, call: AttentionCall, stored: StoredLogits | None, tensors: Mapping[str, Tensor]
) -> str | None:
    """Why a clip would not scale the logits of each head in this call by the head's factor alone; None if it would."""
    made = Made.of(call)
    if (
        made is None
        or made.query.shape[1] != projections.heads
        or any(part.parameter not in tensors for part in projections.parts)
    ):
        return ANOTHER
    recompute, scores, seen = _recomputable(call, made) if stored is None else stored
    logits = recompute()
    if not logits.requires_grad:
        return None  # a pass without gradients shows nothing
    along = Along(projections, logits, tensors)
    ones = torch.ones(projections.heads, dtype=torch.float64, device="cpu")
    expected = along(ones, 0.5, "query") if scores is None else scores
    if not bool(expected.any()):
        return WITHOUT if scores is None else None  # weights that are still 0
    codes = (
        ones
        if projections.how == BY_LAYER
        else torch.linspace(1, 2, projections.heads, dtype=torch.float64, device="cpu")
    )
    by_group = (
        codes.view(projections.key_heads, -1).amin(-1).repeat_interleave(projections.heads // projections.key_heads)
    )
    grouped = projections.key_heads != projections.heads
    tries = [(codes, alpha, "query") for alpha in ((0.0, 1.0) if projections.splits and not grouped else (0.5,))]
    tries += [(by_group, 0.5, "group")] if grouped and projections.splits else []
    limit = max(tolerance(tensor) for tensor in (logits, *along.tensors))
    for each, alpha, shared in tries:
        if not _follows(along(each, alpha, shared), each, expected, seen, limit):
            alone = _follows(along(ones, alpha, shared), ones, expected, seen, limit)
            apart = projections.splits and not alone and _is_apart(along, ones, expected, limit)
            return MIXED if alone else ONE_SIDE if apart else WITHOUT
    return None


def _follows(change: Tensor, codes: Tensor, expected: Tensor, seen: Tensor, limit: float) -> bool:
    """Whether each head changed by its own factor, up to a constant per row (a model may subtract the largest logit)."""
    wanted = expected * codes.to(expected).view(1, -1, 1, 1)
    rest = change - wanted
    by_row = (rest - rest.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)) * seen
    return any(bool((share(part, wanted) <= limit).all()) for part in (rest, by_row))


def _is_apart(along: Along, ones: Tensor, expected: Tensor, limit: float) -> bool:
    """Whether the logits change differently with q than with k; a product of both changes alike with either."""
    query, key = along(ones, 1.0, "query"), along(ones, 0.0, "query")
    return not bool((share(query - key, expected) <= limit).all())


class Along:
    """The derivative of the logits along a clip; the code of a head stands for the logarithm of its factor."""

    def __init__(self, projections: LayerProjections, logits: Tensor, tensors: Mapping[str, Tensor]) -> None:
        self.projections = projections
        self.names = list(dict.fromkeys(part.parameter for part in projections.parts))
        self.tensors = [tensors[name] for name in self.names]
        self.along = Directional(logits, self.tensors)

    def __call__(self, codes: Tensor, alpha: float, shared: str) -> Tensor:
        directions: dict[int, Tensor] = {}
        for name, dim, offset, factor in factors_of(self.projections, codes.exp(), alpha, shared):
            index = self.names.index(name)
            tensor = self.tensors[index].detach()
            direction = (tensor + offset) * along_rows(factor.log().to(tensor), dim, tensor)
            directions[index] = directions[index] + direction if index in directions else direction
        return self.along.together(directions)


class StoredLogits(NamedTuple):
    """A sample of the logits that a model stored, taken while they exist."""

    graph: Callable[[], Tensor]  # returns them with their graph
    scores: Tensor | None  # their part scale · q·k; None: unknown
    seen: Tensor  # True where a key is visible

    @classmethod
    def of(cls, call: AttentionCall) -> StoredLogits | None:
        """None for a call whose logits are made of q and k alone."""
        if call.logits is None or call.graph is None:
            return None
        logits, all_logits = call.logits, call.graph
        first, rows = (_sampled(logits.shape[dim], logits) for dim in (0, 2))
        # columns of every product, if several share a softmax, without those of sinks
        spans = call.products or ((0, logits.shape[-1]),)
        columns = torch.cat([start + _sampled(stop - start, logits) for start, stop in spans if start < stop])

        def some(matrix: Tensor) -> Tensor:
            return matrix[first][:, :, rows][..., columns]

        stored = some(logits)
        seen = (stored > HIDDEN) & stored.isfinite()
        known = not call.info.biased and call.info.softcap is None
        scores = torch.where(seen, some(call.scores) if call.scores is not None else stored, 0) if known else None
        return cls(lambda: torch.where(seen, some(all_logits()), 0), scores, seen)


def _recomputable(call: AttentionCall, made: Made) -> StoredLogits:
    """A sample of the logits of a fused kernel's call, computed from q and k."""
    batch, heads, length, _ = made.query.shape
    first, rows, keys = (_sampled(size, made.query) for size in (batch, length, made.key.shape[2]))
    query, key = made.query[first][:, :, rows], made.key[first][:, :, keys]
    logits = query @ key.repeat_interleave(heads // key.shape[1], 1).mT
    if made.gain is not None:
        logits = logits * made.gain.expand(batch, heads, length, 1)[first][:, :, rows]
    scores, mask = logits.detach(), call.mask
    # a mask may be made of q, as relative positions are
    if mask is not None and mask.requires_grad and call.query.dim() == 4 and not isinstance(call.scale, Tensor):
        scale = made.query.shape[-1] ** -0.5 if call.scale is None else call.scale
        added = mask.expand(batch, heads, length, made.key.shape[2])[first][:, :, rows][..., keys]
        logits, scores = logits * scale + added.masked_fill(added < HIDDEN, 0), scores * scale
    return StoredLogits(lambda: logits, scores, torch.ones_like(logits, dtype=torch.bool))


def _sampled(size: int, like: Tensor) -> Tensor:
    """Indices from the first to the last, in equal steps."""
    return torch.linspace(0, size - 1, min(size, SAMPLED), device=like.device).round().long()
