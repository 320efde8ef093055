"""subspaces: do the heads of a layer of a real model read different subspaces, and look at different tokens?

Two measures, each with its null. A head reads the row space of its part of W_q, d_k of the model's d_model dimensions: the
overlap of two such spaces, tr(P_a P_b)/d_k, is 1 when they are one, and d_k/d_model on average when they are drawn at random.
And the weights: two heads differ when their weights on the same sentences lie further apart (total variation) than either
head's own weights do on two sentences of the same syntax with other words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...scan.examiners.weights import weights_of_rows
from ...vitals import Vitals
from ...watch.examine import AttentionCall as Call
from ...watch.examine import examine
from ..engine.experiment import DEVICE, SEED, Cell, Expectation, Experiment, Row, Rows, generator
from ..maths.stats import over_batches
from .model import READ, batch, chosen, loaded


class Patterns:
    """An examiner that keeps every head's weights, (sentences, heads, n, n), layer by layer; the sentences are short."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def look(self, call: Call, vitals: Vitals, rows: Tensor | None) -> Tensor:
        return weights_of_rows(call, vitals, torch.arange(call.facts.queries, device=vitals.lse.device)).double().cpu()

    def keep(self, name: str, call: Call, seen: Tensor) -> None:
        self.layers.append(seen)


def measure(cell: Cell) -> list[Row]:
    model, _ = loaded(str(cell["device"]))
    pairs = [patterns(model, batch(pair, str(cell["device"]))) for pair in chosen(cell)]
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    stream = generator("cpu", "subspaces", cell["seed"])
    rows = []
    for number, layer in enumerate(model.encoder.layer):
        attention = layer.attention.self
        between = torch.stack([apart(one) for pair in pairs for one in pair[number]]).mean(0)  # [heads, heads]
        own = torch.stack([distance(*pair[number]) for pair in pairs]).mean(0)  # [heads]
        a, b = torch.triu_indices(heads, heads, 1, device="cpu")
        spaces = {name: overlaps(getattr(attention, name).weight, heads) for name in ("query", "key")}
        random = overlaps(torch.randn(width, width, generator=stream, device="cpu"), heads)
        rows.append(
            {
                "layer": number,
                "heads": heads,
                "d": width // heads,
                "d_model": width,
                **over_batches(others(between)).columns("distance"),
                **over_batches(own).columns("own_distance"),
                "different": float((between[a, b] > torch.maximum(own[a], own[b])).double().mean()),
                **over_batches(others(spaces["query"])).columns("overlap"),
                "key_overlap": float(others(spaces["key"]).mean()),
                "largest_overlap": float(spaces["query"][a, b].max()),
                **over_batches(others(random)).columns("random_overlap"),
                "chance": 1 / heads,
            }
        )
    return rows


def patterns(model: Any, pair: Any) -> list[Tensor]:
    """The weights of every head on both sentences of a pair, layer by layer."""
    seen = Patterns()
    with torch.no_grad(), examine(model, [seen]):
        model(**pair)
    return seen.layers


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Total variation between the weights of the same queries, (…, n, n) each, averaged over the queries: 0 to 1."""
    return (one - other).abs().sum(-1).mean(-1) / 2


def apart(weights: Tensor) -> Tensor:
    """The distance between every two heads, [heads, heads]."""
    return distance(weights[:, None], weights[None])


def overlaps(weight: Tensor, heads: int) -> Tensor:
    """tr(P_a P_b)/d_k for every two heads of a projection (d_model, d_model), [heads, heads]."""
    parts = weight.detach().double().cpu().unflatten(0, (heads, -1))  # [heads, d_k, d_model]
    bases = torch.linalg.qr(parts.mT)[0]  # [heads, d_model, d_k]
    return torch.einsum("adi,bdj->abij", bases, bases).square().sum((-2, -1)) / parts.shape[1]


def others(matrix: Tensor) -> Tensor:
    """What each head has with the others on average."""
    heads = len(matrix)
    return (matrix.sum(1) - matrix.diagonal()) / (heads - 1)


def expect(rows: Rows) -> list[Expectation]:
    return [
        Expectation(
            f"overlap of random subspaces, layer {row['layer']}",
            row["chance"],
            row["random_overlap"],
            row["random_overlap_reach"] + 1e-3,
            "closed form: E tr(P_a P_b)/d_k = d_k/d_model",
            "4 standard errors over the heads, which share their partners, and 0.001",
        )
        for row in rows
    ]


def finding(rows: Rows) -> str:
    count = len(rows)
    different = sum(row["different"] for row in rows) / count
    overlap = sum(row["overlap"] for row in rows) / count
    return (
        f"{different:.0%} of the pairs of heads in a layer look at different tokens; the subspaces they read overlap by "
        f"{overlap:.2f}, {overlap / rows[0]['chance']:.1f} times as much as random ones"
    )


EXPERIMENT = Experiment(
    name="subspaces",
    question="Do the heads of a layer of a real model read different subspaces, and look at different tokens?",
    claims=("C18",),
    parameters=(
        READ,
        SEED,
        DEVICE,
    ),
    measure=measure,
    expect=expect,
    finding=finding,
    chart="subspaces",
)
