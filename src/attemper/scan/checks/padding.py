"""Padding: which tokens of a batch are padding, by the names and the numbers of its masks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

HIDES = re.compile(r"pad|hidden|ignore", re.IGNORECASE)  # True, 1 or −inf is padding
SHOWS = re.compile(r"^(decoder_|encoder_)?attention_mask$|keep|valid|real", re.IGNORECASE)  # 1 is a real token
# masks of tokens, not of a loss or of positions
MASK = re.compile(r"^(?!.*(loss|label|lm_|span|prompt|head|pos)).*mask$", re.IGNORECASE)


def named_arguments(model: nn.Module, batch: Any) -> dict[str, Any]:
    """What a model is called with, by name; positions are named by its forward."""
    if isinstance(batch, Mapping):
        return dict(batch)
    given = batch if isinstance(batch, tuple) else (batch,)
    try:
        bound = inspect.signature(model.forward).bind(*given)
    except (TypeError, ValueError):
        return {str(place): one for place, one in enumerate(given)}
    return dict(bound.arguments)


def real_tokens(model: nn.Module, batch: Any) -> dict[tuple[int, int], Tensor]:
    """By (B, L): which tokens are real, for every mask of the batch that marks padding. A mask that hides nothing is left out."""
    found: dict[tuple[int, int], Tensor] = {}
    for name, value in named_arguments(model, batch).items():
        real = is_real(name, value)
        if real is None or bool(real.all()):
            continue
        shape = (real.shape[0], real.shape[1])
        if shape in found and not torch.equal(found[shape], real):
            return {}  # it cannot be said whose it is
        found[shape] = real
    return found


def is_packed(arguments: Mapping[str, Any]) -> bool:
    """Whether a batch has documents after one another: their offsets, or positions that restart without a mask."""
    if any(name.startswith("cu_seq") and value is not None for name, value in arguments.items()):
        return True
    positions = arguments.get("position_ids")
    if arguments.get("attention_mask") is not None or not isinstance(positions, Tensor) or positions.is_meta:
        return False
    return positions.dim() == 2 and bool((positions.diff(dim=-1) < 1).any())


def is_real(name: str, value: object) -> Tensor | None:
    """Which tokens an argument marks as real, (B, L); None if it is no mask of tokens."""
    if not isinstance(value, Tensor) or value.dim() != 2 or not value.numel() or value.is_meta:
        return None
    numbers = value.detach()
    if numbers.is_floating_point():
        if bool((numbers <= -1e4).any()):
            return (numbers > -1e4) if MASK.search(name) or HIDES.search(name) else None
        if not bool(((numbers == 0) | (numbers == 1)).all()):
            return None
    marked = numbers != 0
    if not bool(((numbers == 0) | (numbers == 1)).all()):
        return None
    if SHOWS.search(name):
        return marked
    if HIDES.search(name):
        return ~marked
    if not MASK.search(name):
        return None
    for end in (0, -1):  # the first token is real, or else the last
        column = marked[:, end]
        if bool((column == column[0]).all()):
            return marked if bool(column[0]) else ~marked
    return None
