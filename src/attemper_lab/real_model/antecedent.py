"""antecedent: does a pronoun attend to the word that it refers to, in any head of a real model?

Two sentences differ in one word, and with it the pronoun's antecedent changes from the first noun to the second. The
weight of the pronoun's query on each noun is taken less the mean weight that the other queries of the sentence give it,
so that a head in which every token attends to "dog" counts for nothing. A head *follows* the antecedent by half of how
much the difference of its two nouns changes between the sentences. Under the hypothesis that a head does not know the
antecedent, the two sentences of a pair can be exchanged: that gives the distribution of the largest |t| of all heads, and
p values that count how many heads were tried (Westfall and Young 1993, the single-step maximum). As a control, the same
is measured for the word before the pronoun, which refers to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attemper import Vitals
from attemper.extension.calls import AttentionCall, Examiner, weights_of_rows
from attemper.extension.inputs import what_if

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import alt, theme
from ..maths.theory import SCALES
from .pronouns import PRONOUN_PAIRS, PronounPair
from .sentences import batch, loaded

LEVEL = 0.05
"""The significance level of a head, corrected for the number of heads: chance alone reports some head this often."""


class WholeWeights(Examiner):
    """Collects the whole weights of every head, layer by layer; sentences are short."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor:
        return weights_of_rows(call, vitals, torch.arange(call.info.queries, device=vitals.lse.device)).double().cpu()

    def keep(self, name: str, call: AttentionCall, weights: Tensor) -> None:
        self.layers.append(weights)


def measure(cell: Cell) -> list[Row]:
    pairs = PRONOUN_PAIRS[str(cell["by"])]
    own, others = looks(pairs, str(cell["rule"]), str(cell["query"]), str(cell["device"]))
    excess = own - others  # [pairs, heads, sentence, noun]
    follows = ((excess[:, :, 0, 0] - excess[:, :, 0, 1]) - (excess[:, :, 1, 0] - excess[:, :, 1, 1])) / 2
    stream = generator("cpu", "antecedent", cell["by"], cell["permutations"], cell["seed"])
    exchanged = torch.randint(0, 2, (int(cell["permutations"]), len(pairs)), generator=stream, device="cpu")
    signs = exchanged.double() * 2 - 1
    t, p, largest = corrected(follows, signs)
    nouns = excess.mean((2, 3))
    _, noun_p, _ = corrected(nouns, signs)
    best_by_chance = (1 + (signs @ follows.sign()).amax(1) / len(pairs)).quantile(1 - LEVEL) / 2
    half = len(largest) // 2
    false_alarms = float((largest[half:] >= largest[:half].quantile(1 - LEVEL)).double().mean())
    model, _ = loaded(str(cell["device"]))
    heads = model.config.num_attention_heads
    return [
        {
            "layer": index // heads,
            "head": index % heads,
            "pairs": len(pairs),
            "weight": float(own[:, index].mean()),
            "weight_of_others": float(others[:, index].mean()),
            "right_noun": float((own[:, index, 0, 0] + own[:, index, 1, 1]).mean() / 2),
            "wrong_noun": float((own[:, index, 0, 1] + own[:, index, 1, 0]).mean() / 2),
            "follows": float(follows[:, index].mean()),
            "t": float(t[index]),
            "p": float(p[index]),
            "noun_excess": float(nouns[:, index].mean()),
            "noun_p": float(noun_p[index]),
            "right": float((follows[:, index] > 0).double().mean()),
            "right_by_chance": float(best_by_chance),
            "false_alarms": false_alarms,
        }
        for index in range(follows.shape[1])
    ]


def looks(pairs: tuple[PronounPair, ...], rule: str, query: str, device: str) -> tuple[Tensor, Tensor]:
    """The weight of a query on the two nouns, and the mean over the other words' queries: [pairs, heads, sentence, noun]."""
    model, tokenizer = loaded(device)
    inputs = batch([text for pair in pairs for text in pair.texts], device)
    seen = WholeWeights()
    what_if(model, lambda: model(**inputs), [rule], progress=lambda _: seen.layers.clear(), examiners=[seen])
    weights = torch.cat(seen.layers, dim=1).unflatten(0, (-1, 2)).transpose(1, 2)  # [pairs, heads, sentence, n, n]
    own, others = [], []
    for number, pair in enumerate(pairs):
        words = [tokenizer.convert_ids_to_tokens(inputs["input_ids"][2 * number + side].tolist()) for side in (0, 1)]
        pronoun, nouns = positions(pair, words[0], words[1])
        rest = [at for at in range(1, words[0].index("[SEP]")) if at not in (pronoun, pronoun - 1, *nouns)]
        own.append(weights[number, :, :, pronoun - (query == "word before")][..., nouns])
        others.append(weights[number, :, :, rest][..., nouns].mean(2))
    return torch.stack(own), torch.stack(others)


