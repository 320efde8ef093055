"""‖J‖_F² against d_k: a hump without the scale, a constant with it."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    n = max(row["n"] for row in rows)
    shown = theme.labelled([row for row in rows if row["n"] == n])
    colour = theme.by_rule(shown)
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    grid = [{"d": d, "form": m * (1 - m) / 3} for d in _between(shown) if (m := (2 * math.log(n) / d) ** 0.5) < 1]
    chart = (
        marks.labelled_line(1 / 12, "1/12")
        + marks.theory(grid, x, "form", dash=(5, 3))
        + marks.theory(shown, x, "square_theory", colour, smooth=True)
        + marks.measured(shown, x, "square", "mean ‖J‖_F²", colour, axis=alt.Axis(format=".2f"))
    )
    note = (
        f"n = {n} keys. Points: measured, with 95 % intervals. Coloured lines: exact means for {n} keys. Grey line: their limit "
        "for many keys without a scale, m(1−m)/3 with m = √(2 ln n / d_k), which is reached slowly where m is near 1."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


def _between(rows: theme.Rows) -> list[float]:
    low, high = min(row["d"] for row in rows), max(row["d"] for row in rows)
    return [low * (high / low) ** (i / 100) for i in range(101)]
