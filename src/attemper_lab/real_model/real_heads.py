"""real_heads: in a real model's heads, does one token get almost all the attention when the scale is removed?

The embedded MiniLM, which was trained with 1/√d_k, reads sentences while the scale of every layer is replaced. What a model does
that was trained without a scale is another question: `attemper run charlm`.
"""

from __future__ import annotations

from typing import Any

from attemper import RULES, scan

from ..engine.experiment import Cell, Expectation, Row, Rows, define, pick
from ..figures import alt, marks, theme
from ..maths.theory import NEARLY_ONE_HOT, SCALES
from .sentences import batch, chosen, loaded

ALMOST_ALL = NEARLY_ONE_HOT
"""A head gives one token almost all of its attention if the largest weights of its queries average more than this."""

COLUMNS = ("top_weight", "saturated", "effective_keys", "entropy", "variance", "peak", "rows")


def measure(cell: Cell) -> list[Row]:
    model, _ = loaded(str(cell["device"]))
    texts = batch([text for pair in chosen(cell) for text in pair], str(cell["device"]))
    measured = scan(model, dict(texts), what_if=str(cell["rule"]), pictures=False).to_dict()["what_if"][0]["heads"]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(row["layer"] for row in measured))}
    heads = model.config.num_attention_heads
    sizes = {"d": model.config.hidden_size // heads, "heads": heads}
    return [
        {"layer": numbers[row["layer"]], "head": row["head"], **sizes, **{name: row[name] for name in COLUMNS}}
        for row in measured
    ]


def almost_all(rows: Rows, rule: str) -> tuple[int, int]:
    """How many heads give one token almost all of their attention under a rule, and of how many."""
    heads = pick(rows, rule=rule)
    return sum(row["top_weight"] > ALMOST_ALL for row in heads), len(heads)


def expect(rows: Rows) -> list[Expectation]:
    """The first layer reads the same embeddings under every rule, so its logits only change by the ratio of the scales."""
    expectations = []
    before = {row["head"]: row for row in pick(rows, rule="sqrt_dk", layer=0)}
    for rule in dict.fromkeys(row["rule"] for row in rows):
        first = [row for row in pick(rows, rule=rule, layer=0) if row["head"] in before]
        if rule == "sqrt_dk" or not first:
            continue
        scale = RULES[rule].scale(head_dim=first[0]["d"], heads=first[0]["heads"])
        expected = scale**2 * first[0]["d"]
        ratios = [row["variance"] / before[row["head"]]["variance"] for row in first]
        quantity = f"Var(logits) under {rule!r} over that under 'sqrt_dk', first layer, the head furthest off"
        furthest, source = max(ratios, key=lambda ratio: abs(ratio - expected)), "the ratio of the scales, squared"
        expectations.append(Expectation(quantity, expected, furthest, 1e-3 * expected, source, "float32 rounding"))
    return expectations


def finding(rows: Rows) -> str:
    counts = [(words, *almost_all(rows, rule)) for rule, words in SCALES.items() if pick(rows, rule=rule)]
    (first, count, heads), rest = counts[0], counts[1:]
    others = "".join(f"{', ' if index else '; '}{count} {name}" for index, (name, count, _) in enumerate(rest))
    return (
        f"{count} of MiniLM's {heads} heads give one token more than {ALMOST_ALL:g} of their attention {first}{others}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """The top weight of a real model's heads, from the least to the most, under each scale."""
    shown = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        heads = sorted((row for row in rows if row["rule"] == rule), key=lambda row: row["top_weight"])
        shown += [{**row, "rank": index} for index, row in enumerate(heads, start=1)]
    shown = theme.labelled(shown)
    colour = theme.by_rule(shown)
    last = max(row["rank"] for row in shown)
    x = alt.X("rank:Q", title="heads, sorted", scale=alt.Scale(domain=[0, last + 1]), axis=alt.Axis(grid=False))
    points = marks.curve(shown, x, "top_weight", "largest weight of a query, mean over queries", colour)
    chart = marks.labelled_line(ALMOST_ALL, f"almost all: {ALMOST_ALL:g}") + points
    note = (
        f"MiniLM-L6, {last} heads, d_k = {rows[0]['d']}, trained with 1/√d_k; "
        "the scale of every layer is replaced while it reads sentences."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
