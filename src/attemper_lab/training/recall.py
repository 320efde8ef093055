"""recall: does a layer of attention learn to look up a pair it has just seen, under each rule, at its own best learning rate?

A sequence holds `pairs` pairs of a key and a value, each pair one token; the query is one of its keys and the answer its value.
One layer, one head, unit-variance entries. Every batch is new, so there is no gap between seen and unseen sequences to speak of.
Learning rates are chosen by other sequences than those whose accuracy is reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator, pick
from ..figures import panels, theme
from ..maths.stats import over_seeds
from .layers import AttentionLayer
from .loop import fitted
from .runs import at_best, at_edge, best_lr, diverged, fastest_lr, first_step, largest, runs, survived

KEYS, VALUES = 256, 32
UNSEEN = 256
LEARNED = 0.9


class Recall(nn.Module):
    """Embeddings, three projections, one head, one read-out. Pairs are sums of two embeddings, so their projections are too:
    projecting the tables once gives the same function as projecting every token, at a seventh of the cost."""

    def __init__(self, d: int, score: str, stream: torch.Generator, fold: bool = False) -> None:
        super().__init__()

        def draw(rows: int, columns: int, std: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=stream, device=stream.device) * std)

        self.key, self.value = draw(KEYS, d), draw(VALUES, d)
        self.w_q, self.w_k, self.w_v = (draw(d, d, d**-0.5) for _ in range(3))
        self.read = draw(d, VALUES, d**-0.5)
        if fold:  # T5: what the rule would divide by is in W_q from the start
            self.w_q.data /= math.sqrt(d)
        self.attention = AttentionLayer(score, 1, d).to(stream.device)

    def forward(self, keys: Tensor, values: Tensor, queried: Tensor) -> Tensor:
        """keys, values (B, pairs), queried (B,) → logits of the answer (B, VALUES)."""
        query = F.embedding(queried, self.key @ self.w_q)[:, None, None]  # (B, 1, 1, d)
        key, value = (
            (F.embedding(keys, self.key @ weight) + F.embedding(values, self.value @ weight))[:, None] / math.sqrt(2)
            for weight in (self.w_k, self.w_v)
        )  # (B, 1, pairs, d), unit variance
        attended: Tensor = self.attention(query, key, value)
        return attended[:, 0, 0] @ self.read


def measure(cell: Cell) -> list[Row]:
    return train(cell, str(cell["rule"]))


def train(cell: Cell, score: str, fold: bool = False, optimizer: str = "adam") -> list[Row]:
    """One run; other experiments ask the same task other questions."""
    return list(training(cell, score, fold, optimizer))


def training(cell: Cell, score: str, fold: bool = False, optimizer: str = "adam") -> Iterator[Row]:
    """One run, row by row as it trains."""
    d, batch, pairs = int(cell["d"]), int(cell["batch"]), int(cell["pairs"])
    model = Recall(d, score, generator(cell["device"], "recall", d, pairs, cell["seed"]), fold)
    data = generator(cell["device"], "recall data", pairs, cell["seed"])
    sets = {
        column: _sequences(UNSEEN, pairs, generator(cell["device"], f"recall {stream}", pairs))
        for column, stream in (("accuracy", "test"), ("validation", "validation"))
    }

    def loss_of(step: int) -> Tensor:
        *inputs, answer = _sequences(batch, pairs, data)
        return F.cross_entropy(model(*inputs), answer)

    @torch.no_grad()
    def evaluate(last: bool) -> dict[str, float]:
        return {
            column: float((model(*inputs).argmax(-1) == answer).double().mean())
            for column, (*inputs, answer) in sets.items()
        }

    watched = {"w_q": model.w_q, "w_v": model.w_v}
    return fitted(model, float(cell["lr"]), int(cell["steps"]), loss_of, evaluate, watched, optimizer)


def _sequences(count: int, pairs: int, stream: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys without repetition, their values, the key that is queried, and its value."""
    keys = torch.rand(count, KEYS, generator=stream, device=stream.device).argsort(-1)[:, :pairs]
    values = torch.randint(VALUES, (count, pairs), generator=stream, device=stream.device)
    index = torch.randint(pairs, (count, 1), generator=stream, device=stream.device)
    return keys, values, keys.gather(1, index)[:, 0], values.gather(1, index)[:, 0]


