"""Time of additive attention over the dot product, and how both scores spread, against d."""

from __future__ import annotations

from typing import Any

import altair as alt

from . import marks, theme

SPREADS = {
    "dot_variance": "dot product, unscaled",
    "additive_variance_unit": "additive, w ~ 1",
    "additive_variance_fan_in": "additive, w ~ 1/√d",
}


def draw(rows: theme.Rows, finding: str) -> Any:
    x = theme.powers("d", "head dim d", [row["d"] for row in rows])
    shown = [{**row, "tokens": f"{row['n']} tokens"} for row in rows]
    lengths = theme.series("tokens", "length", [f"{n} tokens" for n in sorted({row["n"] for row in rows})])
    lengths = lengths.title(None).legend(orient="bottom", columns=1)
    time = marks.joined(shown, x, "factor", lengths) + marks.measured(
        shown, x, "factor", "times as long as the dot product", lengths
    )
    spreads = [
        {"d": row["d"], "score": name, **{f"variance{end}": row[f"{column}{end}"] for end in ("", "_low", "_high")}}
        for row in rows
        for column, name in SPREADS.items()
    ]
    kinds = alt.Color("score:N", title=None,
        legend=alt.Legend(orient="bottom", columns=1), sort=list(SPREADS.values()),
                      scale=alt.Scale(domain=list(SPREADS.values()), range=theme.SERIES[2:5]))  # fmt: skip
    spread = marks.joined(spreads, x, "variance", kinds) + marks.measured(
        spreads, x, "variance", "variance of the scores", kinds, log=True
    )
    half = theme.WIDTH // 2 + 10
    chart = alt.hconcat(
        time.properties(width=half, height=280), spread.properties(width=half, height=280)
    ).resolve_scale(color="independent")
    return theme.finish(
        chart, finding, "CPU, float32, forward. Left: median of ratios within each round, with 95 % intervals."
    )
