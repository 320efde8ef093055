"""Bias: numbers that are added to the scores of visible keys (ALiBi, T5), and the largest scale · q·k without them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads import HeadSummary
from ..kernels.contract import HIDDEN_BIAS
from ..operation.run import Execution, attend
from ..vitals import Vitals
from .attach.running import running
from .call import AttentionCall, UnfoldedRows


def adds(mask: Tensor | None) -> bool:
    """Whether a mask adds numbers to the scores of keys that it does not hide, or may do so."""
    if mask is None or mask.dtype == torch.bool:
        return False
    if mask.device.type != "cpu":
        return True  # reading numbers of another device would wait for it
    return bool(((mask != 0) & (mask > HIDDEN_BIAS)).any())


def adds_in_pass(mask: Tensor) -> bool:
    """`adds`, once for the calls of an intercepted pass that share a mask."""
    current = running.current
    return adds(mask) if current is None or current.intercepted is None else current.once(mask, adds)


def with_scores(
    summary: HeadSummary | UnfoldedRows, call: AttentionCall, vitals: Vitals, kernel: str, rows: Tensor | None
) -> HeadSummary | UnfoldedRows:
    """The summary of a call with the largest scale · q·k of its heads, if numbers are added to the scores of visible keys."""
    peaks = largest_scores(call, kernel) if "peak" in vitals.measured else None
    if peaks is None:
        return summary
    broken = vitals.peak.isnan() | (vitals.peak == torch.inf)
    peaks = torch.where(broken, vitals.peak, peaks.to(vitals.peak.dtype))
    merged_peaks = HeadSummary.of({"peak": peaks}, rows).peaks
    if isinstance(summary, UnfoldedRows):
        return summary._replace(score_peaks=merged_peaks)
    return HeadSummary(summary.columns, summary.sums, summary.peaks, merged_peaks)


def largest_scores(call: AttentionCall, kernel: str) -> Tensor | None:
    """The largest score of each row, (B, H, Lq), without what is added to it; None if that is its peak, or is not known."""
    if call.scores is not None:
        return call.largest(call.scores)
    if call.logits is not None or call.mask is None or not adds_in_pass(call.mask):
        return None
    asked = {**call.options(), "mask": ~(call.mask <= HIDDEN_BIAS)}  # a NaN hides no key
    return attend("measure", call.query, call.key, None, ("peak",), Execution(kernel), **asked).vitals.peak
