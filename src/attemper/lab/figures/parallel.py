"""One pass over a sequence against a loop over its tokens: time against length."""

from __future__ import annotations

from typing import Any

from . import marks, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    few = min(row["threads"] for row in rows)
    kinds = [("loop", few, "token by token"), ("calls", few, "being called"), ("work", few, "computing")]
    kinds += [
        ("pass", threads, f"one pass, {threads} thread(s)") for threads in sorted({row["threads"] for row in rows})
    ]
    parts = [
        {"n": row["n"], "how": how, "ms": row[f"{name}_ms"]}
        for name, threads, how in kinds
        for row in rows
        if row["threads"] == threads and row[f"{name}_ms"] > 0  # computing can be less than the clock sees
    ]
    x = theme.powers("n", "tokens", [row["n"] for row in rows])
    colour = theme.series("how", "computed", [how for _, _, how in kinds])
    chart = marks.joined(parts, x, "ms", colour) + marks.measured(parts, x, "ms", "milliseconds", colour, log=True)
    first = rows[0]
    note = (
        f"Causal attention, d_k = {first['d']}, {first['heads']} heads, float32, CPU; the loop on one thread. "
        "Being called: as many calls with one key each; computing: what the loop's calls take beyond that. "
        "Both are of the fastest of each call."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
