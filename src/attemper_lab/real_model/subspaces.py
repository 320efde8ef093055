"""subspaces: do the heads of a layer of a real model read different subspaces, and look at different tokens?

Two measures, each with a comparison. A head reads the row space of its part of W_q, d_k of the model's d_model dimensions: the
overlap of two such spaces, tr(P_a P_b)/d_k, is 1 when they are equal, and d_k/d_model on average when they are drawn at random.
The weights: two heads differ when the distance (total variation) of their weights on the same sentences is larger than that of
either head's weights on two sentences of the same syntax with other words.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from attemper import weights

from ..engine.experiment import Cell, Expectation, Row, Rows, define, generator
from ..figures import alt, marks, theme
from ..maths.stats import columns
from .sentences import batch, chosen, loaded


def measure(cell: Cell) -> list[Row]:
    model, _ = loaded(str(cell["device"]))
    pairs = [patterns(model, batch(pair, str(cell["device"]))) for pair in chosen(cell)]
    heads, width = model.config.num_attention_heads, model.config.hidden_size
    stream = generator("cpu", "subspaces", cell["seed"])
    rows = []
    for number, layer in enumerate(model.encoder.layer):
        attention = layer.attention.self
        between = torch.stack([between_heads(sentence) for pair in pairs for sentence in pair[number]]).mean(
            0
        )  # [heads, heads]
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
                **columns(distance=others(between), own_distance=own),
                "different": float((between[a, b] > torch.maximum(own[a], own[b])).double().mean()),
                **columns(overlap=others(spaces["query"])),
                "key_overlap": float(others(spaces["key"]).mean()),
                "largest_overlap": float(spaces["query"][a, b].max()),
                **columns(random_overlap=others(random)),
                "chance": 1 / heads,
            }
        )
    return rows


def patterns(model: Any, pair: Any) -> list[Tensor]:
    """The weights of every head on both sentences of a pair, (sentences, heads, n, n), layer by layer; nothing is padded."""
    heads, layers = model.config.num_attention_heads, []
    with torch.no_grad():
        inputs = model(**pair, output_hidden_states=True).hidden_states
        for layer, x in zip(model.encoder.layer, inputs, strict=False):  # one more than layers: the last output
            own = layer.attention.self
            query, key = (part(x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (own.query, own.key))
            layers.append(weights(query, key).double().cpu())
    return layers


def distance(first: Tensor, other: Tensor) -> Tensor:
    """Total variation between the weights of the same queries, (…, n, n) each, averaged over the queries: 0 to 1."""
    return (first - other).abs().sum(-1).mean(-1) / 2


def between_heads(weights: Tensor) -> Tensor:
    """The distance between every two heads, [heads, heads]."""
    return distance(weights[:, None], weights[None])


def overlaps(weight: Tensor, heads: int) -> Tensor:
    """tr(P_a P_b)/d_k for every two heads of a projection (d_model, d_model), [heads, heads]."""
    parts = weight.detach().double().cpu().unflatten(0, (heads, -1))  # [heads, d_k, d_model]
    bases = torch.linalg.qr(parts.mT)[0]  # [heads, d_model, d_k]
    return torch.einsum("adi,bdj->abij", bases, bases).square().sum((-2, -1)) / parts.shape[1]


def others(matrix: Tensor) -> Tensor:
    """The mean of each head's row, without itself."""
    heads = len(matrix)
    return (matrix.sum(1) - matrix.diagonal()) / (heads - 1)


def expect(rows: Rows) -> list[Expectation]:
    expectations, source = [], "closed form: E tr(P_a P_b)/d_k = d_k/d_model"
    why = "4 standard errors over the heads, which share their partners, and 0.001"
    for row in rows:
        quantity, within = f"overlap of random subspaces, layer {row['layer']}", row["random_overlap_reach"] + 1e-3
        expectations.append(Expectation(quantity, row["chance"], row["random_overlap"], within, source, why))
    return expectations


def finding(rows: Rows) -> str:
    different, overlap = (fmean(row[name] for row in rows) for name in ("different", "overlap"))
    return (
        f"{different:.0%} of the pairs of heads in a layer look at different tokens; the subspaces they read overlap by "
        f"{overlap:.2f}, {overlap / rows[0]['chance']:.1f} times as much as random ones"
    )


SPACES = {"overlap": "two heads", "random_overlap": "random subspaces"}
WEIGHTS = {"distance": "two heads, same words", "own_distance": "one head, other words"}


def draw(rows: Rows, finding: str) -> Any:
    """Overlap of the heads' subspaces and of random ones; distance of the heads' weights and of one head's on other words."""
    left = _panel(rows, SPACES, "overlap of query subspaces", [*SPACES.values(), *WEIGHTS.values()])
    right = _panel(rows, WEIGHTS, "distance of weights (total variation)", [*SPACES.values(), *WEIGHTS.values()])
    chance = marks.labelled_line(rows[0]["chance"], "")
    chart = theme.side_by_side(chance + left, right, theme.WIDTH // 2 - 30)
    note = (
        "MiniLM-L6. Points: means over the heads of a layer, with 95 % intervals. Two equal subspaces overlap by 1, "
        f"random ones by d_k/d_model = {rows[0]['chance']:.3f} (dashed)."
    )
    return theme.finish(chart, finding, note)


def _panel(rows: Rows, series: dict[str, str], title: str, names: list[str]) -> Any:
    shown = theme.unpivoted(rows, "layer", "what", series, "value")
    colour = theme.series("what", "", names)
    x = alt.X("layer:O", title="layer, from 0", axis=alt.Axis(labelAngle=0))
    return marks.curve(shown, x, "value", title, colour)


EXPERIMENT = define(globals())
