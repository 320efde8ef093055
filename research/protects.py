"""What the scale protects, in one figure and a short animation: gradients, top weight and loss while a model trains.

The rows are those that come with the package (attemper_lab/stored/). `python -m research.figures protects` draws both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from attemper_lab.engine.experiment import Rows, pick
from attemper_lab.figures import panels, theme
from attemper_lab.training.charlm import gradient_ratios

SHOWN = (3e-4, 1e-3)  # learning rates: the best one without the scale, and the best one with it
PANELS = (
    panels.Panel("grad_q_median", "|dL/dq|, median", log=True),
    panels.Panel("grad_q_rms", "|dL/dq|, RMS", log=True),
    panels.Panel("top_weight", "top weight", least=0.0, most=1.0),
    panels.Panel("held_out", "held-out loss"),
)


def finding(rows: Rows) -> str:
    """How the median and the RMS change while training, at the first learning rate that is shown."""
    median, rms = (gradient_ratios(rows, f"grad_q_{statistic}")[SHOWN[0]] for statistic in ("median", "rms"))
    last = max(median)
    return (
        f"Without the scale the median gradient falls from {median[0]:.1f} to {median[last]:.2f} times the scaled one in {last} "
        f"steps, while the RMS stays {rms[last]:.1f} times as large"
    )


def _note(rows: Rows) -> str:
    first, steps, seeds = rows[0], sorted({row["step"] for row in rows}), len({row["seed"] for row in rows})
    return (
        f"Language model, {first['layers']} layers, d_k = {first['d_model'] // first['heads']}, {first['length']} characters of "
        f"Python's source at a time, unit-variance q and k, Adam, one H200. |dL/dq|: over all entries. The medians "
        f"cross before step {steps[1]}, the first logged after 0. Lines: median over {seeds} seeds; bands: least to most."
    )


def chart(rows: Rows) -> Any:
    """The figure: a column per learning rate; gradients, top weight and loss under one another."""
    columns = {f"learning rate {lr:g}": theme.labelled(pick(rows, lr=lr)) for lr in SHOWN}
    colour = theme.by_rule([row for part in columns.values() for row in part])
    return theme.finish(panels.draw(columns, colour, "rule_label", PANELS), finding(rows), _note(rows))


class _Axis(NamedTuple):
    """A panel's vertical axis: from the least to the most, linear or logarithmic, and where its ticks are."""

    least: float
    most: float
    log: bool
    ticks: Sequence[float]

    def at(self, value: float) -> float:
        """Between 0 at the bottom and 1 at the top."""
        low, high, here = (math.log(one) if self.log else one for one in (self.least, self.most, value))
        return (here - low) / (high - low)


WIDTH, HEIGHT, GAP, LEFT, TOP = 300, 110, 84, 66, 74  # of a panel, between panels, and around them
SECONDS, PAUSE = 6, 2  # the steps pass, then the end stays
GROW = (
    f'<animate attributeName="{{what}}" values="{{start}};{{end}};{{end}}" keyTimes="0;{SECONDS / (SECONDS + PAUSE)};1" \
dur="{SECONDS + PAUSE}s" repeatCount="indefinite"/>'
)


def animation(rows: Rows) -> str:
    """The same four panels at the first learning rate as an SVG in which the steps pass; without animation it shows the end."""
    lr = SHOWN[0]
    shown = pick(rows, lr=lr)
    width, height = 2 * WIDTH + LEFT + GAP + 20, TOP + 2 * (HEIGHT + 62)
    last = max(row["step"] for row in shown)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" role="img"><title>{finding(rows)}</title><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="bold">Without the scale the median gradient dies out</text>',
        *(
            f'<text x="{LEFT + index * 110}" y="46" font-size="13" fill="{theme.COLOURS[rule]}">{theme.LABELS[rule]}</text>'
            for index, rule in enumerate(("sqrt_dk", "none"))
        ),
        f'<text x="{LEFT + 220}" y="46" font-size="12" fill="#555555">language model, d_k = '
        f"{shown[0]['d_model'] // shown[0]['heads']}, learning rate {lr:g}, {last} steps</text>",
    ]
    for index, panel in enumerate(PANELS):
        x, y = LEFT + (index % 2) * (WIDTH + GAP), TOP + (index // 2) * (HEIGHT + 62)
        parts += _animated(shown, panel, x, y, last)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _animated(rows: Rows, panel: panels.Panel, x: int, y: int, last: int) -> list[str]:
    lines = {
        rule: {
            step: statistics.median(row[panel.column] for row in pick(rows, rule=rule, step=step))
            for step in sorted({row["step"] for row in rows})
        }
        for rule in ("sqrt_dk", "none")
    }
    axis = _axis([value for line in lines.values() for value in line.values()], panel)
    clip = f"clip-{panel.column}"
    parts = [
        f'<text x="{x}" y="{y - 8}" font-size="13">{panel.title}</text>',
        f'<clipPath id="{clip}"><rect x="{x}" y="{y - 4}" width="{WIDTH}" height="{HEIGHT + 8}">'
        + GROW.format(what="width", start=0, end=WIDTH)
        + "</rect></clipPath>",
    ]
    for tick in axis.ticks:
        level = y + HEIGHT * (1 - axis.at(tick))
        parts.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{level:.1f}" y2="{level:.1f}" stroke="#e8e8e8"/>')
        parts.append(f'<text x="{x - 6}" y="{level + 4:.1f}" font-size="11" text-anchor="end">{tick:.2g}</text>')
    for rule, line in lines.items():
        points = " ".join(
            f"{x + WIDTH * step / last:.1f},{y + HEIGHT * (1 - axis.at(v)):.1f}" for step, v in line.items()
        )
        style = f'fill="none" stroke="{theme.COLOURS[rule]}" stroke-width="2.5" clip-path="url(#{clip})"'
        parts.append(f'<polyline points="{points}" {style}/>')
    cursor = "".join(GROW.format(what=end, start=x, end=x + WIDTH) for end in ("x1", "x2"))
    parts.append(f'<line x1="{x + WIDTH}" x2="{x + WIDTH}" y1="{y}" y2="{y + HEIGHT}" stroke="#999999">{cursor}</line>')
    for step in (0, last // 2, last):
        parts.append(
            f'<text x="{x + WIDTH * step / last:.0f}" y="{y + HEIGHT + 16}" font-size="11" text-anchor="middle">{step}</text>'
        )
    parts.append(f'<text x="{x + WIDTH / 2:.0f}" y="{y + HEIGHT + 31}" font-size="11" text-anchor="middle">step</text>')
    return parts


def _axis(values: Sequence[float], panel: panels.Panel) -> _Axis:
    low, high = min(values), max(values)
    if panel.log:
        first, final = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return _Axis(10.0**first, 10.0**final, True, [10.0**power for power in range(first, final + 1)])
    if panel.least is not None and panel.most is not None:
        return _Axis(panel.least, panel.most, False, [panel.least, (panel.least + panel.most) / 2, panel.most])
    return _Axis(math.floor(low), math.ceil(high), False, list(range(math.floor(low), math.ceil(high) + 1)))
