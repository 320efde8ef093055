"""real_heads: in a real model's heads, does one token get almost all the attention when the scale is taken away?

The embedded MiniLM reads sentences while every layer's scale is replaced. It was trained with 1/√d_k: what a model would do
that had been trained without is another question (`attemper run charlm`).
"""

from __future__ import annotations

from ...scale import RULES
from ...scan.what_if import what_if
from ..engine.experiment import DEVICE, SEED, Cell, Expectation, Experiment, Parameter, Row, Rows, pick
from .model import READ, batch, chosen, loaded

SCALES = ("none", "sqrt_dk", "dk", "sqrt_dmodel")
ALMOST_ALL = 0.9
"""A head gives one token almost all of its attention when its queries' largest weights average more than this."""

KEPT = ("top_weight", "saturated", "effective_keys", "entropy", "variance", "peak", "rows")


def measure(cell: Cell) -> list[Row]:
    model, _ = loaded(str(cell["device"]))
    texts = batch([text for pair in chosen(cell) for text in pair], str(cell["device"]))
    (found,) = what_if(model, lambda: model(**texts), [str(cell["rule"])])
    places = {name: place for place, name in enumerate(dict.fromkeys(row["layer"] for row in found.heads))}
    config = model.config
    d = config.hidden_size // config.num_attention_heads
    return [
        {
            "layer": places[row["layer"]],
            "head": row["head"],
            "d": d,
            "heads": config.num_attention_heads,
            **{name: row[name] for name in KEPT},
        }
        for row in found.heads
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
        found.append(
            Expectation(
                f"Var(logits) under {rule!r} over that under 'sqrt_dk', first layer, the head furthest off",
                expected,
                max(ratios, key=lambda ratio: abs(ratio - expected)),
                1e-3 * expected,
                "the ratio of the scales, squared",
                "float32 rounding",
            )
        )
    return found


def finding(rows: Rows) -> str:
    words = {"none": "without a scale", "sqrt_dk": "with 1/√d_k", "dk": "with 1/d_k", "sqrt_dmodel": "with 1/√d_model"}
    counts = [(words[rule], *almost_all(rows, rule)) for rule in SCALES if pick(rows, rule=rule)]
    (first, count, heads), rest = counts[0], counts[1:]
    others = "".join(f"{', ' if place else '; '}{count} {name}" for place, (name, count, _) in enumerate(rest))
    return (
        f"{count} of MiniLM's {heads} heads give one token more than {ALMOST_ALL:g} of their attention {first}{others}"
    )


EXPERIMENT = Experiment(
    name="real_heads",
    question="In a real model's heads, does one token get almost all the attention when the scale is taken away?",
    claims=("C14",),
    parameters=(
        Parameter("rule", SCALES, "the scale put in place", choices=SCALES),
        READ,
        SEED,
        DEVICE,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="real_heads",
)
