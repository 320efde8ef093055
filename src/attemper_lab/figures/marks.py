"""marks: theory as a line, measurement as points with their 95 % interval.

``nested``: where marks lie on one another, each is drawn larger than the next, so that all of them show.
"""

from __future__ import annotations

from math import inf, isfinite
from typing import Any

from . import alt
from .theme import THEORY, Rows, data, decades, in_order


def measured(
    rows: Rows,
    x: alt.X,
    y: str,
    title: str,
    colour: alt.Color | None = None,
    log: bool = False,
    nested: bool = False,
    most: float | None = None,
    **more: Any,
) -> Any:
    """Points, and bars from ``{y}_low`` to ``{y}_high`` where the rows have them and they are finite.

    ``most`` is the largest value that there can be: the axis ends there. A logarithmic axis leaves out what is 0.
    """
    ends: dict[str, Any] = {} if most is None else {"domainMax": most, "nice": False}
    scale = alt.Scale(type="log", **ends) if log else alt.Scale(zero=more.pop("zero", True), **ends)
    if log:
        numbers = [row[name] for row in rows for name in (y, f"{y}_low", f"{y}_high") if 0 < (row.get(name) or 0) < inf]
        more.setdefault("axis", decades(min(numbers, default=0), max(numbers, default=0)))
        rows = [row for row in rows if (row.get(y) or 0) > 0]  # a logarithmic axis has no place for 0
    encoding: dict[str, Any] = {"x": x, **({"color": colour} if colour is not None else {})}
    size: Any = alt.value(70)
    if nested and colour is not None:
        rows, size = in_order(rows, colour, "size", 170, 40), alt.Size("size:Q", scale=None)
    points = alt.Chart(data(rows)).mark_point(filled=True, opacity=1).encode(
        y=alt.Y(f"{y}:Q", title=title, scale=scale, **more), size=size, **encoding
    )  # fmt: skip
    ended = [row for row in rows if all(_is_number(row.get(f"{y}_{end}")) for end in ("low", "high"))]
    if not ended:
        return points
    bars = alt.Chart(data(ended)).mark_rule(strokeWidth=2).encode(y=alt.Y(f"{y}_low:Q"), y2=f"{y}_high:Q", **encoding)
    return bars + points


def _is_number(value: float | None) -> bool:
    return value is not None and isfinite(value)


def theory(
    rows: Rows,
    x: alt.X,
    y: str,
    colour: alt.Color | None = None,
    dash: tuple[int, ...] = (1, 0),
    smooth: bool = False,
    nested: bool = False,
    stairs: bool = False,
) -> Any:
    """A line through the rows' closed form; ``smooth`` where it is a curve that the rows have few points of, ``stairs`` where it
    keeps each value up to the next."""
    encoding: dict[str, Any] = {"x": x, "y": f"{y}:Q", **({"color": colour} if colour is not None else {})}
    style: dict[str, Any] = {
        "strokeDash": list(dash),
        "strokeWidth": 1.6,
        "interpolate": "step-after" if stairs else "monotone" if smooth else "linear",
    }
    if colour is None:
        style["color"] = THEORY
    elif nested:
        rows, encoding["strokeWidth"] = _widths(rows, colour)
    shown = [row for row in rows if row.get(y) is not None]
    return alt.Chart(data(shown)).mark_line(**style).encode(**encoding)


def joined(rows: Rows, x: alt.X, y: str, colour: alt.Color, nested: bool = False) -> Any:
    """A thin line between measurements, to lead the eye where no closed form is known."""
    rows, width = _widths(rows, colour) if nested else (rows, alt.value(1.2))
    return alt.Chart(data(rows)).mark_line().encode(x=x, y=f"{y}:Q", color=colour, strokeWidth=width)


def curve(rows: Rows, x: alt.X, y: str, title: str, colour: alt.Color, nested: bool = False, **more: Any) -> Any:
    """Measurements with a thin line between them."""
    return joined(rows, x, y, colour, nested) + measured(rows, x, y, title, colour, nested=nested, **more)


def _widths(rows: Rows, colour: alt.Color) -> tuple[Rows, alt.StrokeWidth]:
    return in_order(rows, colour, "width", 3.4, 1.2), alt.StrokeWidth("width:Q", scale=None)


def labelled_line(value: float, text: str, axis: str = "y", at: float = 5) -> Any:
    """A reference value, with its name beside it, ``at`` pixels from the left or the top: where no point is in its way."""
    base = alt.Chart(alt.Data(values=[{"value": value, "text": text}]))
    channel = {axis: alt.datum(value)}
    rule = base.mark_rule(color=THEORY, strokeDash=[4, 3]).encode(**channel)
    place: dict[str, Any] = (
        {"align": "left", "dx": 4, "dy": -9, "x": at} if axis == "y" else {"align": "left", "dx": 5, "dy": 4, "y": at}
    )
    return rule + base.mark_text(color=THEORY, fontSize=12, **place).encode(text="text:N", **channel)
