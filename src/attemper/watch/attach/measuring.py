"""Measuring: the vitals of one call, for everyone who listens, and its rows folded into heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ... import kernels
from ...attention import measure_without_autograd_and_modes
from ...heads import COLUMNS, SATURABLE_KEYS, SATURATED_WEIGHT, HeadSummary
from ...vitals import Vitals
from ..call import Call

if TYPE_CHECKING:
    from .attachment import Listener


def measured(call: Call, listeners: list[Listener]) -> list[tuple[HeadSummary | None, Any]]:
    """What each listener asked for, and what it saw; the same wish is measured once."""
    done: dict[tuple[Any, ...], tuple[Vitals, HeadSummary]] = {}
    found: list[tuple[HeadSummary | None, Any]] = []
    for listener in listeners:
        rows = _given(listener.given_rows, call)
        wish = (listener.signs, listener.kernel, id(rows))
        if wish not in done:
            vitals = vitals_of(call, listener.signs, listener.kernel)
            done[wish] = vitals, by_head(vitals, None if rows is None else rows[:, None, :])
        vitals, summary = done[wish]
        found.append((summary, listener.examine(call, vitals, rows)))
    return found


def vitals_of(call: Call, signs: tuple[str, ...], kernel: str) -> Vitals:
    """The vitals of a call, row by row, on its device."""
    if call.vitals is not None:
        return call.vitals
    if call.logits is None:
        return measure_without_autograd_and_modes(
            call.query,
            call.key,
            mask=call.mask,
            causal=call.causal,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            signs=signs,
            kernel=kernel,
        )
    # no head dimension: what is added to nothing are the model's own logits
    logits = call.logits
    query, key = logits.new_empty(*logits.shape[:-1], 0), logits.new_empty(*logits.shape[:-2], logits.shape[-1], 0)
    vitals = measure_without_autograd_and_modes(query, key, mask=logits, signs=signs, kernel=kernel)
    if "visible" in signs and "lse" in signs:
        # a NaN hides nothing: the row of a model that diverges has to count
        vitals.visible = vitals.visible.masked_fill(vitals.lse.isnan(), logits.shape[-1])
    return vitals


def by_head(vitals: Vitals, rows: Tensor | None) -> HeadSummary:
    """``vitals.by_head(rows)``, by the native library where it is there and serves them."""
    if kernels.cpu_is_missing() is None and (native := kernels.load("cpu").summary).serves(vitals):
        sums, peaks = native.by_head(vitals, rows, SATURABLE_KEYS, SATURATED_WEIGHT)
        return HeadSummary((*COLUMNS, "peak"), sums, peaks)
    return vitals.by_head(rows)


def _given(rows: Tensor | None, call: Call) -> Tensor | None:
    """The rows that the user named, for the calls they fit."""
    if rows is not None and rows.shape[-1] == call.facts.queries and rows.shape[0] in (1, call.facts.batch):
        return rows
    return call.rows
