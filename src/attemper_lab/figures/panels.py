"""panels: what training shows, under one time axis: loss, entropy, the largest logit and the gradient, rules side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..maths.stats import over_seeds
from . import alt, theme

HEIGHT, GAP = 82, 70


class Panel(NamedTuple):
    """A column of the rows over time; ``dashed`` is another one in the same panel, ``after`` the part of the steps left out,
    ``least`` and ``most`` the ends of what there can be."""

    column: str
    title: str
    log: bool = False
    dashed: str | None = None
    after: float = 0.0
    least: float | None = None
    most: float | None = None


ENTROPY = Panel("entropy", "entropy, nats")
PEAK = Panel("peak", "largest logit", log=True)
GRADIENT = Panel("grad_q_rms", "|dL/dq|", log=True, dashed="grad_q_median")
TRAINING = (Panel("loss", "loss, nats"), ENTROPY, PEAK, GRADIENT)
RECALL = (Panel("accuracy", "accuracy", least=0.0, most=1.0), *TRAINING)
# the first fall of the loss is the same for all, and would flatten what comes after
LANGUAGE = (Panel("held_out", "held-out loss", after=0.25), ENTROPY, PEAK, GRADIENT)

NOTE = "Lines: median over seeds; bands: smallest to largest. |dL/dq|: RMS over entries (solid), median (dashed)."
# without this, the end of a line and the point above it would seem to be one number measured twice
ON_THE_WAY = f"Held-out loss before the end is measured on fewer windows. {NOTE}"


def draw(columns: Mapping[str, theme.Rows], colour: alt.Color, field: str, panels: Sequence[Panel] = TRAINING) -> Any:
    """One column of panels for each set of rows, under its name; ``field`` is what ``colour`` reads."""
    width = (theme.WIDTH - GAP * (len(columns) - 1)) // len(columns)
    stacks = []
    for index, (name, rows) in enumerate(columns.items()):
        stack = [
            _panel(rows, panel, colour, field, width, titled=index == 0, last=panel is panels[-1]) for panel in panels
        ]
        stacks.append(alt.vconcat(*stack, spacing=8, title=heading(name)).resolve_scale(x="shared"))
    return alt.hconcat(*stacks, spacing=18)


def heading(name: str) -> alt.TitleParams:
    """What stands over a column."""
    return alt.TitleParams(name, fontSize=13, fontWeight="normal", anchor="start", frame="group", offset=4)


def _panel(rows: theme.Rows, panel: Panel, colour: alt.Color, field: str, width: int, titled: bool, last: bool) -> Any:
    lines = [(panel.column, [1, 0])] + ([(panel.dashed, [4, 3])] if panel.dashed else [])
    first = panel.after * max(row["step"] for row in rows)
    late = [row for row in rows if row["step"] >= first]
    shown = {column: _over_seeds(late, field, column, panel.log) for column, _ in lines}
    values = [row[end] for part in shown.values() for row in part for end in ("median_low", "median_high")]
    y = alt.Y(
        "median:Q",
        title=panel.title if titled else None,
        scale=_scale(panel),
        axis=_few_decades(min(values), max(values)) if panel.log and values else alt.Axis(tickCount=3),
    )
    axis = alt.Axis(tickCount=5 if width > 250 else 3, labels=last, ticks=last, title="step" if last else None)
    encoding: dict[str, Any] = {"x": alt.X("step:Q", scale=alt.Scale(nice=False), axis=axis), "color": colour}
    layers = []
    for column, dash in lines:
        base = alt.Chart(theme.data(theme.in_order(shown[column], colour, "width", 3.2, 1.4))).encode(**encoding)
        layers.append(base.mark_area(opacity=0.16).encode(y=alt.Y("median_low:Q"), y2="median_high:Q"))
        layers.append(base.mark_line(strokeDash=dash).encode(y=y, strokeWidth=alt.StrokeWidth("width:Q", scale=None)))
    return alt.layer(*layers).properties(width=width, height=HEIGHT)


def _scale(panel: Panel) -> alt.Scale:
    if panel.log:
        return alt.Scale(type="log", nice=False)
    ends: dict[str, Any] = {"domainMin": panel.least, "domainMax": panel.most, "nice": False}
    return alt.Scale(zero=False, **({} if panel.least is None or panel.most is None else ends))


def _over_seeds(rows: theme.Rows, field: str, column: str, log: bool) -> list[dict[str, Any]]:
    """Per name and step: the median over seeds, the least and the most. What is not finite is left out, and on a logarithmic
    axis what is 0: a median gradient of exactly 0 exists."""
    values_of: dict[tuple[Any, int], list[float]] = {}
    for row in rows:
        if math.isfinite(row[column]) and (row[column] > 0 or not log):
            values_of.setdefault((row[field], row["step"]), []).append(row[column])
    return [{field: name, "step": step, **over_seeds("median", values)} for (name, step), values in values_of.items()]


def _few_decades(low: float, high: float) -> alt.Axis:
    """At most four powers of ten; where fewer than two of them are inside, numbers between them, or what Vega finds."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = max(1, math.ceil((last - first) / 4))
    values = [10.0**power for power in range(first, last + 1, step)]
    form = "~g" if low > 1e-3 else ".0e"
    for between in ((1,), (1, 3), (1, 2, 5), tuple(range(1, 10))):
        if between[1:]:
            values = [part * 10.0**power for power in range(first, last + 1) for part in between]
        if sum(low <= value <= high for value in values) >= 2:
            return alt.Axis(values=values, format=form)
    return alt.Axis(tickCount=3, format=form)
