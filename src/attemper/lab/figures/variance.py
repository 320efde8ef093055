"""The variance of q·k against d_k, for ideal entries and for real initialisations."""

from __future__ import annotations

from typing import Any

from . import marks, theme

NAMES = {"unit": "unit entries", "fan_in": "1/fan-in", "xavier": "xavier", "linear": "nn.Linear", "gpt2": "GPT-2 (0.02)",
         "t5": "T5 (folded)", "gpt3_width": "0.02 at width 12288"}  # fmt: skip


def draw(rows: theme.Rows, finding: str) -> Any:
    a = 1 if any(row["a"] == 1 for row in rows) else rows[0]["a"]
    shown = [{**row, "name": NAMES[str(row["init"])]} for row in rows if row["a"] == a]
    present = [name for name in NAMES.values() if any(row["name"] == name for row in shown)]
    x = theme.powers("d", "head dim d_k", [row["d"] for row in shown])
    colour = theme.series("name", "initialisation", present)
    chart = marks.theory(shown, x, "variance_theory", colour, nested=True) + marks.measured(
        shown, x, "variance", "variance of q·k, unscaled", colour, log=True, nested=True
    )
    note = "Lines: closed form, d_k × the variances of the entries. Points: measured, with 95 % intervals."
    note += f" q's entries × √{a:g}." if a != 1 else ""
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)
