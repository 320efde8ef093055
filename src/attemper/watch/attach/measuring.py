"""Measuring: which rows of a call count, their vitals for every watch that measures it, and these folded into heads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import kernels
from ...errors import KernelUnavailable, guarded, internal_error
from ...heads import ALL_COLUMNS, BlockSummary, HeadSummary
from ...operation.padding import kept_by_mask
from ...operation.run import Execution, attend, compiled_kernel, native_functions
from ...operation.tally import folded
from ...vitals import SIGNS, Vitals, as_returned
from ..bias import adds_in_pass, with_scores
from ..call import AttentionCall, CallInfo, Examiner, Looked, Summary, UnfoldedRows
from .modes import without_autograd_and_modes
from .names import name_in
from .running import Pass, running

if TYPE_CHECKING:
    from ..observer import Observer


CAPTURED = (
    "a CUDA graph is being captured, and its numbers are computed when it is replayed. Call attemper.instrument(model) before "
    "the capture, and a watch counts every replay"
)

Measured = list[tuple[Summary, Looked]]
"""For each watch, the summary of a call and what each of its examiners found."""


def measured(call: AttentionCall, observers: list[Observer]) -> Measured:
    """The summary that each observer asked for, and what its examiners found. Equal requests are measured once."""
    if is_captured(call.query):
        raise KernelUnavailable(CAPTURED)
    done: dict[tuple[Any, ...], tuple[list[Part], HeadSummary | UnfoldedRows | None]] = {}
    summaries: Measured = []
    for observer in observers:
        rows = _given(observer.given_rows, call)
        request = (observer.signs, observer.kernel, id(rows), bool(observer.examiners))
        if request not in done:
            parts = [
                (*part, vitals_of(part[0], observer.signs, observer.kernel)) for part in _parts(call, rows, observer)
            ]
            done[request] = parts, _by_head_of(call, parts, observer.kernel)
        parts, summary = done[request]
        summaries.append((summary, [result for part in parts for result in _looked(observer, *part)]))
    return summaries


def sums_of(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    causal: bool | str,
    scale: float | None,
    rows: Tensor | None,
    observer: Observer,
) -> Summary:
    """The summary of a call of SDPA for a watch that needs no more of it; None if numbers are added to its scores."""
    if is_captured(query):
        raise KernelUnavailable(CAPTURED)
    if mask is not None and mask.dtype != torch.bool:
        with without_autograd_and_modes(query.device.type):
            if adds_in_pass(mask):
                return None
    if observer.native is not None and query.is_cpu:
        sums = observer.native.measure_by_head(query, key, mask, causal, scale, rows, observer.sums.room)
        if sums is not None:
            return BlockSummary(ALL_COLUMNS, *sums)
    if query.is_cuda and observer.takes_any_kernel and kernels.triton_is_missing() is None:
        replayed = kernels.load("triton").replay_signs(query, key, mask, causal, scale)
        if replayed is not None:
            return _unfolded(replayed, replayed.addresses, None if rows is None else rows[:, None, :])
    with without_autograd_and_modes(query.device.type):
        execution = Execution(observer.kernel)
        vitals = attend(
            "measure", query, key, None, observer.signs, execution, mask=mask, causal=causal, scale=scale
        ).vitals
        return by_head(vitals, None if rows is None else rows[:, None, :])


def native_summary(kernel: str, signs: tuple[str, ...]) -> Any:
    """The native library's own way from a call to its sums, if it measures the calls on the CPU for a watch; None otherwise."""
    chosen = compiled_kernel(kernel, on_cpu=True)
    return kernels.load("cpu").summary if signs == SIGNS and chosen == "cpu" and native_functions(chosen) else None


def leave_padding_out(call: AttentionCall) -> None:
    """Set which rows count."""
    current = running.current
    if current is None:
        return
    matrix = call.logits if call.logits is not None else call.mask
    matrix = matrix if call.in_order else None
    call.rows = rows_of(current, call.info, call.query, call.key, matrix, call.rows, call.sink_columns)


def rows_of(
    current: Pass,
    info: CallInfo,
    query: Tensor,
    key: Tensor,
    matrix: Tensor | None,
    rows: Tensor | None = None,
    sinks: tuple[int, int] = (0, 0),
) -> Tensor | None:
    """Which rows count: from the mask in self-attention; in cross-attention, those of the self-attention before it."""
    sequence, _ = current.planned or current.sequences_of(query, key)
    place = None if sequence is None else (sequence, info.batch, info.queries)
    if info.kind == "cross":
        # of the same sequence only: another one of the same length has other padding
        return current.kept.get(place) if rows is None and place is not None else rows
    before, after = sinks
    if rows is None and matrix is not None and info.masked and info.queries == info.keys - before - after:
        matrix = matrix.reshape((1,) * (4 - matrix.dim()) + tuple(matrix.shape)) if matrix.dim() < 4 else matrix
        whole = matrix.shape[-1] == info.keys - before - after  # without columns of sinks, as a mask is
        if matrix.dim() == 4 and (whole or matrix.shape[-1] == info.keys):
            if current.intercepted is None or not whole:
                rows = kept_by_mask(matrix if whole else matrix[..., before : info.keys - after])
            else:
                rows = current.once(matrix, kept_by_mask)
    if place is not None:
        current.kept[place] = rows
    return rows


def _parts(call: AttentionCall, rows: Tensor | None, observer: Observer) -> list[tuple[AttentionCall, Tensor | None]]:
    """The calls that are measured: the documents of a packed one by themselves if an examiner looks at them, else at once."""
    return call.parts(rows) if observer.examiners else [(call, rows)]