def positions(pair: PronounPair, first_tokens: list[str], other: list[str]) -> tuple[int, list[int]]:
    """The positions of the pronoun and of the two nouns: the same in both sentences, which differ in one token."""
    differ = [at for at, (a, b) in enumerate(zip(first_tokens, other, strict=True)) if a != b]
    assert [first_tokens[at] for at in differ] == [pair.for_first], (pair, first_tokens, other)
    pronoun = first_tokens.index("it") if "it" in first_tokens else differ[0]
    return pronoun, [first_tokens.index(pair.first), first_tokens.index(pair.second)]


def corrected(values: Tensor, signs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For [pairs, heads]: t of each head, its p among all heads, and the largest |t| of all heads in each exchange of signs."""
    count, square = len(values), values.square().mean(0)

    def student(mean: Tensor) -> Tensor:
        return mean / ((square - mean.square()).clamp_min(1e-300) / (count - 1)).sqrt()

    t = student(values.mean(0))
    largest = student(signs @ values / count).abs().amax(1)
    p = (1 + (largest[:, None] >= t.abs()).sum(0)) / (1 + len(signs))
    return t, p.double(), largest


def certain_heads(rows: Rows, by: str) -> tuple[Rows, Rows]:
    """The heads that look more at the antecedent, and those that look more at the other noun; the most certain first."""
    some = pick(rows, by=by, rule="sqrt_dk", query="pronoun")
    some = sorted((row for row in some if row["p"] < LEVEL), key=lambda row: row["p"])
    return [row for row in some if row["t"] > 0], [row for row in some if row["t"] < 0]


def expect(rows: Rows) -> list[Expectation]:
    """The test itself: at the threshold of one half of the exchanges, the other half finds a head as often as it may."""
    numbers = []
    for row in {(row["by"], row["rule"], row["query"], row["seed"]): row for row in rows}.values():
        whose = {"pronoun": "of the pronoun", "word before": "of the word before it"}[row["query"]]
        quantity = f"how often chance finds some head: pairs decided by {row['by']}, attention {whose}"
        quantity += f", {SCALES[row['rule']]}"
        reach = 4 * (2 * LEVEL * (1 - LEVEL) / (row["permutations"] / 2)) ** 0.5
        why = "4 standard errors: a threshold and a share, from half of the exchanges each"
        numbers.append(Expectation(quantity, LEVEL, row["false_alarms"], reach, "the level of the test", why))
    return numbers


def finding(rows: Rows) -> str:
    parts = []
    for by, words in (("agreement", "he or she decides"), ("meaning", "only the meaning decides")):
        if some := pick(rows, by=by, rule="sqrt_dk", query="pronoun"):
            best = max(some, key=lambda row: row["t"])
            count = len(certain_heads(rows, by)[0])
            parts.append(f"{count} of {len(some)} heads where {words} (by at most {best['follows']:.2f})")
    if not parts:
        return "Only controls were measured"
    return f"A pronoun attends more to its antecedent in {', and in '.join(parts)}"


NAMES = {"agreement": "he, she: agreement decides", "meaning": "it: meaning decides"}


def draw(rows: Rows, finding: str) -> Any:
    """How far each head follows the antecedent, sorted, for both kinds of pairs; heads within chance are hollow."""
    shown: list[Row] = []
    for by in (name for name in NAMES if pick(rows, by=name, rule="sqrt_dk", query="pronoun")):
        heads = sorted(pick(rows, by=by, rule="sqrt_dk", query="pronoun"), key=lambda row: row["follows"])
        shown += [
            {**row, "rank": index, "decides": NAMES[by], "name": f"layer {row['layer']} head {row['head']}"}
            for index, row in enumerate(heads, start=1)
        ]
    last = max(row["rank"] for row in shown)
    colour = theme.series("decides", "", [row["decides"] for row in shown[::-1]])
    x = alt.X("rank:Q", title="heads, sorted", scale=alt.Scale(domain=[0, last + 1]), axis=alt.Axis(grid=False))
    y = alt.Y("follows:Q", title="weight that follows the antecedent")

    def layer(some: Rows) -> Any:
        return alt.Chart(theme.data(some)).encode(x=x, y=y, color=colour)

    beyond, within = ([row for row in shown if (row["p"] < LEVEL) == side] for side in (True, False))
    tops = [max((row for row in shown if row["decides"] == name), key=lambda row: row["follows"]) for name in NAMES.values()
            if any(row["decides"] == name for row in shown)]  # fmt: skip
    chart = (
        alt.Chart(theme.data([{"y": 0}])).mark_rule(color=theme.THEORY, strokeDash=[4, 3]).encode(y="y:Q")
        + layer(within).mark_point(size=30, strokeWidth=1, opacity=0.7)
        + layer(beyond).mark_point(size=60, filled=True, opacity=1)
        + layer(tops).mark_text(align="right", dx=-9, fontSize=12).encode(text="name:N")
    )
    count = {row["by"]: row["pairs"] for row in rows}
    note = (
        f"MiniLM-L6; {', '.join(f'{pairs} pairs by {by}' for by, pairs in count.items())}. The pronoun's weight on "
        "its antecedent less that "
        f"on the other noun, each less the mean of other queries. Filled: beyond chance, counting that {last} heads were tried."
    )
    return theme.finish(chart.properties(width=theme.WIDTH, height=theme.HEIGHT), finding, note)


EXPERIMENT = define(globals())
