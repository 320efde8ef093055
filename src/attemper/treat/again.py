"""Again: a layer that is built like one that was searched has the same rows; derivatives along them confirm that it has."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..watch.examine import AttentionCall
from .derivatives import NOBODY, Directional, share, tolerance
from .find import Candidate, Made, along_rows
from .table import BY_LAYER, LayerProjections

Build = tuple[object, ...]
"""What layers of one kind have in common."""


def build_of(call: AttentionCall, layer: str, candidates: list[Candidate]) -> Build:
    """The class of the attention module, its parameters, and the sizes of the call."""
    facts = call.facts
    parameters = tuple((_inside(one.name, layer), tuple(one.tensor.shape)) for one in candidates)
    module = type(call.frames[-1].module)
    return (module, parameters, facts.kind, facts.heads, facts.kv_heads, facts.head_dim, facts.route, facts.dtype)


def found_again(
    layer: str, call: AttentionCall, candidates: list[Candidate], known: LayerProjections
) -> LayerProjections | None:
    """The projections of a layer that is built like a known one; None if derivatives do not confirm them."""
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
    places = {_inside(one.name, layer): place for place, one in enumerate(candidates)}
    directions: dict[str, dict[int, Tensor]] = {"q": {}, "k": {}}
    generator = torch.Generator("cpu").manual_seed(3)
    codes = {
        side: torch.rand(count, generator=generator, dtype=torch.float64, device="cpu") + 0.5
        for side, count in (("q", known.heads), ("k", known.key_heads))
    }
    if known.how == BY_LAYER:
        codes["q"].fill_(1.0)
    renamed = []
    for part in known.parts:
        place = places.get(_inside(part.parameter, known.layer))
        if place is None:
            return None
        tensor = candidates[place].tensor.detach()
        code = torch.where(
            part.owner != NOBODY,
            codes[part.side][part.owner.clamp(min=0)],
            torch.zeros((), dtype=torch.float64, device="cpu"),
        )
        directions[part.side][place] = (tensor + part.offset) * along_rows(code.to(tensor), part.dim, tensor)
        renamed.append(replace(part, parameter=candidates[place].name))
    tensors = [one.tensor for one in candidates]
    if not _confirmed(made, tensors, directions, codes):
        return None
    return replace(known, layer=layer, parts=tuple(renamed))


def _confirmed(
    made: Made, tensors: list[Tensor], directions: dict[str, dict[int, Tensor]], codes: dict[str, Tensor]
) -> bool:
    """Whether each head follows its own rows by its own factor, and nothing else does."""
    sides = {"q": made.query, "k": made.key}
    for side, output in sides.items():
        along, limit = Directional(output, tensors), tolerance(output)
        for other, direction in directions.items():
            if not direction:
                continue
            change = along.together(direction)
            expected = output * codes[side].to(output).view(1, -1, 1, 1) if side == other else torch.zeros_like(output)
            if not bool((share(change - expected, output) <= limit).all()):
                return False
    if made.value is None:
        return True
    along = Directional(made.value, tensors)
    return not any(bool(along.together(direction).any()) for direction in directions.values())


def _inside(name: str, layer: str) -> str:
    return name.removeprefix(f"{layer}.") if layer else name
