"""Effect: whether a clip of some rows scales the logits of each head by its own factor: by their derivatives, call by call."""

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
"""Queries, keys and sequences of a call whose logits are made again: not the whole matrix, which a fused kernel never stores."""
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
    "a term of its logits holds q without k, or k without q (relative positions), so that a factor which q and k share does not "
    "scale them as a whole. Bound q and k with attemper.add_qk_norm()"
)
ANOTHER = (
    "it attends several times in a pass, and the parameters that make the heads of one call do not make those of another: its "
    "heads run in parts (attention slicing), or several layers run in one module"
)


def reason_against(
    found: LayerProjections, call: AttentionCall, stored: StoredLogits | None, tensors: Mapping[str, Tensor]
) -> str | None:
    """Why a clip would not scale the logits of each head in this call by the head's factor alone; None if it would."""
    made = Made.of(call)
    if made is None or made.query.shape[1] != found.heads or any(part.parameter not in tensors for part in found.parts):
        return ANOTHER
    again, scores, seen = _made_again(call, made) if stored is None else stored
    logits = again()
    if not logits.requires_grad:
        return None  # a pass without gradients shows nothing
    along = Along(found, logits, tensors)
    ones = torch.ones(found.heads, dtype=torch.float64, device="cpu")
    expected = along(ones, 0.5, "query") if scores is None else scores
    if not bool(expected.any()):
        return WITHOUT if scores is None else None  # weights that are still 0
    codes = ones if found.how == BY_LAYER else torch.linspace(1, 2, found.heads, dtype=torch.float64, device="cpu")
    by_group = codes.view(found.key_heads, -1).amin(-1).repeat_interleave(found.heads // found.key_heads)
    grouped = found.key_heads != found.heads
    tries = [(codes, alpha, "query") for alpha in ((0.0, 1.0) if found.splits and not grouped else (0.5,))]
    tries += [(by_group, 0.5, "group")] if grouped and found.splits else []
    limit = max(tolerance(tensor) for tensor in (logits, *along.tensors))
    for each, alpha, shared in tries:
        if not _follows(along(each, alpha, shared), each, expected, seen, limit):
            alone = _follows(along(ones, alpha, shared), ones, expected, seen, limit)
            apart = found.splits and not alone and _is_apart(along, ones, expected, limit)
            return MIXED if alone else ONE_SIDE if apart else WITHOUT
    return None


def _follows(change: Tensor, codes: Tensor, expected: Tensor, seen: Tensor, limit: float) -> bool:
    """Whether each head changed by its own factor; a row may also change as a whole, as one whose largest is subtracted."""
    wanted = expected * codes.to(expected).view(1, -1, 1, 1)
    rest = change - wanted
    by_row = (rest - rest.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)) * seen
    return any(bool((share(part, wanted) <= limit).all()) for part in (rest, by_row))


def _is_apart(along: Along, ones: Tensor, expected: Tensor, limit: float) -> bool:
    """Whether logits change otherwise along q than along k: each term with both changes alike."""
    query, key = along(ones, 1.0, "query"), along(ones, 0.0, "query")
    return not bool((share(query - key, expected) <= limit).all())


class Along:
    """The derivative of logits along what a clip multiplies, for codes of heads in place of the logarithms of their factors."""

    def __init__(self, found: LayerProjections, logits: Tensor, tensors: Mapping[str, Tensor]) -> None:
        self.found = found
        self.names = list(dict.fromkeys(part.parameter for part in found.parts))
        self.tensors = [tensors[name] for name in self.names]
        self.along = Directional(logits, self.tensors)

    def __call__(self, codes: Tensor, alpha: float, shared: str) -> Tensor:
        directions: dict[int, Tensor] = {}
        for name, dim, offset, factor in factors_of(self.found, codes.exp(), alpha, shared):
            place = self.names.index(name)
            tensor = self.tensors[place].detach()
            direction = (tensor + offset) * along_rows(factor.log().to(tensor), dim, tensor)
            directions[place] = directions[place] + direction if place in directions else direction
        return self.along.together(directions)


class StoredLogits(NamedTuple):
    """Some of the logits that a model stored, taken while they exist."""

    graph: Callable[[], Tensor]  # them with their graph
    scores: Tensor | None  # what of them is scale · q·k; None: not known
    seen: Tensor  # which are not hidden

    @classmethod
    def of(cls, call: AttentionCall) -> StoredLogits | None:
        """None for a call whose logits are made of q and k alone."""
        if call.logits is None or call.graph is None:
            return None
        logits, all_logits = call.logits, call.graph
        first, rows = (_some(logits.shape[dim], logits) for dim in (0, 2))
        # of each product, if several share a softmax, and of no sink
        spans = call.products or ((0, logits.shape[-1]),)
        columns = torch.cat([start + _some(stop - start, logits) for start, stop in spans if start < stop])

        def some(matrix: Tensor) -> Tensor:
            return matrix[first][:, :, rows][..., columns]

        stored = some(logits)
        seen = (stored > HIDDEN) & stored.isfinite()
        known = not call.facts.biased and call.facts.softcap is None
        scores = torch.where(seen, some(call.scores) if call.scores is not None else stored, 0) if known else None
        return cls(lambda: torch.where(seen, some(all_logits()), 0), scores, seen)


def _made_again(call: AttentionCall, made: Made) -> StoredLogits:
    """Some of the logits of a call of a fused kernel."""
    batch, heads, length, _ = made.query.shape
    first, rows, keys = (_some(size, made.query) for size in (batch, length, made.key.shape[2]))
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


def _some(size: int, like: Tensor) -> Tensor:
    """Places from the first to the last, in equal steps."""
    return torch.linspace(0, size - 1, min(size, SAMPLED), device=like.device).round().long()
