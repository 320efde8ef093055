"""A step of a record as the few numbers that a logger gets, named by their sign first, and as an image."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import health
from ..errors import InputError, checked_options, nearest
from ..heads import COLUMNS
from ..health import Finding
from ..health.finding import listed
from ..health.thresholds import LEVELS, PEAK, SATURATED
from ..watch import Record
from ..watch.examine import Entry, RecordRow

PREFIX = "attemper"
WARN = next(step for step in PEAK if step.level == "warn").value  # 50
UNSAFE = re.compile(r"[^A-Za-z0-9_./-]")
GRADIENTS = ("grad_q_rms", "grad_q_median", "grad_k_rms", "grad_k_median")
SIGNS = ("peak", "logit_std", *(name for name in COLUMNS if not name.endswith("rows")), *GRADIENTS)
"""The signs of a head that can be logged: the columns of a record, and the root of its variance."""

LARGEST = ("peak", "logit_std", "variance", *GRADIENTS)
"""A layer's number is the largest of its heads for these signs, the lowest for evenness, and the mean for others."""


class LoggedSigns(NamedTuple):
    """Which signs are logged, of each layer, and of which heads; None: of all."""

    signs: tuple[str, ...]
    layers: bool
    heads: frozenset[int] | None


HeadNumbers = bool | int | Iterable[int]