def _looked(observer: Observer, call: AttentionCall, rows: Tensor | None, vitals: Vitals) -> Looked:
    """What each examiner found. One that fails is noted, and changes nothing for the others."""
    results: Looked = []
    for examiner in observer.examiners:
        with guarded(partial(_note_nothing, observer, call, examiner)):
            results.append((examiner, call, examiner.look(call, vitals, rows)))
    return results


def _note_nothing(observer: Observer, call: AttentionCall, examiner: Examiner, error: Exception) -> None:
    name = name_in(observer, call.frames)
    observer.add_note(name or "", f"{type(examiner).__name__} found nothing: {internal_error(error)}")


Part = tuple[AttentionCall, Tensor | None, Vitals]
"""A call or a document, which of its rows count, and its vitals."""


def _by_head_of(call: AttentionCall, parts: list[Part], kernel: str) -> HeadSummary | UnfoldedRows | None:
    """The summary of all rows, whichever document they belong to; None if there are none."""
    if not parts:
        return None
    _, rows, vitals = parts[0]
    if len(parts) > 1:
        every, kept = [part[2] for part in parts], [part[1] for part in parts if part[1] is not None]
        vitals = Vitals(
            **{name: torch.cat([getattr(part_vitals, name) for part_vitals in every], -1) for name in vitals.measured}
        )
        low = [part_vitals._lse_low for part_vitals in every if part_vitals._lse_low is not None]
        vitals = vitals._with_low(torch.cat(low, -1)) if low else vitals
        rows = torch.cat(kept, -1) if kept else None
    counted = None if rows is None else rows[:, None, :]
    return with_scores(by_head(vitals, counted), call, vitals, kernel, counted)


def vitals_of(call: AttentionCall, signs: tuple[str, ...], kernel: str) -> Vitals:
    """The vitals of a call, row by row, on its device."""
    if call.vitals is not None:
        return call.vitals
    if call.logits is None:
        return attend("measure", call.query, call.key, None, signs, Execution(kernel), **call.options()).vitals
    # with a head dimension of 0 the scores are 0, and the mask that is added to them is the model's own logits
    logits = call.logits
    query, key = logits.new_empty(*logits.shape[:-1], 0), logits.new_empty(*logits.shape[:-2], logits.shape[-1], 0)
    vitals = attend("measure", query, key, None, signs, Execution(kernel), mask=logits).vitals
    if "visible" in signs and "lse" in signs:
        # a NaN hides no key: the rows of a model that diverges must count
        vitals.visible = vitals.visible.masked_fill(vitals.lse.isnan(), logits.shape[-1])
    if "peak" in signs and call.products:  # a sink has a logit of its own, which is no q·k
        vitals.peak = call.largest(logits).to(vitals.peak.dtype)
    return vitals


def sums_of_all_rows(vitals: Vitals, observer: Observer, device: str) -> Summary:
    """The summary of a call that its kernel has measured, and all of whose rows count, for a watch that needs no more of it."""
    block = as_returned(vitals)
    if observer.native is not None and (shape := observer.native.foldable(block)) is not None:
        return BlockSummary(ALL_COLUMNS, *observer.native.fold(block, shape, None, observer.sums.room))
    if (addresses := getattr(block, "addresses", None)) is not None:
        return _unfolded(block, addresses, None)
    with without_autograd_and_modes(device):
        return by_head(vitals, None)


def by_head(vitals: Vitals, rows: Tensor | None) -> HeadSummary | UnfoldedRows:
    """``vitals.by_head(rows)``, by the native library if it is installed and serves them; on a GPU, the rows for later.

    There the rows of all calls of a step are folded in one launch when the step ends.
    """
    returned = as_returned(vitals)
    if (addresses := getattr(returned, "addresses", None)) is not None:
        return _unfolded(returned, addresses, rows)
    source = vitals if returned is None else returned  # a sign that is read from the latter is not kept
    on_host = getattr(returned, "foldable", None) is not None  # known without a sign
    if not on_host and vitals.measured and getattr(source, vitals.measured[0]).is_cuda:
        if kernels.triton_is_missing() is not None or not kernels.load("triton").summary.serves(vitals):
            return vitals.by_head(rows)
        own_rows = None if rows is None else rows.to(vitals.lse.device, copy=True)
        return UnfoldedRows.of(vitals, own_rows, torch.cuda.current_stream(vitals.lse.device))
    return folded(vitals, rows)


def _unfolded(signs: Any, addresses: tuple[int, ...], rows: Tensor | None) -> UnfoldedRows:
    """Signs that a kernel on a GPU wrote at these addresses, for later."""
    device = signs.memory[0].device
    # the mask may be the user's, who may write into it before the step ends
    own_rows = None if rows is None else rows.to(device, copy=True)
    stream = kernels.load("triton").current_stream(device.index)
    return UnfoldedRows(addresses, signs.shape, signs.memory, own_rows, stream)


def is_captured(tensor: Tensor) -> bool:
    """Whether what is computed of a tensor now goes into a CUDA graph, and is not computed before that is replayed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _given(rows: Tensor | None, call: AttentionCall) -> Tensor | None:
    """The rows that the user gave, for the calls whose shape they have."""
    if call.documents is not None:
        return rows.reshape(1, -1) if rows is not None and rows.numel() == call.query.shape[2] else call.rows
    if rows is not None and rows.shape[-1] == call.info.queries and rows.shape[0] in (1, call.info.batch):
        return rows
    return call.rows
