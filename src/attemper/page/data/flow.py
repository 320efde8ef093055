"""read_flow(): one head of a real model on a text, from what its layer is given to what it returns, with the matrices between.

Q, K, V and the logits are those of the model's own call. Its projections are found by what they compute: a linear layer some of
whose output columns are the head's q. Where something stands between them (a rotation, a norm), the matrix is left out, with why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...scan.input.batch import Input, call, make
from ...scan.input.model import Loaded
from ...scan.run import evaluating
from ...vitals import Vitals
from ...watch.examine import AttentionCall, examine
from .heads import KeptLogits, LayerLogits, packed

TOKENS = 128
"""A flow is drawn of at most so many tokens."""
COLUMNS = 16
"""Columns of a projection that are drawn, and therefore sent."""
SAME = 1e-2
"""Relative error up to which the input of a layer is the heads' context: above the rounding of half precision."""


class LinearCall(NamedTuple):
    """What a linear layer was given and returned, without the batch, and its matrix as it multiplies from the right."""

    given: Tensor  # (n, in)
    output: Tensor  # (n, out)
    matrix: Tensor  # (in, out)
    bias: Tensor | None


class KeptVectors(KeptLogits):
    """The examiner that also keeps q, k and v of one layer."""

    def __init__(self, one: Input, layer: int) -> None:
        super().__init__(one)
        self.layer = layer
        self.vectors: tuple[Tensor, Tensor, Tensor] | None = None
        self.scale: float | None = None
        self.name = ""

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> tuple[Tensor, bool] | None:
        if call.facts.queries > TOKENS:
            raise InputError(
                f"page: the flow shows at most {TOKENS} tokens; this text has {call.facts.queries}. Type a shorter one."
            )
        return super().look(call, vitals, rows)

    def keep(self, name: str, call: AttentionCall, found: tuple[Tensor, bool] | None) -> None:
        before = len(self.layers)
        super().keep(name, call, found)
        if len(self.layers) == before + 1 and before == self.layer and call.value is not None:
            query, key = call.query, call.key.transpose(-1, -2) if call.product else call.key
            if query.dim() == 4 and key.dim() == 4 and not call.flipped:
                parts = (query[0], key[0], call.value.reshape(-1, *call.value.shape[-2:])[: key.shape[1]])
                self.vectors = tuple(part.detach().float().cpu().clone() for part in parts)  # type: ignore[assignment]
            self.name, self.scale = name, call.facts.scale


def read_flow(model: Loaded, text: str, layer: int, head: int) -> dict[str, Any]:
    """Everything between the input and the output of one attention layer, for one of its heads.

    Args:
        model: as :func:`attemper.scan.input.model.load` returns it.
        text: what it reads, at most 128 tokens.
        layer: the place of the layer in the order in which they run, from 0.
        head: the head, from 0.
    """
    (one,) = make(model, texts=[text])
    kept = KeptVectors(one, layer)
    with evaluating(model.model), examine(model.model, [kept], caller="page"):
        call(model.model, one.batch)
    layers = list(kept.layers.values())
    if not 0 <= layer < len(layers):
        raise InputError(f"page: `layer` must be from 0 to {len(layers) - 1}; got {layer}.")
    if not 0 <= head < len(layers[layer].logits):
        raise InputError(f"page: `head` must be from 0 to {len(layers[layer].logits) - 1}; got {head}.")
    if layers[layer].kind == "cross":
        raise InputError(
            f"page: the flow shows self-attention, and layer {layer} ({layers[layer].layer}) is cross-attention. "
            "Choose another layer."
        )
    if kept.vectors is None:
        raise InputError(f"page: the values of {layers[layer].layer} were not seen, so its flow cannot be drawn.")
    with evaluating(model.model), _recorded(model.model, kept.name) as calls:
        call(model.model, one.batch)
    length = layers[layer].logits.shape[1]
    known = one.tokens is not None and len(one.tokens) == length  # a decoder has other tokens
    return {
        "model": model.name,
        "text": text,
        "tokens": one.tokens if known else [f"#{place}" for place in range(length)],
        "special": one.special if known and one.special else [False] * length,
        "layer": layer,
        "layers": len(layers),
        "head": head,
        **_parts(layers[layer], kept.vectors, kept.scale, calls, head),
    }


