"""The route of attemper's own operation: a call is read from its arguments, which may hold a scale per head or row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...kernels.contract import Problem
from ..attach.running import Frame
from ..call import AttentionCall, Facts
from .handwritten.slices import find_slices
from .kind import kind_of
from .sdpa import unreadable


def read(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frames: tuple[Frame, ...]
) -> AttentionCall | str | None:
    """A call of ``attention()`` or of another function with the same op; None for one that only measures."""
    problem = Problem(*args[: len(Problem._fields)])
    query, key = problem.query, problem.key
    if problem.value is None:
        return None
    if problem.weight is not None:
        return "additive scores"
    reason = unreadable(query, key, problem.mask, problem.gain)
    if reason is not None:
        return reason
    rows, keys = query.shape[2], key.shape[2]
    causal, window = band(problem.left, problem.right)
    facts = Facts.of(
        "attemper",
        kind_of(frames, query, key, (rows, keys)),
        query,
        key,
        scale=problem.scale,
        causal=causal is not False,
        mask=problem.mask,
        dropout=problem.dropout,
        softcap=problem.softcap,
        window=window,
    )
    call = AttentionCall(
        facts, frames, query, key, mask=problem.mask, causal=causal, window=window, softcap=problem.softcap
    )
    call.scale, call.value = problem.scale, problem.value
    if problem.gain is not None:
        call.gain = problem.gain
        call.scale = (problem.scale * problem.gain.detach()).unsqueeze(-1)
        call.facts = replace(facts, scale=None)  # many numbers; reading them would wait for their device
    find_slices(call)
    return call


def band(left: int | None, right: int | None) -> tuple[bool | str, int | None]:
    """The visible keys of query i, i − left … i + right, as ``causal`` and ``window``."""
    if left is not None and left == right:
        return False, left + 1
    causal: bool | str = False if right is None else True if right == 0 else "lower_right"
    offset = right or 0
    return causal, None if left is None else left + 1 + offset