def check_signs(
    where: str, layers: bool, signs: str | Iterable[str] | None, heads: HeadNumbers, gradients: bool = True
) -> LoggedSigns:
    """The signs that `layers`, `signs` and `heads` select."""
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
    """A sentence about chosen heads that no layer has; "" if there are none."""
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
    """The numbers of a step for a logger: eight of the whole model, and on request those of layers and heads.

    ``attemper/peak`` is the largest logit, ``peak_p90`` the 90th percentile of the heads' largest logits, ``logit_std`` the
    largest standard deviation of a head's logits, ``evenness_p05`` the 5th percentile of the heads' evenness, ``saturated`` the
    share of heads that are saturated, ``effective_keys`` the median over heads, ``heads_over_50`` how many heads have a logit
    above 50 (without what is added to scale · q·k, as ALiBi does), ``level`` that of the worst finding (0 ok, 1 note, 2 warn,
    3 error, 4 critical, 5 diverging). With gradients there is also ``grad_q_rms``, the largest of any head. Numbers that are not
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
    entries = of_step("summary", record, step)
    has = [name for name in SIGNS if {"logit_std": "variance"}.get(name, name) in entries.signs]
    for name in logged.signs:
        if name not in has and signs not in (None, "all"):
            raise InputError(f"summary(): this record has no {name!r} for `signs`. It has {', '.join(has)}.")
    if absent := absent_heads(entries, logged):
        raise InputError(f"summary(): {absent}")
    return numbers(entries, health.check(entries), logged)


def of_step(where: str, record: Record, step: int | None) -> Record:
    """The rows of one step; the last one if it is None."""
    steps = record.steps
    if not steps or (step is not None and step not in steps):
        has = f"step {step}. It has: {listed(steps)}." if steps else "steps. Watch one first."
        raise InputError(f"{where}(): the record has no {has}")
    return record.filter(steps=steps[-1] if step is None else step)


def numbers(record: Record, findings: Sequence[Finding], logged: LoggedSigns) -> dict[str, float]:
    """The numbers of a record of one step, with its findings."""
    entries = record.entries

    def heads(sign: str) -> Tensor:
        return _finite([getattr(entry.summary, sign) for entry in entries if sign in entry.summary.columns])

    peak, saturated = heads("peak"), (heads("saturated") > SATURATED.value).double()
    scores = _finite([entry.summary.largest_scores for entry in entries])
    gradients = _finite(
        [(sums[:, 1] / sums[:, 0]).sqrt() for entry in entries if (sums := entry.gradients) is not None]
    )
    no_rows = 0.0 if any("saturated" in entry.summary.columns for entry in entries) else math.nan
    values = {
        "peak": _quantile(peak, 1.0),
        "peak_p90": _quantile(peak, 0.9),
        "logit_std": _quantile(heads("variance"), 1.0) ** 0.5,
        "evenness_p05": _quantile(heads("evenness"), 0.05),
        "saturated": float(saturated.mean()) if len(saturated) else no_rows,
        "effective_keys": _quantile(heads("effective_keys"), 0.5),
        "heads_over_50": float((scores > WARN).sum()) if len(peak) else math.nan,
        "level": float(max((LEVELS.index(finding.level) - LEVELS.index("ok") for finding in findings), default=0)),
        "grad_q_rms": _quantile(gradients, 1.0),
    }
    if logged.layers or logged.heads != frozenset():
        for entry in entries:
            values |= _of_layer(entry, logged)
    return {f"{PREFIX}/{name}": number for name, number in values.items() if math.isfinite(number)}


def _of_layer(entry: Entry, logged: LoggedSigns) -> dict[str, float]:
    """The numbers of a layer and of its heads. The sign is first in a name, so that one glob is one chart."""
    layer = UNSAFE.sub("_", entry.layer or "model") + ("/cross" if entry.kind == "cross" else "")
    rows, numbers_of = entry.to_dicts(), {}
    for sign in logged.signs:
        values = {row["head"]: _of_head(row, sign) for row in rows}
        finite = [value for value in values.values() if math.isfinite(value)]
        if logged.layers and finite:
            reduce = max if sign in LARGEST else min if sign == "evenness" else fmean
            numbers_of[f"{sign}/{layer}"] = reduce(finite)
        chosen = [head for head in values if logged.heads is None or head in logged.heads]
        numbers_of |= {f"{sign}/{layer}/head_{head}": values[head] for head in chosen}
    return numbers_of


def _of_head(row: RecordRow, sign: str) -> float:
    """A sign of a head; NaN if it was not measured."""
    return float(row.get("variance", math.nan) ** 0.5 if sign == "logit_std" else row.get(sign, math.nan))


def _finite(parts: Sequence[Tensor]) -> Tensor:
    values = torch.cat(list(parts)) if parts else torch.empty(0, dtype=torch.float64, device="cpu")
    return values[values.isfinite()]


def _quantile(values: Tensor, share: float) -> float:
    return float(values.quantile(share)) if len(values) else math.nan


CELL, GAP = 12, 2
# as in the report: lightness alone carries the number
STOPS = np.array([[244, 247, 250], [190, 215, 232], [107, 168, 208], [41, 108, 168], [10, 42, 92]], float)
MISSING = (226, 196, 196)
SCALES = {"peak": (1.0, 1e4, True), "evenness": (0.0, 1.0, False), "saturated": (0.0, 1.0, False)}
"""Lowest and highest number, and whether the scale is logarithmic: the same in every step, so that images can be compared."""


@checked_options
def picture(record: Record, step: int | None = None, sign: str = "peak") -> NDArray[np.uint8]:
    """A heat map of one step, (height, width, 3): a row of cells for each layer, a cell for each head; darker is more.

    Args:
        record: of a watch.
        step: one of its steps; None is the last one.
        sign: ``"peak"`` (1 to 10,000, logarithmic), ``"evenness"`` or ``"saturated"`` (0 to 1).
    """
    if sign not in SCALES:
        raise InputError(f"picture(): `sign` must have a fixed scale; got {sign!r}. {nearest(sign, SCALES)}")
    entries = of_step("picture", record, step).entries
    columns = 1 + max((max(entry.heads) for entry in entries), default=0)
    size = CELL + GAP
    image = np.full((len(entries) * size + GAP, columns * size + GAP, 3), 255, np.uint8)
    for row, entry in enumerate(entries):
        values = getattr(entry.summary, sign).tolist() if sign in entry.summary.columns else []
        for head, value in zip(entry.heads, values, strict=False):
            top, left = GAP + row * size, GAP + head * size
            image[top : top + CELL, left : left + CELL] = _colour(value, *SCALES[sign])
    return image


def _colour(value: float, low: float, high: float, logarithmic: bool) -> NDArray[np.uint8]:
    if math.isnan(value):
        return np.array(MISSING, np.uint8)
    value = min(max(value, low), high)
    share = math.log(value / low) / math.log(high / low) if logarithmic else (value - low) / (high - low)
    at = share * (len(STOPS) - 1)
    start = min(int(at), len(STOPS) - 2)
    return np.rint(STOPS[start] + (at - start) * (STOPS[start + 1] - STOPS[start])).astype(np.uint8)