def _parts(
    found: LayerLogits, vectors: tuple[Tensor, Tensor, Tensor], scale: float | None, calls: list[LinearCall], head: int
) -> dict[str, Any]:
    query, key, value = vectors
    heads, groups = len(query), len(query) // len(key)
    own = {"Q": query[head], "K": key[head // groups], "V": value[head // groups]}
    made = {name: _made(part, calls) for name, part in own.items()}
    given = next((one[0].given for one in made.values() if one is not None), None)
    weights = found.logits.softmax(-1).nan_to_num(0.0)
    context = torch.cat([weights[one] @ value[one // groups] for one in range(heads)], -1)
    last = _takes(context, calls)
    return {
        "name": found.layer,
        "kind": found.kind,
        "heads": heads,
        "key_heads": len(key),
        "d_model": None if given is None else given.shape[1],
        "d_k": query.shape[-1],
        "d_v": value.shape[-1],
        "scale": scale,
        "plain": found.plain,
        "X": None if given is None else _matrix(given),
        "Q": _matrix(query),
        "K": _matrix(key),
        "V": _matrix(value),
        "logits": _matrix(found.logits),
        **{f"W_{name}": None if one is None else _projection(one[0], one[1], own[name]) for name, one in made.items()},
        "without": _without([name for name, one in made.items() if one is None]),
        "W_O": None if last is None else _projection(last, 0, last.output),
        "Y": None if last is None else _matrix(last.output),
    }


def _without(names: list[str]) -> str | None:
    if not names:
        return None
    return (
        f"The model computes {', '.join(names)} by more than one matrix (a rotation by position, a norm, a factor), "
        "so no single projection is shown for it."
    )


def _matrix(part: Tensor) -> dict[str, Any]:
    return {"shape": list(part.shape), "data": packed(part.numpy())}


def _projection(one: LinearCall, first: int, part: Tensor) -> dict[str, Any]:
    """The first columns of a matrix that make a head's vectors, and its bias there."""
    wide = part.shape[-1]
    shown = slice(first, first + min(COLUMNS, wide))
    return {
        "shape": [one.matrix.shape[0], wide],
        "columns": min(COLUMNS, wide),
        "data": packed(one.matrix[:, shown].contiguous().numpy()),
        "bias": None if one.bias is None else packed(one.bias[shown].numpy()),
    }


def _made(part: Tensor, calls: list[LinearCall]) -> tuple[LinearCall, int] | None:
    """The linear layer some of whose columns are a head's vectors, (n, E), and the first of them; None: there is none."""
    wide = part.shape[-1]
    for one in calls:
        if len(one.output) != len(part):
            continue
        for first in range(0, one.output.shape[1] - wide + 1, wide):
            if torch.equal(one.output[:, first : first + wide], part):
                return one, first
    return None


def _takes(context: Tensor, calls: list[LinearCall]) -> LinearCall | None:
    """The linear layer that is given the heads side by side."""
    size = context.norm()
    for one in calls:
        if one.given.shape == context.shape and (one.given - context).norm() <= SAME * size:
            return one
    return None


@contextmanager
def _recorded(model: nn.Module, layer: str) -> Iterator[list[LinearCall]]:
    """The calls of the linear layers beside and inside a layer, by its name."""
    inside = layer.rpartition(".")[0]
    calls: list[LinearCall] = []

    def record(module: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        matrix, bias = module.weight, getattr(module, "bias", None)
        if not (given and isinstance(given[0], Tensor) and isinstance(output, Tensor) and isinstance(matrix, Tensor)):
            return
        turned = matrix.T if isinstance(module, nn.Linear) else matrix  # GPT-2's Conv1D multiplies from the right
        bias = bias.detach().float().cpu() if isinstance(bias, Tensor) else None
        calls.append(LinearCall(_rows(given[0]), _rows(output), _rows(turned), bias))

    hooks = [
        module.register_forward_hook(record)
        for name, module in model.named_modules()
        if (not inside or name.startswith(f"{inside}.")) and _is_linear(module)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(module, nn.Linear) or (
        type(module).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.dim() == 2
    )


def _rows(part: Tensor) -> Tensor:
    """As float32, without the batch."""
    return part.detach().float().cpu().flatten(0, -2)
