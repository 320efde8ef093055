"""Numbers: a step of a record as the few numbers that a logger is given, named by their sign first."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import health
from ..errors import InputError, checked_options
from ..health import Finding
from ..health.thresholds import LEVELS, PEAK, SATURATED
from ..watch import Record
from ..watch.examine import Entry

PREFIX = "attemper"
WARN = next(rung for rung in PEAK if rung.level == "warn").value  # 50
UNSAFE = re.compile(r"[^A-Za-z0-9_./-]")


@checked_options
def summary(record: Record, step: int | None = None, *, layers: bool = False) -> dict[str, float]:
    """The numbers of a step that a logger is given: eight of the whole model, and on request three of each layer.

    ``attemper/peak`` is the largest logit, ``peak_p90`` the 90th percentile of the heads' largest logits, ``logit_std`` the
    largest standard deviation of a head's logits, ``evenness_p05`` the 5th percentile of the heads' evenness, ``saturated`` the
    share of heads that are saturated, ``effective_keys`` the median over heads, ``heads_over_50`` how many heads have a logit
    above 50, ``level`` that of the worst finding (0 ok, 1 note, 2 warn, 3 act, 4 critical, 5 diverging). With gradients there is
    also ``grad_q_rms``, the largest of any head. Numbers that are not finite are left out: a finding reports them.

    Args:
        record: of a watch.
        step: one of its steps; None is the last one.
        layers: adds ``attemper/peak/<layer>``, ``attemper/evenness/<layer>`` (the lowest of its heads) and
            ``attemper/logit_std/<layer>``.

    Example:
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        >>> x = torch.zeros(1, 5, 16)
        >>> with attemper.watch(model) as watch:
        ...     _ = model(x, x, x)
        >>> numbers = attemper.integrations.summary(watch.record)
        >>> round(numbers["attemper/effective_keys"], 4)      # five equal keys
        5.0
    """
    one = of_step("summary", record, step)
    return numbers(one, health.check(one), layers)


def of_step(where: str, record: Record, step: int | None) -> Record:
    """The rows of one step; the last one if it is None."""
    steps = record.steps
    if not steps or (step is not None and step not in steps):
        has = f"it has the steps {steps[0]} to {steps[-1]}" if steps else "it has no steps"
        raise InputError(f"{where}(): the record has no step {'' if step is None else step}; {has}. Watch it first.")
    return record.filter(steps=steps[-1] if step is None else step)


def numbers(record: Record, findings: Sequence[Finding], layers: bool) -> dict[str, float]:
    """The numbers of a record of one step, with its findings."""
    entries = record.entries
    peak, std, evenness = (_joined(entries, sign) for sign in ("peak", "variance", "evenness"))
    found = {
        "peak": _largest(peak),
        "peak_p90": _quantile(peak, 0.9),
        "logit_std": _largest(std) ** 0.5,
        "evenness_p05": _quantile(evenness, 0.05),
        "saturated": _mean(_joined(entries, "saturated") > SATURATED.value, entries, "saturated"),
        "effective_keys": _quantile(_joined(entries, "effective_keys"), 0.5),
        "heads_over_50": float((peak > WARN).sum()) if len(peak) else math.nan,
        "level": float(_level(findings)),
        "grad_q_rms": _largest(torch.cat([_gradient(entry) for entry in entries])),
    }
    if layers:
        for entry in entries:
            name = UNSAFE.sub("_", entry.layer or "model") + ("/cross" if entry.kind == "cross" else "")
            found[f"peak/{name}"] = _largest(_joined([entry], "peak"))
            found[f"evenness/{name}"] = -_largest(-_joined([entry], "evenness"))
            found[f"logit_std/{name}"] = _largest(_joined([entry], "variance")) ** 0.5
    return {f"{PREFIX}/{name}": number for name, number in found.items() if math.isfinite(number)}


def _level(findings: Sequence[Finding]) -> int:
    return max((LEVELS.index(one.level) - LEVELS.index("ok") for one in findings), default=0)


def _joined(entries: Sequence[Entry], sign: str) -> Tensor:
    """A sign of every head that has rows and a finite number."""
    parts = [getattr(entry.summary, sign) for entry in entries if sign in entry.summary.columns]
    every = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device="cpu")
    return every[every.isfinite()]


def _gradient(entry: Entry) -> Tensor:
    sums = entry.gradients
    empty = torch.empty(0, dtype=torch.float64, device="cpu")
    root = empty if sums is None else (sums[:, 1] / sums[:, 0]).sqrt()
    return root[root.isfinite()]


def _largest(every: Tensor) -> float:
    return float(every.max()) if len(every) else math.nan


def _quantile(every: Tensor, share: float) -> float:
    return float(every.quantile(share)) if len(every) else math.nan


def _mean(flags: Tensor, entries: Sequence[Entry], sign: str) -> float:
    measured = any(sign in entry.summary.columns for entry in entries)
    return float(flags.double().mean()) if len(flags) else 0.0 if measured else math.nan
