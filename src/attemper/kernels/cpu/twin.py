"""twin: what the extension does, in Python: it runs where torch has no table of DLPack that is known, and tests the extension."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from ...vitals import SIGNS
from ..contract import FLOATS, LARGEST, NeedsGrad, Problem, Results, Upstream, band, block_results, measuring_dtype
from ..guard import guard as guard

_LARGEST_INT = torch.iinfo(torch.int64).max


class SignBlock:
    """The signs of a call: a tensor by each name, None if not measured."""

    places: list[slice | None]

    def __init__(self, signs: Results, problem: Problem, sign_bits: int, saved: bool) -> None:
        self.__dict__.update(signs._asdict())
        self._numbers, self._kept = problem[5:], saved
        self._packed = [signs[-len(SIGNS) :][index] for index in range(1, len(SIGNS)) if sign_bits >> index & 1]

    @property
    def packed(self) -> Tensor | None:
        """The signs that were asked for and have a gradient, one after another in one tensor."""
        return torch.stack(self._packed) if self._packed else None

    def saved(self) -> tuple[SignBlock, Tensor]:
        """What autograd keeps of a call: a block that says where the signs lie in one tensor of bytes, and this tensor."""
        block, parts, end = copy.copy(self), [], 0
        block.__dict__ = {name: getattr(self, name) for name in ("_numbers", "_kept")} | {"places": []}
        for name in Results._fields[1:]:
            sign = getattr(self, name)
            if sign is None:
                block.places.append(None)
                continue
            part = sign.flatten().view(torch.int8)
            block.places.append(slice(end, end + len(part)))
            # each begins at a multiple of its dtype's size
            parts.append(torch.nn.functional.pad(part, (0, -len(part) % 64)))
            end += len(parts[-1])
        return block, torch.cat(parts)

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        mask: Tensor | None,
        gain: Tensor | None,
        output: Tensor | None,
        memory: Tensor,
        upstream: tuple[Tensor | None, ...],
        needs: int,
    ) -> tuple[Tensor | None, ...] | None:
        """The gradients of the five tensors, None where `needs`, the sum of 1 << place, does not ask for one.

        `memory` holds the signs. `upstream` are the gradients that arrive, as ``Upstream`` lists them. The result is None if the
        signs were not saved, the mask needs a gradient, or something must be copied or cast first: ``backward`` does that. A
        saved tensor of another shape or dtype is an error.
        """
        from . import backward

        if not self._kept or needs >> 3 & 1 or (needs >> 4 & 1 and gain is not None and gain.dim() != 3):
            return None
        problem: Any = Problem(query, key, value, mask, gain, *self._numbers)
        found = backward(
            problem,
            block_results(self.places, memory, query, output),
            Upstream(*upstream),
            NeedsGrad(*(bool(needs >> index & 1) for index in range(5))),
        )
        return found[:5]


def forward(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    gain: Any,
    causal: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    sign_bits: int,
    grouped: bool,
    saved: bool,
) -> tuple[Tensor | None, SignBlock | None] | None:
    """The output of a call whose tensors are plain, None without values, and its signs. None if the call may not be valid.

    Everything else is checked here. Tensors have 4 dimensions and are on the CPU; `grouped` allows fewer key heads than query
    heads; `saved` says that a backward will read the signs.
    """
    from . import forward as run

    problem = _problem(query, key, value, mask, gain, causal, window, scale, softcap, grouped)
    if problem is None:
        return None
    output, signs = run(problem, sign_bits, saved)
    return output, SignBlock(signs, problem, sign_bits, saved) if sign_bits or saved else None


def _problem(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    gain: Any,
    causal: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    grouped: bool,
) -> Problem | None:
    given = (query, key, *(tensor for tensor in (value, mask, gain) if tensor is not None))
    if not all(isinstance(t, Tensor) and t.is_cpu and t.layout is torch.strided and t.numel() for t in given):
        return None
    if not all(tensor.dim() == 4 for tensor in given if tensor is not gain):
        return None
    (batch, heads, rows, dim), (key_batch, groups, keys, key_dim) = query.shape, key.shape
    if not query.dtype is key.dtype is (key if value is None else value).dtype or query.dtype not in FLOATS:
        return None
    if batch != key_batch or dim != key_dim or (value is not None and value.shape[:3] != key.shape[:3]):
        return None
    if heads != groups and (grouped is not True or heads % groups):
        return None
    if mask is not None and (
        mask.dtype not in (*FLOATS, torch.bool) or not _broadcasts(mask, (batch, heads, rows, keys))
    ):
        return None
    if gain is not None:
        gain = _gain(gain, query)
        if gain is None:
            return None
    if window is not None and not (type(window) is int and 0 < window <= _LARGEST_INT):
        return None
    if not (causal is False or causal is True or (type(causal) is str and causal == "lower_right")):
        return None
    scale = (1.0 if gain is not None else float(dim) ** -0.5) if scale is None else scale
    cap = LARGEST if softcap is None else softcap
    if not (type(scale) is float and abs(scale) <= LARGEST and type(cap) is float and 0 < cap <= LARGEST):
        return None
    left, right = band(causal, window, rows, keys)
    return Problem(query, key, value, mask, gain, None, None, None, None, scale, left, right, softcap, 0.0)


def _gain(gain: Tensor, query: Tensor) -> Tensor | None:
    """One number, one per head, (B, H, Lq), each possibly 1, or with a last 1, as (B, H, Lq)."""
    shape = query.shape[:3]
    gain = gain[..., None] if gain.dim() == 3 else gain
    if gain.dtype is not measuring_dtype(query.dtype):
        return None
    if gain.dim() < 2 and gain.numel() == 1:
        return gain.reshape(()).expand(shape)
    if gain.dim() == 1 and gain.shape[0] == shape[1]:
        return gain.view(1, -1, 1).expand(shape)
    return gain.expand(*shape, 1)[..., 0] if gain.dim() == 4 and _broadcasts(gain, (*shape, 1)) else None


def _broadcasts(tensor: Tensor, full: tuple[int, ...]) -> bool:
    return all(size in (1, wanted) for size, wanted in zip(tensor.shape, full, strict=True))
