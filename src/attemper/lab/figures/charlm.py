"""What leaving the scale out of a small language model costs, by learning rate; and every rule at its best rate as it trains."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, panels, theme

WORDS = {"small": "projections drawn with std 0.02", "unit": "unit-variance q and k"}
COST = "none less 1/√d_k"


def draw(rows: theme.Rows, finding: str) -> Any:
    columns, costs = {}, {}
    for init in [name for name in WORDS if any(row["init"] == name for row in rows)]:
        part = [row for row in rows if row["init"] == init]
        best = theme.best_rates(part, "rule", "held_out", larger=False)
        columns[WORDS[init]] = theme.labelled([row for row in part if row["lr"] == best[row["rule"]]])
        costs[WORDS[init]] = _costs(part)
    first = rows[0]
    note = f"{first['layers']} layers, width {first['d_model']}, d_k = {first['d_model'] // first['heads']}, on Python's source. "
    colour = theme.by_rule([row for part in columns.values() for row in part])
    chart = panels.draw(columns, colour, "rule_label", panels.LANGUAGE)
    if all(costs.values()):
        note += "Top: the difference of held-out losses, median and range over seeds. "
        note += "Below: every rule at its best learning rate. "
        chart = alt.vconcat(_top(costs), chart, spacing=24).resolve_scale(color="independent")
    else:
        note += "Every rule at its best learning rate. "
    return theme.finish(chart, finding, note + panels.ON_THE_WAY)


def _costs(rows: theme.Rows) -> list[dict[str, Any]]:
    """By learning rate: how much more loss without a scale, where both were run."""
    found = []
    for lr in sorted({row["lr"] for row in rows}):
        scaled, bare = (
            theme.last_losses([row for row in rows if row["lr"] == lr and row["rule"] == name])
            for name in ("sqrt_dk", "none")
        )
        apart = [bare[seed] - scaled[seed] for seed in scaled if seed in bare]
        if apart:
            found.append({"lr": lr, "name": COST, **theme.spread("cost", apart)})
    return found


def _top(costs: dict[str, list[dict[str, Any]]]) -> Any:
    """Cost against learning rate, initialisations side by side on one scale."""
    width = (theme.WIDTH - panels.GAP * (len(costs) - 1)) // len(costs)
    one = theme.series("name", "", [COST]).legend(None)
    found: list[Any] = []
    for name, some in costs.items():
        x = theme.powers("lr", "learning rate", [row["lr"] for row in some], ".0e")
        points = (
            marks.labelled_line(0.0, "no cost", at=width / 2)
            + marks.joined(some, x, "cost", one)
            + marks.measured(some, x, "cost", "" if found else f"{COST}, nats", one)
        )
        found.append(points.properties(width=width, height=130, title=panels.heading(name)))
    return alt.hconcat(*found, spacing=18).resolve_scale(y="shared")
