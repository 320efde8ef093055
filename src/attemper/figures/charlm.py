"""A small language model while it trains: held-out loss, entropy, largest logit and gradient, for both initialisations."""

from __future__ import annotations

from typing import Any

from . import panels, theme

WORDS = {"small": "projections drawn with std 0.02", "unit": "unit-variance q and k"}


def draw(rows: theme.Rows, finding: str) -> Any:
    columns = {}
    for init in [name for name in WORDS if any(row["init"] == name for row in rows)]:
        part = [row for row in rows if row["init"] == init]
        best = theme.best_rates(part, "rule", "held_out", larger=False)
        columns[WORDS[init]] = theme.labelled([row for row in part if row["lr"] == best[row["rule"]]])
    first = rows[0]
    note = (
        f"{first['layers']} layers, width {first['d_model']}, d_k = {first['d_model'] // first['heads']}, on Python's source; "
        f"each rule at its best learning rate. {panels.NOTE}"
    )
    colour = theme.by_rule([row for part in columns.values() for row in part])
    return theme.finish(panels.draw(columns, colour, "rule_label", panels.LANGUAGE), finding, note)
