"""An explanation as HTML for a notebook: the picture and the steps, light and dark, without scripts and network."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from . import flow
from .settings import CORNER
from .steps import HeadLine, LaneReading, LessonStep, Matrix, format_measured

if TYPE_CHECKING:
    from . import Explanation

STYLE = files(__package__).joinpath("steps.css").read_text(encoding="utf-8")
LANES = ("first", "second")
MOST_HEADS = 64


def render(explanation: Explanation) -> str:
    """The explanation as one ``<div>``."""
    settings = explanation.settings
    labels = (explanation.lanes[0].label, explanation.lanes[1].label)
    lanes = " <span class='dim'>and</span> ".join(
        f"<span class='{style}'>{escape(lane.label)}</span> {escape(lane.formula)}"
        for lane, style in zip(explanation.lanes, LANES, strict=True)
    )
    steps = "".join(_step(number, step, labels) for number, step in enumerate(explanation.steps, start=1))
    return (
        f"<div class='attemper-explain'><style>\n{STYLE}</style><h3>{escape(settings.title)}</h3>"
        f"<p><span class='dim'>{escape(settings.facts)}</span><br>{lanes}</p>"
        f"<div class='flow'>{flow.render(explanation, inline=True)}</div>{steps}"
        f"<p class='conclusion'>{escape(explanation.conclusion)}</p></div>"
    )


def page(explanation: Explanation) -> str:
    """The picture and the steps as one HTML file that needs nothing else."""
    style = (
        ":root { color-scheme: light dark; background: light-dark(#ffffff, #12161f); } "
        "body { margin: 1.5rem auto; max-width: 62rem; padding: 0 1rem; }"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Attention on {escape(explanation.settings.title)}</title><style>{style}</style></head>"
        f"<body>{render(explanation)}</body></html>\n"
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
    for index, row in enumerate(matrix.values):
        word = f"<th scope='row'>{escape(matrix.rows[index])}</th>" if matrix.rows else ""
        cells = "".join(_cell(value, matrix) for value in row[:most])
        rows += f"<tr>{word}{cells}{'<td>…</td>' if more else ''}</tr>"
    if matrix.cut_below:
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
        for start, (label, *values, says) in zip(("<td>", "<td class='dim'>"), reading.lines, strict=False):
            cells = "".join(f"{start}{escape(value)}</td>" for value in values)
            rows += f"<tr><th scope='row'>{escape(label)}</th>{cells}<td class='says'>{escape(says)}</td></tr>"
    return f"<table>{rows}</table>"


def _heads(lines: tuple[HeadLine, ...], labels: tuple[str, str]) -> str:
    names = "".join(f"<th colspan='2'>{name}</th>" for name in lines[0].signs)
    rows = f"<tr><th></th>{names}</tr><tr><th>head</th>{_lane_heads(labels) * len(lines[0].signs)}</tr>"
    for line in lines[:MOST_HEADS]:
        cells = "".join(f"<td>{escape(format_measured(value))}</td>" for pair in line.signs.values() for value in pair)
        rows += f"<tr><th>{line.head}</th>{cells}</tr>"
    if len(lines) > MOST_HEADS:
        rows += f"<tr><th>⋮</th><td colspan='6'>and {len(lines) - MOST_HEADS} more</td></tr>"
    return f"<table>{rows}</table>"


def _lane_heads(labels: tuple[str, str]) -> str:
    return "".join(f"<th class='{style}'>{escape(label)}</th>" for label, style in zip(labels, LANES, strict=True))
