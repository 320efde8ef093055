"""real_heads: in a real model's heads, does one token get almost all the attention when the scale is removed?

The embedded MiniLM reads sentences while the scale of every layer is replaced. It was trained with 1/√d_k; what a model does that
was trained without it is another question (`attemper run charlm`).
"""

from __future__ import annotations

from typing import Any

from ...scale import RULES
from ...scan import scan
from ..engine.experiment import Cell, Expectation, Parameter, Row, Rows, define, pick
from .sentences import READ, batch, chosen, loaded

SCALES = ("none", "sqrt_dk", "dk", "sqrt_dmodel")
ALMOST_ALL = 0.9
"""A head gives one token almost all of its attention when its queries' largest weights average more than this."""

KEPT = ("top_weight", "saturated", "effective_keys", "entropy", "variance", "peak", "rows")


def measure(cell: Cell) -> list[Row]:
    model, _ = loaded(str(cell["device"]))
    texts = batch([text for pair in chosen(cell) for text in pair], str(cell["device"]))
    found = scan(model, dict(texts), what_if=str(cell["rule"]), pictures=False).to_dict()["what_if"][0]["heads"]
    places = {name: place for place, name in enumerate(dict.fromkeys(row["layer"] for row in found))}
    heads = model.config.num_attention_heads
    sizes = {"d": model.config.hidden_size // heads, "heads": heads}
    return [
        {"layer": places[row["layer"]], "head": row["head"], **sizes, **{name: row[name] for name in KEPT}}
        for row in found
    ]


def almost_all(rows: Rows, rule: str) -> tuple[int, int]:
    """How many heads give one token almost all of their attention under a rule, and of how many."""
    heads = pick(rows, rule=rule)
    return sum(row["top_weight"] > ALMOST_ALL for row in heads), len(heads)


def expect(rows: Rows) -> list[Expectation]:
    """The first layer reads the same embeddings under every rule, so its logits only change by the ratio of the scales."""
    found = []
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
        found.append(Expectation(quantity, expected, furthest, 1e-3 * expected, source, "float32 rounding"))
    return found


def finding(rows: Rows) -> str:
    words = {"none": "without a scale", "sqrt_dk": "with 1/√d_k", "dk": "with 1/d_k", "sqrt_dmodel": "with 1/√d_model"}
    counts = [(words[rule], *almost_all(rows, rule)) for rule in SCALES if pick(rows, rule=rule)]
    (first, count, heads), rest = counts[0], counts[1:]
    others = "".join(f"{', ' if place else '; '}{count} {name}" for place, (name, count, _) in enumerate(rest))
    return (
        f"{count} of MiniLM's {heads} heads give one token more than {ALMOST_ALL:g} of their attention {first}{others}"
    )


def draw(rows: Rows, finding: str) -> Any:
    """The top weight of a real model's heads, from the least to the most, under each scale."""
    import altair as alt

    from ..figures import marks, theme

    shown = []
    for rule in dict.fromkeys(row["rule"] for row in rows):
        heads = sorted((row for row in rows if row["rule"] == rule), key=lambda row: row["top_weight"])
        shown += [{**row, "rank": place} for place, row in enumerate(heads, start=1)]
    shown = theme.labelled(shown)
    colour = theme.by_rule(shown)
    last = max(row["rank"] for row in shown)
    x = alt.X("rank:Q", title="heads, sorted", scale=alt.Scale(domain=[0, last + 1]), axis=alt.Axis(grid=False))
    points = marks.curve(shown, x, "top_weight", "largest weight of a query, mean over queries", colour)
    chart = marks.labelled_line(0.9, "almost all: 0.9") + points
    note = (
        f"MiniLM-L6, {last} heads, d_k = {rows[0]['d']}, trained with 1/√d_k; "
        "the scale of every layer is replaced while it reads sentences."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(
    __name__,
    question="In a real model's heads, does one token get almost all the attention when the scale is removed?",
    claims=("C14",),
    parameters=(Parameter("rule", SCALES, "the rule that replaces the scale", choices=SCALES), READ),
)
