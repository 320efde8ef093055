"""An explanation for a notebook: the picture and the steps, one piece of HTML; no script, nothing fetched, light and dark."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from . import flow
from .settings import CORNER
from .steps import HeadLine, LaneReading, LessonStep, Matrix, measured

if TYPE_CHECKING:
    from . import Explanation

STYLE = """
.attemper-explain { color-scheme: light dark; max-width: 60rem; padding: 1rem 1.25rem; line-height: 1.5;
  font-family: system-ui, sans-serif; font-size: 14px; color: light-dark(#1d2433, #e4e8f0);
  background: light-dark(#ffffff, #12161f); border: 1px solid light-dark(#d9dee8, #2a3140); border-radius: 10px; }
[data-jp-theme-light="true"] .attemper-explain, .vscode-light .attemper-explain { color-scheme: light; }
[data-jp-theme-light="false"] .attemper-explain, .vscode-dark .attemper-explain { color-scheme: dark; }
.attemper-explain h3 { font-size: 1.35rem; margin: 0; color: inherit; overflow-wrap: anywhere; }
.attemper-explain h4 { font-size: 1rem; margin: 1.4rem 0 0.1rem; color: inherit; }
.attemper-explain p { margin: 0.15rem 0 0.45rem; max-width: 48rem; }
.attemper-explain .dim { color: light-dark(#5b6577, #98a2b5); }
.attemper-explain code { font-family: ui-monospace, monospace; font-size: 0.92em; color: light-dark(#0b5c8a, #7cc7f0);
  background: none; padding: 0; font-weight: 400; margin-left: 0.6em; }
.attemper-explain .flow svg { max-width: 100%; height: auto; }
.attemper-explain .row { display: flex; flex-wrap: wrap; gap: 0.4rem 1.6rem; }
.attemper-explain .pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 0.4rem 1rem; }
.attemper-explain .pair > table { justify-self: start; align-self: start; }
.attemper-explain table { border-collapse: collapse; border: 0; margin: 0.2rem 0; font-variant-numeric: tabular-nums;
  font-family: ui-monospace, monospace; font-size: 12.5px; color: inherit; background: none; }
.attemper-explain td, .attemper-explain th { padding: 0.14rem 0.5rem; border: 0; text-align: right; background: none;
  font-weight: 400; white-space: nowrap; max-width: 9rem; overflow: hidden; text-overflow: ellipsis; }
.attemper-explain th { color: light-dark(#5b6577, #98a2b5); }
.attemper-explain th[scope="row"] { text-align: left; padding-left: 0; }
.attemper-explain td.says { text-align: left; max-width: none; white-space: normal; font-family: system-ui, sans-serif;
  color: light-dark(#5b6577, #98a2b5); }
.attemper-explain caption { text-align: left; caption-side: top; padding: 0; color: inherit; }
.attemper-explain .first { color: light-dark(#0b6b5d, #5fd6c0); font-weight: 650; }
.attemper-explain .second { color: light-dark(#9a3412, #ffab7a); font-weight: 650; }
.attemper-explain .Q { color: light-dark(#1d4fd7, #8fb3ff); } .attemper-explain .K { color: light-dark(#b91c1c, #ff9c9c); }
.attemper-explain .V { color: light-dark(#15703a, #7fdba3); }
.attemper-explain td.weight { border-radius: 3px; border: 1px solid light-dark(#ffffff, #12161f); }
.attemper-explain .conclusion { margin-top: 1.3rem; padding: 0.6rem 0.9rem; border-left: 3px solid currentColor;
  background: light-dark(#f3f6fa, #1a2030); max-width: none; }
"""
LANES = ("first", "second")
MOST_HEADS = 64


def render(explanation: Explanation) -> str:
    """The explanation as one ``<div>``."""
    asked = explanation.settings
    labels = (explanation.lanes[0].label, explanation.lanes[1].label)
    lanes = " <span class='dim'>and</span> ".join(
        f"<span class='{style}'>{escape(lane.label)}</span> {escape(lane.formula)}"
        for lane, style in zip(explanation.lanes, LANES, strict=True)
    )
    steps = "".join(_step(number, step, labels) for number, step in enumerate(explanation.steps, start=1))
    return (
        f"<div class='attemper-explain'><style>{STYLE}</style><h3>{escape(asked.title)}</h3>"
        f"<p><span class='dim'>{escape(asked.facts)}</span><br>{lanes}</p>"
        f"<div class='flow'>{flow.render(explanation, inline=True)}</div>{steps}"
        f"<p class='conclusion'>{escape(explanation.conclusion)}</p></div>"
    )


def _step(number: int, step: LessonStep, labels: tuple[str, str]) -> str:
    parts = [f"<h4>{number} {escape(step.title)}<code>{escape(step.formula)}</code></h4><p>{escape(step.words)}</p>"]
    if step.matrices:
        most = 3 if len(step.matrices) > 1 else CORNER  # three fit side by side
        tables = (_matrix(matrix, matrix.name.removeprefix("W_"), most) for matrix in step.matrices)
        parts.append(f"<div class='row'>{''.join(tables)}</div>")
    if step.lanes:
        tables = (_matrix(matrix, style, most=5) for matrix, style in zip(step.lanes, LANES, strict=True))
        parts.append(f"<div class='pair'>{''.join(tables)}</div>")
    if step.readings:
        parts.append(_readings(step.readings, labels))
    if step.heads:
        parts.append(_heads(step.heads, labels))
    if step.note:
        parts.append(f"<p class='dim'>{escape(step.note)}</p>")
    return "".join(parts)


def _matrix(matrix: Matrix, style: str, most: int) -> str:
    """A corner as a table; weights are shaded by their size."""
    more = matrix.shape[-1] > min(most, len(matrix.values[0]))
    rows = ""
    if matrix.columns:
        rows += f"<tr><th></th>{''.join(f'<th scope=col>{escape(word)}</th>' for word in matrix.columns[:most])}</tr>"
    for place, row in enumerate(matrix.values):
        word = f"<th scope='row'>{escape(matrix.rows[place])}</th>" if matrix.rows else ""
        cells = "".join(_cell(value, matrix) for value in row[:most])
        rows += f"<tr>{word}{cells}{'<td>…</td>' if more else ''}</tr>"
    if len(matrix.values) > 1 and matrix.shape[0] > len(matrix.values):
        rows += "<tr><th scope='row'>⋮</th></tr>"
    caption = f"<caption><span class='{escape(style)}'>{escape(matrix.name)}</span> {matrix.size}</caption>"
    return f"<table>{caption}{rows}</table>"


def _cell(value: float, matrix: Matrix) -> str:
    if not matrix.weights:
        return f"<td>{matrix.format(value)}</td>"
    share = f"{100 * value:.1f}%"
    ink = "light-dark(#1d2433, #e4e8f0)" if value < 0.65 else "light-dark(#ffffff, #101010)"
    paint = f"color-mix(in oklab, light-dark(#2457a6, #fdbe5c) {share}, light-dark(#edf2f9, #1b2233))"
    return f"<td class='weight' style='background: {paint}; color: {ink}'>{matrix.format(value)}</td>"


def _readings(readings: tuple[LaneReading, ...], labels: tuple[str, str]) -> str:
    rows = f"<tr><th></th>{_lane_heads(labels)}<th></th></tr>"
    for reading in readings:
        values = "".join(f"<td>{escape(measured(value))}</td>" for value in reading.values)
        rows += (
            f"<tr><th scope='row'>{escape(reading.label)}</th>{values}<td class='says'>{escape(reading.says)}</td></tr>"
        )
        for predicted in reading.predictions:
            cells = "".join(f"<td class='dim'>{escape(words)}</td>" for words in predicted)
            theory = f"<td class='says'>{escape(reading.theory)}</td>"
            rows += f"<tr><th scope='row'>expected</th>{cells}{theory}</tr>"
    return f"<table>{rows}</table>"


def _heads(lines: tuple[HeadLine, ...], labels: tuple[str, str]) -> str:
    names = "".join(f"<th colspan='2'>{name}</th>" for name in ("variance", "top weight", "entropy"))
    rows = f"<tr><th></th>{names}</tr><tr><th>head</th>{_lane_heads(labels) * 3}</tr>"
    for line in lines[:MOST_HEADS]:
        values = [value for pair in (line.variance, line.top_weight, line.entropy) for value in pair]
        rows += f"<tr><th>{line.head}</th>{''.join(f'<td>{escape(measured(value))}</td>' for value in values)}</tr>"
    if len(lines) > MOST_HEADS:
        rows += f"<tr><th>⋮</th><td colspan='6'>and {len(lines) - MOST_HEADS} more</td></tr>"
    return f"<table>{rows}</table>"


def _lane_heads(labels: tuple[str, str]) -> str:
    return "".join(f"<th class='{style}'>{escape(label)}</th>" for label, style in zip(labels, LANES, strict=True))
