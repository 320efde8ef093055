"""read_flow(): one head of a real model on a text, from what its layer is given to what it returns, with the matrices between.

Q, K, V and the logits are those of the model's own call. A projection is found by what it computes: it is the linear layer with
the head's q among its output columns. Where something stands between the two (a rotation, a norm), the matrix is left out, and
a sentence says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attemper import Vitals
from attemper.errors import InputError
from attemper.extension.calls import AttentionCall, examine
from attemper.extension.inputs import Input, Loaded, call, evaluating, make

from .heads import KeptLogits, LayerLogits, checked_head, packed

TOKENS = 128
"""The most tokens of which a flow is drawn."""
COLUMNS = 16
"""Columns of a projection that are drawn, and therefore sent."""
SAME = 1e-2
"""Relative error up to which the input of a linear layer is the heads' context: above the rounding of half precision."""


class LinearCall(NamedTuple):
    """A call of a linear layer, without the batch, and the layer's matrix as it multiplies from the right."""

    given: Tensor  # (n, in)
    output: Tensor  # (n, out)
    matrix: Tensor  # (in, out)
    bias: Tensor | None


class KeptVectors(KeptLogits):
    """The examiner that also keeps q, k and v of one layer."""

    def __init__(self, text: Input, layer: int) -> None:
        super().__init__(text)
        self.layer = layer
        self.vectors: dict[str, Tensor] | None = None
        self.scale: float | None = None
        self.name = ""

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> tuple[Tensor, bool] | None:
        if call.info.queries > TOKENS:
            raise InputError(
                f"page: the flow shows at most {TOKENS} tokens; this text has {call.info.queries}. Type a shorter one."
            )
        return super().look(call, vitals, rows)

    def keep(self, name: str, call: AttentionCall, result: tuple[Tensor, bool] | None) -> None:
        before = len(self.layers)
        super().keep(name, call, result)
        if len(self.layers) == before + 1 and before == self.layer and call.value is not None:
            query, key = call.query, call.key.transpose(-1, -2) if call.product else call.key
            if query.dim() == 4 and key.dim() == 4 and not call.flipped:
                value = call.value.reshape(-1, *call.value.shape[-2:])[: key.shape[1]]
                parts = {"Q": query[0], "K": key[0], "V": value}
                self.vectors = {letter: part.detach().float().cpu().clone() for letter, part in parts.items()}
            self.name, self.scale = name, call.info.scale


def read_flow(model: Loaded, text: str, layer: int, head: int) -> dict[str, Any]:
    """Everything between the input and the output of one attention layer, for one of its heads.

    Args:
        model: as :func:`attemper.extension.inputs.load` returns it.
        text: what it reads, at most 128 tokens.
        layer: the number of the layer in the order in which they run, from 0.
        head: the head, from 0.
    """
    (given,) = make(model, texts=[text])
    vectors_examiner = KeptVectors(given, layer)
    with evaluating(model.model), examine(model.model, [vectors_examiner], caller="page"):
        call(model.model, given.batch)
    layers = list(vectors_examiner.layers.values())
    checked_head(layers, layer, head)
    drawn = layers[layer]
    if drawn.kind == "cross":
        raise InputError(
            f"page: the flow shows self-attention, and layer {layer} ({drawn.layer}) is cross-attention. "
            "Choose another layer."
        )
    if vectors_examiner.vectors is None:
        raise InputError(f"page: the values of {drawn.layer} were not seen, so its flow cannot be drawn.")
    with evaluating(model.model), _recorded(model.model, vectors_examiner.name) as calls:
        call(model.model, given.batch)
    length = drawn.logits.shape[1]
    known = given.tokens is not None and len(given.tokens) == length  # a decoder has other tokens
    return {
        "model": model.name,
        "text": text,
        "tokens": given.tokens if known else [f"#{index}" for index in range(length)],
        "special": given.special if known and given.special else [False] * length,
        "layer": layer,
        "layers": len(layers),
        "head": head,
        "name": drawn.layer,
        "kind": drawn.kind,
        "scale": vectors_examiner.scale,
        "plain": drawn.plain,
        "logits": _matrix(drawn.logits),
        **_vectors(drawn, vectors_examiner.vectors, calls, head),
    }


def _vectors(drawn: LayerLogits, vectors: dict[str, Tensor], calls: list[LinearCall], head: int) -> dict[str, Any]:
    """Queries, keys and values of all heads, the matrices that make those of one, and what becomes of the values."""
    query, key, value = vectors.values()
    heads, groups = len(query), len(query) // len(key)
    own = {"Q": query[head], "K": key[head // groups], "V": value[head // groups]}
    sources = {name: _source(part, calls) for name, part in own.items()}
    given = next((source[0].given for source in sources.values() if source is not None), None)
    weights = drawn.logits.softmax(-1).nan_to_num(0.0)
    context = torch.cat([weights[each] @ value[each // groups] for each in range(heads)], -1)
    last = _reader(context, calls)
    missing = ", ".join(name for name, source in sources.items() if source is None)
    without = (
        f"The model computes {missing} by more than one matrix (a rotation by position, a norm, a factor), "
        "so no single projection is shown for it."
    )
    return {
        "heads": heads,
        "key_heads": len(key),
        "d_model": None if given is None else given.shape[1],
        "d_k": query.shape[-1],
        "d_v": value.shape[-1],
        "X": None if given is None else _matrix(given),
        **{name: _matrix(part) for name, part in vectors.items()},
        **{f"W_{name}": source and _projection(*source, own[name]) for name, source in sources.items()},
        "without": without if missing else None,
        "W_O": last and _projection(last, 0, last.output),
        "Y": last and _matrix(last.output),
    }


def _matrix(part: Tensor) -> dict[str, Any]:
    return {"shape": list(part.shape), "data": packed(part.numpy())}


def _projection(layer: LinearCall, first: int, part: Tensor) -> dict[str, Any]:
    """The columns of a matrix that make a head's vectors, up to COLUMNS of them, and their bias."""
    wide = part.shape[-1]
    columns = min(COLUMNS, wide)
    shown = slice(first, first + columns)
    return {
        "shape": [layer.matrix.shape[0], wide],
        "columns": columns,
        "data": packed(layer.matrix[:, shown].contiguous().numpy()),
        "bias": None if layer.bias is None else packed(layer.bias[shown].numpy()),
    }


def _source(part: Tensor, calls: list[LinearCall]) -> tuple[LinearCall, int] | None:
    """The linear layer with a head's vectors, (n, E), among its output columns, and the first of these columns."""
    wide = part.shape[-1]
    for layer in calls:
        if len(layer.output) != len(part):
            continue
        for first in range(0, layer.output.shape[1] - wide + 1, wide):
            if torch.equal(layer.output[:, first : first + wide], part):
                return layer, first
    return None


def _reader(context: Tensor, calls: list[LinearCall]) -> LinearCall | None:
    """The linear layer whose input is the heads side by side."""
    size = context.norm()
    for layer in calls:
        if layer.given.shape == context.shape and (layer.given - context).norm() <= SAME * size:
            return layer
    return None


@contextmanager
def _recorded(model: nn.Module, layer: str) -> Iterator[list[LinearCall]]:
    """The calls of the linear layers beside and inside the layer of this name."""
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
