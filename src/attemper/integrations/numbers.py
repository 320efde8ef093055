"""Numbers: a step of a record as the few numbers that a logger is given, named by their sign first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from .. import health
from ..errors import InputError, checked_options, nearest
from ..heads import COLUMNS
from ..health import Finding
from ..health.thresholds import LEVELS, PEAK, SATURATED
from ..watch import Record
from ..watch.examine import Entry, RecordRow

PREFIX = "attemper"
WARN = next(rung for rung in PEAK if rung.level == "warn").value  # 50
UNSAFE = re.compile(r"[^A-Za-z0-9_./-]")
GRADIENTS = ("grad_q_rms", "grad_q_median", "grad_k_rms", "grad_k_median")
SIGNS = ("peak", "logit_std", *(name for name in COLUMNS if not name.endswith("rows")), *GRADIENTS)
"""What can be logged of a head: the columns of a record, and the root of its variance."""

LARGEST = ("peak", "logit_std", "variance", *GRADIENTS)
"""Signs of which a layer has the largest of its heads. Of evenness it has the lowest, of others the mean."""


class LoggedSigns(NamedTuple):
    """Which signs are logged, of each layer, and of which heads; None: of all."""

    signs: tuple[str, ...]
    layers: bool
    heads: frozenset[int] | None


HeadNumbers = bool | int | Iterable[int]


def check_signs(
    where: str, layers: bool, signs: str | Iterable[str] | None, heads: HeadNumbers, gradients: bool = True
) -> LoggedSigns:
    """What `layers`, `signs` and `heads` ask for."""
    if not isinstance(layers, bool):
        raise InputError(f"{where}(): `layers` must be True or False; got {layers!r}.")
    if isinstance(signs, str):
        signs = [name for name in SIGNS if gradients or name not in GRADIENTS] if signs == "all" else [signs]
    elif signs is not None and not isinstance(signs, Iterable):
        signs = [signs]
    names = ["peak", "evenness", "logit_std"] if signs is None else list(signs)
    for name in names:
        if name not in SIGNS:
            raise InputError(
                f"{where}(): `signs` must be 'all', a sign's name or several; got {name!r}. {nearest(name, ('all', *SIGNS))}"
            )
        if name in GRADIENTS and not gradients:
            raise InputError(f"{where}(): {name!r} in `signs` is measured only with gradients=True. Add it.")
    chosen = None
    if heads is not True:
        numbers = [] if heads is False else list(heads) if isinstance(heads, Iterable) else [heads]
        if any(isinstance(number, (bool, str)) or not hasattr(number, "__index__") for number in numbers):
            raise InputError(
                f"{where}(): `heads` must be True for all, or the numbers of heads, such as [0, 3]; got {heads!r}."
            )
        chosen = frozenset(map(int, numbers))
    return LoggedSigns(tuple(names), layers or (signs is not None and chosen == frozenset()), chosen)


def absent_heads(record: Record, logged: LoggedSigns) -> str:
    """A sentence about heads that were asked for and that no layer has; "" if there are none."""
    has = {head for entry in record.entries for head in entry.heads}
    absent = sorted((logged.heads or frozenset()) - has)
    return f"no layer has head {absent[0]}; `heads` may be some of 0 … {max(has, default=0)}." if absent else ""


@checked_options
def summary(
    record: Record,
    step: int | None = None,
    *,
    layers: bool = False,
    signs: str | Iterable[str] | None = None,
    heads: HeadNumbers = False,
) -> dict[str, float]:
    """The numbers of a step that a logger is given: eight of the whole model, and on request those of layers and heads.

    ``attemper/peak`` is the largest logit, ``peak_p90`` the 90th percentile of the heads' largest logits, ``logit_std`` the
    largest standard deviation of a head's logits, ``evenness_p05`` the 5th percentile of the heads' evenness, ``saturated`` the
    share of heads that are saturated, ``effective_keys`` the median over heads, ``heads_over_50`` how many heads have a logit
    above 50 (without what is added to scale · q·k, as ALiBi does), ``level`` that of the worst finding (0 ok, 1 note, 2 warn,
    3 act, 4 critical, 5 diverging). With gradients there is also ``grad_q_rms``, the largest of any head. Numbers that are not
    finite are left out: a finding reports them.

    Args:
        record: of a watch.
        step: one of its steps; None is the last one.
        layers: adds the numbers of each layer, ``attemper/<sign>/<layer>``.
        signs: which signs to add of each layer, or with ``heads`` of each head: one of a record's columns, ``"logit_std"``,
            several, or ``"all"``. None: peak, evenness and logit_std. Of peak, logit_std, variance and gradients a layer has the
            largest of its heads, of evenness the lowest, of others the mean.
        heads: adds the numbers of each head, ``attemper/<sign>/<layer>/head_<number>``: True for all heads, or their numbers.

    Example:
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        >>> x = torch.zeros(1, 5, 16)
        >>> with attemper.watch(model) as watch:
        ...     _ = model(x, x, x)
        >>> numbers = attemper.integrations.summary(watch.record)
        >>> round(numbers["attemper/effective_keys"], 4)      # five equal keys
        5.0
    """
    logged = check_signs("summary", layers, signs, heads)
    one = of_step("summary", record, step)
    has = [name for name in SIGNS if {"logit_std": "variance"}.get(name, name) in one.signs]
    for name in logged.signs:
        if name not in has and signs not in (None, "all"):
            raise InputError(f"summary(): this record has no {name!r} for `signs`. It has {', '.join(has)}.")
    if absent := absent_heads(one, logged):
        raise InputError(f"summary(): {absent}")
    return numbers(one, health.check(one), logged)


def of_step(where: str, record: Record, step: int | None) -> Record:
    """The rows of one step; the last one if it is None."""
    steps = record.steps
    if not steps or (step is not None and step not in steps):
        has = f"it has the steps {steps[0]} to {steps[-1]}" if steps else "it has no steps"
        raise InputError(f"{where}(): the record has no step {'' if step is None else step}; {has}. Watch it first.")
    return record.filter(steps=steps[-1] if step is None else step)


def numbers(record: Record, findings: Sequence[Finding], logged: LoggedSigns) -> dict[str, float]:
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
        "heads_over_50": float(sum(_over(entry) for entry in entries)) if len(peak) else math.nan,
        "level": float(_level(findings)),
        "grad_q_rms": _largest(torch.cat([_gradient(entry) for entry in entries])),
    }
    if logged.layers or logged.heads != frozenset():
        for entry in entries:
            found |= _of_layer(entry, logged)
    return {f"{PREFIX}/{name}": number for name, number in found.items() if math.isfinite(number)}


def _of_layer(entry: Entry, logged: LoggedSigns) -> dict[str, float]:
    """The numbers of a layer and of its heads. The sign is first in a name, so that one glob is one chart."""
    layer = UNSAFE.sub("_", entry.layer or "model") + ("/cross" if entry.kind == "cross" else "")
    rows, found = entry.to_dicts(), {}
    for sign in logged.signs:
        values = {row["head"]: _of_head(row, sign) for row in rows}
        finite = [value for value in values.values() if math.isfinite(value)]
        if logged.layers and finite:
            reduce = max if sign in LARGEST else min if sign == "evenness" else fmean
            found[f"{sign}/{layer}"] = reduce(finite)
        chosen = [head for head in values if logged.heads is None or head in logged.heads]
        found |= {f"{sign}/{layer}/head_{head}": values[head] for head in chosen}
    return found


def _of_head(row: RecordRow, sign: str) -> float:
    """NaN if it was not measured."""
    return float(row.get("variance", math.nan) ** 0.5 if sign == "logit_std" else row.get(sign, math.nan))


def _level(findings: Sequence[Finding]) -> int:
    return max((LEVELS.index(one.level) - LEVELS.index("ok") for one in findings), default=0)


def _joined(entries: Sequence[Entry], sign: str) -> Tensor:
    """A sign of every head that has rows and a finite number."""
    parts = [getattr(entry.summary, sign) for entry in entries if sign in entry.summary.columns]
    every = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device="cpu")
    return every[every.isfinite()]


def _over(entry: Entry) -> int:
    scores = entry.summary.largest_scores
    return int((scores.isfinite() & (scores > WARN)).sum())


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
