"""Measuring: the vitals of one call, for every watch that measures it, and its rows folded into heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import kernels
from ...attention import measure_without_autograd_and_modes
from ...errors import AttemperError, KernelUnavailable
from ...heads import HeadSummary
from ...operation.plain import band, is_plain_pair
from ...operation.tally import folded
from ...vitals import SIGNS, Vitals
from ..bias import with_scores
from ..call import AttentionCall, Looked, Summary, UnfoldedRows
from .modes import reason_of
from .names import name_in

if TYPE_CHECKING:
    from ...kernels.triton import SignRows
    from ..session import Watch


CAPTURED = (
    "a CUDA graph is being captured, and its numbers are computed when it is replayed. Call attemper.instrument(model) before "
    "the capture, and a watch counts every replay"
)

Measured = list[tuple[Summary, Looked]]
"""For each watch, the summary of a call and what each of its examiners found."""


def measured(call: AttentionCall, observers: list[Watch]) -> Measured:
    """The summary that each observer asked for, and what its examiners found. Equal requests are measured once."""
    if is_captured(call.query):
        raise KernelUnavailable(CAPTURED)
    again = _rows_again(call, observers[0]) if len(observers) == 1 and call.query.is_cuda else None
    if again is not None:
        return [(again, [])]
    done: dict[tuple[Any, ...], tuple[list[Part], HeadSummary | UnfoldedRows | None]] = {}
    found: Measured = []
    for observer in observers:
        rows = _given(observer.given_rows, call)
        request = (observer.signs, observer.kernel, id(rows))
        if request not in done:
            parts = [(*part, vitals_of(part[0], observer.signs, observer.kernel)) for part in call.parts(rows)]
            done[request] = parts, _by_head_of(call, parts, observer.kernel)
        parts, summary = done[request]
        found.append((summary, [one for part in parts for one in _looked(observer, *part)]))
    return found


def _looked(observer: Watch, call: AttentionCall, rows: Tensor | None, vitals: Vitals) -> Looked:
    """What each examiner found. One that fails is noted, and changes nothing for the others."""
    found: Looked = []
    for examiner in observer.examiners:
        try:
            found.append((examiner, call, examiner.look(call, vitals, rows)))
        except AttemperError:
            raise
        except Exception as error:
            name = name_in(observer, call.frames)
            observer.add_note(name or "", f"{type(examiner).__name__} found nothing: {reason_of(error)}")
    return found


Part = tuple[AttentionCall, Tensor | None, Vitals]
"""A call or a document, which of its rows count, and its vitals."""


def _by_head_of(call: AttentionCall, parts: list[Part], kernel: str) -> HeadSummary | UnfoldedRows | None:
    """The summary of all rows, whichever document they belong to; None if there are none."""
    if not parts:
        return None
    _, rows, vitals = parts[0]
    if len(parts) > 1:
        every, kept = [part[2] for part in parts], [part[1] for part in parts if part[1] is not None]
        vitals = Vitals(**{name: torch.cat([getattr(one, name) for one in every], -1) for name in vitals.measured})
        low = [one._lse_low for one in every if one._lse_low is not None]
        vitals = vitals._with_low(torch.cat(low, -1)) if low else vitals
        rows = torch.cat(kept, -1) if kept else None
    counted = None if rows is None else rows[:, None, :]
    return with_scores(by_head(vitals, counted), call, vitals, kernel, counted)


def _rows_again(call: AttentionCall, observer: Watch) -> UnfoldedRows | None:
    """The rows of a call like an earlier one on a GPU."""
    if not (call.vitals is None and call.logits is None and call.mask is None):
        return None
    if not (call.window is None and call.softcap is None and call.documents is None):
        return None
    found = rows_again(call.query, call.key, call.causal, call.scale, observer)
    rows = None if found is None else _given(observer.given_rows, call)
    if found is None or rows is None:
        return found
    return found._replace(rows=rows[:, None, :].to(call.query.device, copy=True))


def rows_again(query: Tensor, key: Tensor, causal: bool | str, scale: Any, observer: Watch) -> UnfoldedRows | None:
    """All rows of a call like an earlier one on a GPU: by the same launch, without what only a first call needs."""
    if observer.signs != SIGNS or observer.examiners or kernels.takes_plain(observer.kernel, cuda=True) is None:
        return None
    shape = query.shape
    if not (len(shape) == key.dim() == 4 and is_plain_pair(query, key, causal, scale)):
        return None
    _, right = band(causal, None, shape[2], key.shape[2])
    found = kernels.load("triton").rows_again(query, key, shape[3] ** -0.5 if scale is None else scale, right)
    return None if found is None else unfolded(query, found)


def unfolded(query: Tensor, found: SignRows) -> UnfoldedRows:
    """What the kernel wrote of all rows of a call that the current stream computes."""
    return UnfoldedRows(*found, None, kernels.load("triton").current_stream(query.get_device()))


def vitals_of(call: AttentionCall, signs: tuple[str, ...], kernel: str) -> Vitals:
    """The vitals of a call, row by row, on its device."""
    if call.vitals is not None:
        return call.vitals
    if call.logits is None:
        return measure_without_autograd_and_modes(call.query, call.key, signs=signs, kernel=kernel, **call.options())
    # with a head dimension of 0 the scores are 0, and the mask that is added to them is the model's own logits
    logits = call.logits
    query, key = logits.new_empty(*logits.shape[:-1], 0), logits.new_empty(*logits.shape[:-2], logits.shape[-1], 0)
    vitals = measure_without_autograd_and_modes(query, key, mask=logits, signs=signs, kernel=kernel)
    if "visible" in signs and "lse" in signs:
        # a NaN hides no key: the rows of a model that diverges must count
        vitals.visible = vitals.visible.masked_fill(vitals.lse.isnan(), logits.shape[-1])
    if "peak" in signs and call.products:  # a sink has a logit of its own, which is no q·k
        vitals.peak = call.largest(logits).to(vitals.peak.dtype)
    return vitals


def by_head(vitals: Vitals, rows: Tensor | None) -> HeadSummary | UnfoldedRows:
    """``vitals.by_head(rows)``, by the native library if it is installed and serves them; on a GPU, the rows for later.

    There the rows of all calls of a step are folded in one launch when the step ends.
    """
    if vitals.measured and getattr(vitals, vitals.measured[0]).is_cuda:
        if kernels.triton_is_missing() is not None or not kernels.load("triton").summary.serves(vitals):
            return vitals.by_head(rows)
        # the mask may be the user's, who may write into it before the step ends
        kept = None if rows is None else rows.to(vitals.lse.device, copy=True)
        return UnfoldedRows.of(vitals, kept, torch.cuda.current_stream(vitals.lse.device))
    return folded(vitals, rows)


def is_captured(tensor: Tensor) -> bool:
    """Whether what is computed of a tensor now goes into a CUDA graph, and is not computed before that is replayed."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _given(rows: Tensor | None, call: AttentionCall) -> Tensor | None:
    """The rows that the user gave, for the calls whose shape they have."""
    if call.documents is not None:
        return rows.reshape(1, -1) if rows is not None and rows.numel() == call.query.shape[2] else call.rows
    if rows is not None and rows.shape[-1] == call.facts.queries and rows.shape[0] in (1, call.facts.batch):
        return rows
    return call.rows
