"""One pass over a sequence against a loop over its tokens: time against length."""

from __future__ import annotations

from typing import Any

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    parts = [
        {"n": row["n"], "how": how, "ms": row[f"{name}_ms"]}
        for row in rows
        for name, how in (("pass", "one pass"), ("loop", "token by token"))
    ]
    x = theme.powers("n", "tokens", [row["n"] for row in rows])
    colour = theme.series("how", "computed", ["one pass", "token by token"])
    chart = marks.joined(parts, x, "ms", colour) + marks.measured(parts, x, "ms", "milliseconds", colour, log=True)
    first = rows[0]
    note = f"Causal attention, d_k = {first['d']}, {first['heads']} heads, {first['threads']} CPU thread(s), float32; both agree."
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
