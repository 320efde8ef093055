"""A record as one HTML table for a notebook: layers down, heads across, coloured by how even the weights are."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .record import Record

SHADES = ("evenness", "entropy", "sum_p2", "peak")
"""The sign that is shown: the first of these that was measured."""

STYLE = "border-collapse:separate;border-spacing:1px;font:12px system-ui,sans-serif"
CELL = "padding:2px 6px;text-align:right;color:{ink};background:{paper}"


def table(record: Record) -> str:
    """The last step of the record; the whole row of a head is its cell's tooltip."""
    if not len(record):
        return f"<p>{escape(repr(record))}</p>"
    last = record.filter(steps=record.steps[-1])
    sign = next((name for name in SHADES if name in last.signs), last.signs[0])
    entries = last.entries
    values = [row[sign] for entry in entries for row in entry.to_dicts() if math.isfinite(row[sign])]
    top = 1.0 if sign in ("evenness", "sum_p2") else max(values, default=1.0)
    heads = sorted({head for entry in entries for head in entry.heads})
    head_cells = "".join(f"<th>{head}</th>" for head in heads)
    body = []
    for entry in entries:
        rows = {row["head"]: row for row in entry.to_dicts()}
        cells = "".join(_cell(rows.get(head), sign, top) for head in heads)
        peak = max((row["peak"] for row in rows.values() if "peak" in row), default=math.nan)
        name = escape(entry.layer or "(the model)") + (" · cross" if entry.kind == "cross" else "")
        body.append(
            f'<tr><th style="text-align:left">{name}</th>{cells}<td style="text-align:right">{peak:.1f}</td></tr>'
        )
    meaning = "0: one key has all the weight, 1: all keys are equal" if sign == "evenness" else "mean over rows"
    caption = f"{escape(repr(record))} · step {record.steps[-1]} · {sign} per head ({meaning})"
    return (
        f'<table style="{STYLE}"><caption style="text-align:left">{caption}</caption>'
        f"<tr><th></th>{head_cells}<th>peak logit</th></tr>{''.join(body)}</table>"
    )


def _cell(row: dict[str, Any] | None, sign: str, top: float) -> str:
    if row is None:
        return "<td></td>"
    value = row[sign]
    share = min(1.0, max(0.0, value / top)) if math.isfinite(value) and top > 0 else 0.0
    paper = f"hsl(210,65%,{96 - 56 * share:.0f}%)"
    ink = "#fff" if share > 0.55 else "#111"
    whole = escape("\n".join(f"{name} {_short(entry)}" for name, entry in row.items()), quote=True)
    return f'<td title="{whole}" style="{CELL.format(ink=ink, paper=paper)}">{value:.2f}</td>'


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
