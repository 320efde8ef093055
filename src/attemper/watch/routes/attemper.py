"""The route of attemper's own operation: a call is read from its arguments, which may hold a scale per head or row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...kernels.contract import Problem
from ..attach.running import Frame
from ..call import AttentionCall, CallInfo, Documents
from . import packed
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
    if problem.from_end:
        causal = "lower_right"
    info = CallInfo.of(
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
        info, frames, query, key, mask=problem.mask, causal=causal, window=window, softcap=problem.softcap
    )
    call.scale, call.value = problem.scale, problem.value
    if problem.sink is not None and problem.sink.numel():
        call.take_sink(problem.sink[0, :, 0])
    if problem.gain is not None:
        call.gain = problem.gain
        call.scale = (problem.scale * problem.gain.detach()).unsqueeze(-1)
        call.info = replace(info, scale=None)  # many numbers; reading them would wait for their device
    find_slices(call)
    return call if problem.documents is None else _packed(call, problem)


def _packed(call: AttentionCall, problem: Problem) -> AttentionCall | str:
    """The call with its documents; the items of a batch follow one another."""
    assert problem.documents is not None
    batch, rows, keys = problem.query.shape[0], problem.query.shape[2], problem.key.shape[2]
    if batch > 1 and (problem.mask is not None or problem.gain is not None):
        return "documents in several items of a batch, with a mask or with a scale for each row"
    of_rows: list[int] = []
    of_keys: list[int] = []
    for item in range(batch):
        for offsets, given, length in ((of_rows, problem.documents[0], rows), (of_keys, problem.documents[-1], keys)):
            own = packed.numbers_of(given[min(item, len(given) - 1)])
            if isinstance(own, str):
                return own
            offsets += [item * length + number for number in own[:-1]]
    spans = packed.cut(((*of_rows, batch * rows), (*of_keys, batch * keys)), (batch * rows, batch * keys))
    if isinstance(spans, str):
        return spans
    if not spans:
        return "documents without a token"
    tensors = problem.query, problem.key
    call.query, call.key = map(packed.in_one_row, tensors)
    call.value = None
    return packed.with_documents(call, Documents(spans, tensors, packed.in_one_row))


def band(left: int | None, right: int | None) -> tuple[bool | str, int | None]:
    """The visible keys of query i, i − left … i + right, as ``causal`` and ``window``."""
    if left is not None and left == right:
        return False, left + 1
    causal: bool | str = False if right is None else True if right == 0 else "lower_right"
    offset = right or 0
    return causal, None if left is None else left + 1 + offset
