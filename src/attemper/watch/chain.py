"""The route through hand-written attention: a product q·kᵀ, then scale, mask and bias, a softmax, and a product with values.

A softmax over anything else (a router, a vocabulary) is not attention: only one whose input comes from a product of two
activations, and whose output is multiplied with a third, is counted. Vitals are taken from the model's own logits when
the softmax runs, and kept only if the last product follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from .call import Call, Facts
from .running import Frame, heads_of, kind_of, projects, running
from .storages import Storages

# by the name in the op's schema, without the underscore of the in-place form
PRODUCTS = {"bmm": (0, 1), "mm": (0, 1), "matmul": (0, 1), "baddbmm": (1, 2)}
SOFTMAXES = {"_softmax", "_safe_softmax", "softmax"}
SCALINGS = {"mul", "div"}
RESHAPING = {"_unsafe_view", "reshape"}  # where they copy; a view shares its storage and needs no following
KEEPING = {  # entry by entry the same matrix: its logits stay logits, its weights stay weights
    *SCALINGS,
    *(
        "add",
        "sub",
        "neg",
        "tanh",
        "masked_fill",
        "where",
        "clamp",
        "clamp_min",
        "maximum",
        "minimum",
        "max",
        "nan_to_num",
    ),
    *("_to_copy", "to", "clone", "copy", "contiguous", "native_dropout", "dropout", "feature_dropout", "cat", "expand"),
    *RESHAPING,
}


@dataclass(frozen=True)
class Scores:
    """A matrix that began as q·kᵀ, and what was done to it since."""

    query: Tensor  # the left factor, (..., Lq, E)
    key: Tensor  # the right factor, (..., E, Lk)
    frames: tuple[Frame, ...]
    scale: float | None = 1.0
    capped: bool = False
    cap: float | None = None
    masked: bool = False


Count = Callable[[tuple[Frame, ...]], None]
"""Counts a call that waits for its values, once they come; it is given the modules around that product."""


class Chain:
    """Follows matrices through the ops of one pass, by storage."""

    def __init__(self, parameters: Storages[bool], hear: Callable[[Call], Count]) -> None:
        self.parameters = parameters
        self.hear = hear
        self.scores: Storages[Scores] = Storages()
        self.weights: Storages[Count] = Storages()
        self.cast: Storages[bool] = Storages()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Look at one op that has just run."""
        name = op_name(func)
        if name in PRODUCTS:
            self._product(name, args, kwargs, out)
        elif name == "_to_copy" and self._is_parameter(args[0]):
            self.cast.put(out, True)  # autocast's copy of a weight is a weight
        elif not self.scores and not self.weights:
            return
        elif name in SOFTMAXES:
            self._softmax(args, out)
        elif name in KEEPING:
            self._keep(name, args, out)

    def _product(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        left, right = (args[place] for place in PRODUCTS[name])
        if self.weights:
            waiting = self.weights.get(left) or self.weights.get(right)
            if waiting is not None:
                waiting(tuple(running.frames))
                self.weights.drop(left)
                self.weights.drop(right)
                return
        # a factor that is a parameter makes it a linear layer; a learned query on the left is a query
        if self._is_parameter(right) or (running.frames and projects(running.frames[-1].module)):
            return
        if left.dim() < 2 or right.dim() < 2 or not out.is_floating_point():
            return
        self.scores.drop_freed()
        self.weights.drop_freed()
        scale = float(kwargs.get("alpha", 1.0)) if name == "baddbmm" else 1.0
        self.scores.put(out, Scores(left, right, tuple(running.frames), scale, masked=name == "baddbmm"))

    def _is_parameter(self, tensor: Tensor) -> bool:
        return bool(self.parameters.get(tensor) or self.cast.get(tensor))

    def _keep(self, name: str, args: tuple[Any, ...], out: Any) -> None:
        result = out[0] if isinstance(out, (tuple, list)) else out
        parts = args[0] if isinstance(args[0], (tuple, list)) else args
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if name == "copy":
            tensors = tensors[1:]
        for tensor in tensors:
            weights = self.weights.get(tensor)
            if weights is not None and (result.shape[-1] == tensor.shape[-1] or name in RESHAPING):
                self.weights.put(result, weights)
                return
            scores = self.scores.get(tensor)
            if scores is not None and result.shape[-2:].numel() >= tensor.shape[-2:].numel():
                self.scores.put(result, _after(name, scores, args))
                return

    def _softmax(self, args: tuple[Any, ...], out: Tensor) -> None:
        logits, dim = args[0], args[1]
        scores = self.scores.get(logits)
        if scores is None or dim % logits.dim() != logits.dim() - 1:
            return
        frames = tuple(shared(scores.frames, tuple(running.frames)))
        call = _call(scores, logits, frames)
        if call is not None:
            self.weights.put(out, self.hear(call))


def shared(first: tuple[Frame, ...], second: tuple[Frame, ...]) -> list[Frame]:
    """The modules around both; never none, since the outermost is around everything."""
    return [a for a, b in zip(first, second, strict=False) if a is b]


def _after(name: str, scores: Scores, args: tuple[Any, ...]) -> Scores:
    """What is known of scores after one more step."""
    if name == "tanh":
        return replace(scores, capped=True)
    if name not in SCALINGS:
        masking = name in ("add", "sub", "masked_fill", "where", "cat")
        return replace(scores, masked=scores.masked or masking)
    factor = args[1] if len(args) > 1 else None
    if isinstance(factor, Tensor):
        # reading a number off another device would wait for it
        factor = factor.item() if factor.dim() == 0 and factor.device.type == "cpu" else None
    if not isinstance(factor, (int, float)) or scores.scale is None or factor == 0:
        return replace(scores, scale=None)
    factor = factor if name == "mul" else 1 / factor
    cap = float(factor) if scores.capped and scores.cap is None else scores.cap
    return replace(scores, scale=scores.scale * factor, cap=cap)


def _call(scores: Scores, logits: Tensor, frames: tuple[Frame, ...]) -> Call | None:
    if logits.dim() < 2 or not logits.numel() or logits.is_meta or type(logits) is not Tensor:
        return None
    rows, keys = logits.shape[-2:]
    if logits.dim() == 2:
        batch, heads = 1, 1
    elif logits.dim() == 3:
        heads = heads_of(frames, logits.shape[0])
        batch = logits.shape[0] // heads
    else:
        # (B, G, R, Lq, Lk) is grouped heads, (B, T, H, Lq, Lk) is not: only the module can tell
        inner = logits.shape[1:-2].numel()
        heads = inner if heads_of(frames, inner) == inner else logits.shape[-3]
        batch = logits.shape[:-2].numel() // heads
    matrix = logits.reshape(batch, heads, rows, keys)
    facts = Facts(
        route="hand-written",
        kind=kind_of(frames, scores.query, scores.key, (rows, keys)),
        dtype=str(scores.query.dtype).removeprefix("torch."),
        batch=batch,
        heads=heads,
        kv_heads=heads,
        head_dim=scores.query.shape[-1],
        queries=rows,
        keys=keys,
        scale=scores.scale,
        causal=False,
        masked=scores.masked,
        softcap=scores.cap if scores.capped else None,
    )
    return Call(facts, frames, scores.query, scores.key, logits=matrix)


@cache
def op_name(func: Any) -> str:
    """``aten::masked_fill_`` → ``masked_fill``."""
    name: str = func._schema.name.removeprefix("aten::")
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name
