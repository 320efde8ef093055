"""How far the heads of a layer lie apart: their subspaces beside random ones, their weights beside their own on other words."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme

SPACES = {"overlap": "two heads", "random_overlap": "random subspaces"}
WEIGHTS = {"distance": "two heads, same words", "own_distance": "one head, other words"}


def draw(rows: theme.Rows, finding: str) -> Any:
    left = panel(rows, SPACES, "overlap of query subspaces", [*SPACES.values(), *WEIGHTS.values()])
    right = panel(rows, WEIGHTS, "distance of weights (total variation)", [*SPACES.values(), *WEIGHTS.values()])
    chance = marks.labelled_line(rows[0]["chance"], "")
    half = theme.WIDTH // 2 - 30
    chart = alt.hconcat((chance + left).properties(width=half, height=300), right.properties(width=half, height=300))
    note = (
        "MiniLM-L6. Points: means over the heads of a layer, with 95 % intervals. Two equal subspaces overlap by 1, "
        f"random ones by d_k/d_model = {rows[0]['chance']:.3f} (dashed)."
    )
    return theme.finish(chart, finding, note)


def panel(rows: theme.Rows, series: dict[str, str], title: str, names: list[str]) -> Any:
    shown = [
        {
            "layer": row["layer"] + 1,
            "what": name,
            **{f"value{end}": row[f"{field}{end}"] for end in ("", "_low", "_high")},
        }
        for row in rows
        for field, name in series.items()
    ]
    colour = theme.series("what", "", names)
    x = alt.X("layer:O", title="layer", axis=alt.Axis(labelAngle=0))
    return marks.joined(shown, x, "value", colour) + marks.measured(shown, x, "value", title, colour)
