"""Scan documents for the tests of the report, with numbers that attemper measures; packed here as the contract says, by hand."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch

import attemper
from attemper.health import thresholds

TOKENS = ["[CLS]", "the", "dog", "chased", "the", "ball", "because", "it", "was", "fast", ".", "[SEP]"]
SIGNS = ("rows", "mean", "variance", "peak", "entropy", "sum_p2", "top_weight", "effective_keys", "evenness")
SIGNS += ("jacobian_trace", "saturated")


def packed(numbers: torch.Tensor, kind: str) -> str:
    return base64.b64encode(numbers.numpy().astype(kind).tobytes()).decode()


def dense(weights: torch.Tensor, bits: int = 16) -> dict[str, Any]:
    whole = (weights.double() * (2**bits - 1)).round().long()
    return {"format": "dense", "bits": bits, "data": packed(whole, "<u2" if bits == 16 else "u1")}


def top(weights: torch.Tensor, k: int = 8, rows: list[int] | None = None, kind: str = "<u2") -> dict[str, Any]:
    rows = list(range(weights.shape[1])) if rows is None else rows
    values, indices = weights[:, rows].topk(k, -1)
    whole = (values.double() * 65535).round().long()
    return {"format": "top", "k": k, "rows": rows, "indices": packed(indices, kind), "weights": packed(whole, "<u2")}


def made(
    tokens: list[str] | None = None,
    *,
    layers: int = 3,
    heads: int = 4,
    width: int = 16,
    texts: int = 1,
    form: str = "dense",
) -> tuple[dict[str, Any], dict[tuple[int, int], torch.Tensor]]:
    """A document and its weights, (layer, input) → (heads, n, n), of random q and k that grow with the layer."""
    tokens = TOKENS if tokens is None else tokens
    special = [token.startswith("[") and token.endswith("]") for token in tokens]
    document: dict[str, Any] = {
        "schema": "attemper.scan/1",
        "attemper": attemper.__version__,
        "torch": torch.__version__,
        "created": "2026-01-02T03:04:05Z",
        "model": {"name": "a model", "source": "object", "class": "Made", "type": None, "parameters": 12345},
        "inputs": [],
        "verdict": {"level": "note", "line": "Healthy, with remarks (1 high logit)."},
        "layers": [],
        "heads": [],
        "findings": [],
        "attention": [],
        "notes": ["Dead heads were not looked for: one text is not enough."],
    }
    document["model"] |= {"dtype": "float32", "sha256": "ab" * 32, "task": None}
    words = {"modality": "text", "text": " ".join(tokens), "tokens": tokens, "special": special, "length": len(tokens)}
    document["inputs"] = [words | {"generated": False, "truncated": False} for _ in range(texts)]
    generator, kept = torch.Generator().manual_seed(7), {}
    for number in range(layers):
        name, rows = f"encoder.layer.{number}.attention", []
        for place in range(texts):
            query, key = torch.randn(2, heads, len(tokens), width, generator=generator) * (1 + number)
            kept[number, place] = attemper.weights(query, key)
            rows.append(attemper.measure(query, key).by_head())
            packing = dense(kept[number, place]) if form == "dense" else top(kept[number, place])
            head = {"layer": name, "kind": "self", "input": place, "heads": heads}
            document["attention"].append({**head, "queries": len(tokens), "keys": len(tokens), **packing})
        folded = rows[0].merge(*rows[1:]).to_dicts()
        document["heads"] += [_row(name, index, row) for index, row in enumerate(folded)]
        document["layers"].append(_layer(name, heads, width, len(tokens), folded))
    return document, kept


def _row(layer: str, head: int, row: dict[str, float]) -> dict[str, Any]:
    signs = {name: row[name] if math.isfinite(row[name]) else None for name in SIGNS}
    rest = {"sink_weight": 0.25, "sink_token": "[SEP]", "sink_position": 3, "evenness_without_sinks": None}
    return {
        "layer": layer,
        "kind": "self",
        "head": head,
        **signs,
        **rest,
        "neighbour_weight": 0.1,
        "text_distance": None,
    }


def _layer(name: str, heads: int, width: int, keys: int, rows: list[dict[str, float]]) -> dict[str, Any]:
    std = math.sqrt(sum(row["variance"] for row in rows) / heads)
    applied = width**-0.5
    scale = {
        "declared": applied,
        "declared_by": "default",
        "applied": applied,
        "measured_by": "argument",
        "rule": "sqrt_dk",
    }
    scale |= {
        "factors": [{"what": "argument of scaled_dot_product_attention", "number": applied}],
        "formula": "q·k / √d_k",
    }
    scale |= {"qk_norm": False, "after_softmax": None, "predicted_std": std, "logit_std": std, "verdict": "ok"}
    facts = {"layer": name, "kind": "self", "route": "sdpa", "dtype": "float32", "heads": heads, "kv_heads": heads}
    facts |= {"head_dim": width, "queries": keys, "keys": keys, "causal": False, "masked": False, "softcap": None}
    return facts | {
        "window": None,
        "implementation": None,
        "scale": scale | {"message": "It applies 1/√d_k, as it declares."},
    }


def finding(document: dict[str, Any], layer: int, head: int | None, name: str = "peak", level: str = "note") -> None:
    """Add a finding about a head, with its own numbers; the worst first is the caller's business."""
    row = next(
        row
        for row in document["heads"]
        if row["layer"] == f"encoder.layer.{layer}.attention" and row["head"] == (head or 0)
    )
    where = {
        "layer": row["layer"],
        "kind": "self",
        "head": head,
        "value": row["peak"],
        "threshold": 30,
        "source": "a source",
    }
    words = {
        "message": f"Its largest logit is {row['peak']:.1f}.",
        "advice": "Watch it.",
        "fault": None,
        "title": thresholds.KINDS[name].title,
    }
    document["findings"].append({"name": name, "level": level, **where, **words})


def asked(document: dict[str, Any], kept: dict[tuple[int, int], torch.Tensor], position: int) -> dict[str, Any]:
    """Add what `--token` adds; returns it."""
    tokens, special = document["inputs"][0]["tokens"], document["inputs"][0]["special"]
    places = [
        (number, head) for (number, place), weights in kept.items() if place == 0 for head in range(weights.shape[0])
    ]
    rows = [
        (f"encoder.layer.{number}.attention", head, kept[number, 0][head, position].tolist()) for number, head in places
    ]
    plain = [key for key in range(len(tokens)) if not special[key] and key != position]
    layer, head, key, weight = max(((n, h, k, w[k]) for n, h, w in rows for k in plain), key=lambda found: found[3])
    best = {"layer": layer, "kind": "self", "head": head, "token": tokens[key], "position": key, "weight": weight}
    lines = [{"layer": name, "kind": "self", "head": head, "weights": weights} for name, head, weights in rows]
    document["token"] = {"asked": tokens[position], "input": 0, "position": position, "heads": lines, "best": best}
    return document["token"]


def lane(document: dict[str, Any], rule: str, factor: float) -> None:
    """Add a lane of `--what-if` whose heads have their logits multiplied: only what shows is changed."""
    rows = [
        {name: row[name] for name in ("layer", "kind", "head", *SIGNS)}
        | {"peak": row["peak"] * factor, "variance": row["variance"] * factor**2}
        for row in document["heads"]
    ]
    numbers = {"saturated_heads": 7, "effective_keys": 1.25, "peak": max(row["peak"] for row in rows), "logit_std": 9.5}
    document.setdefault("what_if", []).append({"rule": rule, "heads": rows, **numbers})
