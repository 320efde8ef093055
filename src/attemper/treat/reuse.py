"""Reuse: a layer that is built like one already searched has the same rows, if they make its q and k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from ..watch.examine import AttentionCall
from .derivatives import NOBODY, used
from .find import Candidate, Made
from .table import LayerProjections, ProjectionPart

Build = tuple[object, ...]
"""What layers of one kind have in common."""


def build_of(call: AttentionCall, layer: str, candidates: list[Candidate]) -> Build:
    """The class of the attention module, its parameters, and the sizes of the call."""
    info = call.info
    parameters = tuple((_inside(candidate.name, layer), tuple(candidate.tensor.shape)) for candidate in candidates)
    module = type(call.frames[-1].module)
    return (module, parameters, info.kind, info.heads, info.kv_heads, info.head_dim, info.route, info.dtype)


def reused(
    layer: str, call: AttentionCall, candidates: list[Candidate], known: LayerProjections
) -> LayerProjections | None:
    """The projections of a layer, copied from one that is built alike; None if it must be searched."""
    made = Made.of(call)
    if (
        made is None
        or made.key.shape[1] != known.key_heads
        or any(part.side in ("gain", "both") for part in known.parts)
    ):
        return None
    if known.splits and any(bool(part.whole.any()) for part in known.parts):
        return None  # channels of k of two kinds: searched each time
    if not (made.query.requires_grad and made.key.requires_grad):
        return None
    names = {_inside(candidate.name, layer): candidate.name for candidate in candidates}
    inside = [_inside(part.parameter, known.layer) for part in known.parts]
    if not all(name in names for name in inside):
        return None
    parts = tuple(replace(part, parameter=names[name]) for part, name in zip(known.parts, inside, strict=True))
    tensors = {candidate.name: candidate.tensor for candidate in candidates}
    if not _make_their_sides(parts, [tensors[part.parameter] for part in parts], made):
        return None
    return replace(known, layer=layer, parts=parts)


def _make_their_sides(parts: Sequence[ProjectionPart], tensors: Sequence[Tensor], made: Made) -> bool:
    """Whether the rows of each part make q, or k, and neither the other nor the values."""
    for side, output in (("q", made.query), ("k", made.key), ("v", made.value)):
        for part, rows in zip(parts, [] if output is None else used(output, tensors), strict=output is not None):
            makes = rows is not None and bool((rows[part.dim] & (part.owner != NOBODY).to(rows[part.dim].device)).any())
            if makes != (part.side == side):
                return False
    return True


def _inside(name: str, layer: str) -> str:
    return name.removeprefix(f"{layer}.") if layer else name