def summary(rows: Rows, which: str = "rule") -> list[Row]:
    """Per rule and d: accuracy at the learning rate that is best in the end, steps to 90 % at the one that is fastest; over seeds
    the median and the range. ``at_edge`` says whether the best is the least or the most that was tried."""
    summaries = []
    for d in sorted({row["d"] for row in rows}):
        for name in dict.fromkeys(row[which] for row in rows):
            tried = pick(rows, d=d, **{which: name})
            if not tried:
                continue
            lr, fast = best_lr(tried, "accuracy", True), fastest_lr(tried, "accuracy", LEARNED)
            of_seed, fastest = (list(runs(pick(tried, lr=rate), "seed").values()) for rate in (lr, fast))
            summaries.append(
                {
                    which: name,
                    "d": d,
                    "lr": lr,
                    "at_edge": at_edge(tried, lr),
                    "seeds": len(of_seed),
                    "diverged": sum(map(diverged, of_seed)),
                    **over_seeds("accuracy", [run[-1]["accuracy"] for run in of_seed]),
                    "fast_lr": fast,
                    "steps_to_90": statistics.median(first_step(run, "accuracy", LEARNED) for run in fastest),
                    "peak": largest([row for run in of_seed for row in run], "peak"),
                    "first_entropy": statistics.median(run[0]["entropy"] for run in of_seed),
                    "first_gradient": statistics.median(run[0]["w_q_grad"] for run in of_seed),
                }
            )
    return summaries


def expect(rows: Rows) -> list[Expectation]:
    """A test of the sign: recall takes longer without the scale, each at its fastest learning rate."""
    expectations = []
    for d in sorted({row["d"] for row in rows}):
        steps = {row["rule"]: row["steps_to_90"] for row in pick(summary(rows), d=d)}
        if math.isfinite(steps.get("sqrt_dk", math.inf)) and "none" in steps:
            quantity = f"steps to 90 %, without the scale minus with 1/√d_k, d = {d}"
            source, why = "Vaswani et al. 2017, section 3.2.1: suspected, not measured", "a test of the sign"
            expectations.append(
                Expectation(quantity, 0.0, steps["none"] - steps["sqrt_dk"], 0.0, source, why, above=True)
            )
    return expectations


NAMES = {"sqrt_dk": "1/√d_k", "none": "no scale", "dk": "1/d_k", "qk_norm": "QK-norm", "learned": "a learned factor"}


def finding(rows: Rows) -> str:
    d, steps = max(row["d"] for row in rows), max(row["steps"] for row in rows)
    best = {row["rule"]: row for row in pick(summary(rows), d=d)}
    words = f"Recall at d = {d} in {steps} steps, each rule at its best learning rate: {learned(best, NAMES)}"
    if all(best.get(rule, {"accuracy": 0})["accuracy"] >= LEARNED for rule in ("sqrt_dk", "none")):
        with_it, without = best["sqrt_dk"]["steps_to_90"], best["none"]["steps_to_90"]
        words = f"Recall at d = {d}: 90 % takes {without:.0f} steps with no scale and {with_it:.0f} with 1/√d_k"
        words += ", each at its fastest learning rate"
    return words + survived(pick(rows, d=d), "rule", "lr", "seed")


def at_the_edge(best: Rows, which: str, names: Mapping[str, str]) -> str:
    """A sentence that names those whose best learning rate is the lowest or highest tried: a better one may lie beyond."""
    named = [names.get(row[which], row[which]) for row in best if row["at_edge"]]
    return f"Best at the edge of the learning rates tried: {', '.join(named)}. " if named else ""


def draw(rows: Rows, finding: str) -> Any:
    """Accuracy, loss, entropy, the largest logit and the gradient during training, each rule at its best learning rate."""
    d = max(row["d"] for row in rows)
    shown = theme.labelled(at_best(pick(rows, d=d), "rule", "accuracy", True))
    chart = panels.draw({"": shown}, theme.by_rule(shown), "rule_label", panels.RECALL)
    note = f"One layer, one head, d = {d}, {rows[0]['pairs']} keys, Adam, unit-variance entries. "
    note += at_the_edge(pick(summary(rows), d=d), "rule", NAMES) + panels.NOTE
    return theme.finish(chart, finding, note)


def learned(best: Mapping[str, Mapping[str, Any]], names: Mapping[str, str]) -> str:
    """Which of them learned the task within the steps and which did not, best first, with their accuracies."""
    order = sorted(best.items(), key=lambda item: -item[1]["accuracy"])
    parts = []
    for words, some in (
        ("learned", [item for item in order if item[1]["accuracy"] >= LEARNED]),
        ("not learned", [item for item in order if not item[1]["accuracy"] >= LEARNED]),
    ):
        said = [f"{names.get(name, name)} ({row['accuracy']:.0%})" for name, row in some]
        parts += (
            [f"{words} with {' and '.join([', '.join(said[:-1]), said[-1]] if said[1:] else said)}"] if said else []
        )
    return "; ".join(parts)


EXPERIMENT = define(globals())
