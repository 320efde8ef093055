"""Recall while it trains: accuracy, loss, entropy, the largest logit and the gradient, each rule at its best learning rate."""

from __future__ import annotations

from typing import Any

from . import panels, theme


def draw(rows: theme.Rows, finding: str) -> Any:
    d = max(row["d"] for row in rows)
    best = theme.best_rates([row for row in rows if row["d"] == d], "rule", "accuracy")
    shown = theme.labelled([row for row in rows if row["d"] == d and row["lr"] == best[row["rule"]]])
    chart = panels.draw({"": shown}, theme.by_rule(shown), "rule_label", panels.RECALL)
    note = f"One layer, one head, d = {d}, Adam, unit-variance entries. {panels.NOTE}"
    return theme.finish(chart, finding, note)
