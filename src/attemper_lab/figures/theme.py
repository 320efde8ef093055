"""theme: what every figure shares: size, colours that colour-blind readers can tell apart, a title that states the finding."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from attemper.extension.files import finite

from ..engine.experiment import Rows as Rows
from . import alt

WIDTH, HEIGHT = 640, 360  # readable at a README's 800 pixels
TITLE_COLUMNS = 92

BASELINE = "#999999"  # what rules are compared with is no rule, so it is grey
# Okabe and Ito (2008), by role
RULES = {
    "none": ("no scale", "#D55E00"),
    "sqrt_dk": ("1/√d_k", "#0072B2"),
    "dk": ("1/d_k", "#009E73"),
    "sqrt_dmodel": ("1/√d_model", "#CC79A7"),
    "qk_norm": ("QK-norm", "#56B4E9"),
    "learned": ("learned", "#E69F00"),
    "softcap": ("softcap", "#000000"),
    "no_attention": ("no attention", BASELINE),
}
LABELS = {name: label for name, (label, _) in RULES.items()}
COLOURS = {name: colour for name, (_, colour) in RULES.items()}
SERIES = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
THEORY = "#555555"


def data(rows: Rows) -> alt.Data:
    """Rows as inline data; no data frame is needed. What is not finite has no place in a chart, nor in JSON: it is left empty."""
    return alt.Data(values=[finite(row) for row in rows])


def by_rule(rows: Rows) -> alt.Color:
    """A colour per rule, the same in every figure."""
    present = [name for name in COLOURS if any(row["rule"] == name for row in rows)]
    return alt.Color(
        "rule_label:N",
        title="rule",
        scale=alt.Scale(domain=[LABELS[name] for name in present], range=[COLOURS[name] for name in present]),
    )


def labelled(rows: Rows) -> list[dict[str, Any]]:
    """The rows with the rule as it is written in figures."""
    return [{**row, "rule_label": LABELS.get(str(row["rule"]), str(row["rule"]))} for row in rows]


def series(field: str, title: str, names: Sequence[Any]) -> alt.Color:
    """A colour per name, in the order given."""
    return alt.Color(
        f"{field}:N", title=title, sort=list(names), scale=alt.Scale(domain=list(names), range=SERIES[: len(names)])
    )


def by_keys(rows: Rows) -> tuple[list[dict[str, Any]], alt.Color]:
    """The rows with their number of keys in words, and a colour per number."""
    names = [f"{n} keys" for n in sorted({row["n"] for row in rows})]
    return [{**row, "keys": f"{row['n']} keys"} for row in rows], series("keys", "keys", names)


def unpivoted(rows: Rows, at: str, what: str, columns: Mapping[str, str], value: str) -> list[dict[str, Any]]:
    """One row per row and column: its position ``at`` the axis, the column's name as ``what``, its ``value`` and interval."""
    return [
        {at: row[at], what: name, **{f"{value}{end}": row[f"{column}{end}"] for end in ("", "_low", "_high")}}
        for row in rows
        for column, name in columns.items()
    ]


def in_order(rows: Rows, colour: alt.Color, column: str, most: float, least: float) -> list[dict[str, Any]]:
    """The rows in the order of the legend, with a size in ``column`` that falls from name to name.

    Marks are drawn in the order of the rows. Where some lie on one another, each is larger than the next, and all of them show.
    """
    names, field = list(colour["scale"]["domain"]), str(colour["shorthand"]).removesuffix(":N")
    step = (most - least) / max(1, len(names) - 1)
    sized = [{**row, column: most - step * names.index(row[field])} for row in rows]
    return sorted(sized, key=lambda row: -row[column])


def decades(low: float, high: float) -> alt.Axis:
    """Ticks at powers of ten, ten at most, and nothing between: a logarithmic axis that stays quiet."""
    if not 0 < low <= high < math.inf:  # nothing that a logarithmic axis could show, or not a number
        return alt.Axis(format="~g")
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = math.ceil((last - first) / 10) or 1
    values = [10.0**power for power in range(last, first - 1, -step)]
    return alt.Axis(values=values, format="~g" if first >= -4 else ".0e")


def powers(field: str, title: str, values: Sequence[float], form: str | None = None) -> alt.X:
    """A logarithmic axis that names the values that were measured, and no others; ``form`` is how numbers are written."""
    axis = alt.Axis(
        values=sorted(set(values)),
        format=form or ("~g" if min(values) < 1 else "d"),
        labelOverlap="greedy",
        labelSeparation=4,
        grid=False,
    )
    return alt.X(f"{field}:Q", title=title, scale=alt.Scale(type="log", nice=False, padding=24), axis=axis)


def side_by_side(left: Any, right: Any, width: int, height: int = 300) -> alt.HConcatChart:
    return alt.hconcat(*(part.properties(width=width, height=height) for part in (left, right)))


def finish(chart: Any, finding: str, note: str) -> Any:
    """The finding as the title, what is shown under it, and the shared style."""
    title = alt.TitleParams(
        textwrap.wrap(finding, TITLE_COLUMNS),
        subtitle=textwrap.wrap(note, TITLE_COLUMNS + 16),
        anchor="start",
        frame="group",
        fontSize=15,
        subtitleFontSize=12,
        subtitleColor="#555555",
        offset=14,
    )
    config = alt.Config(
        axis=alt.AxisConfig(labelFontSize=12, titleFontSize=13, titleFontWeight="normal", gridColor="#e8e8e8"),
        legend=alt.LegendConfig(labelFontSize=12, titleFontSize=12, symbolSize=90, symbolOpacity=1),
        view=alt.ViewConfig(strokeWidth=0),
        header=alt.HeaderConfig(labelFontSize=13, titleFontSize=13),
    )
    # each such call copies all data: one is enough
    return chart.properties(title=title, background="white", config=config)
