"""A second logger of attention, which shares no code with attemper: from the full matrix of logits, in float64.

It takes the place of torch's softmax and SDPA wherever a module holds them, so that it sees them however they were imported.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

HIDES = -9000.0  # a logit as low as this is that of a hidden key: the models here have none between -1000 and -1e4
SIGNS = ("visible", "mean", "variance", "peak", "lse", "entropy", "sum_p2")


@dataclass
class Head:
    """The sums of one head over its rows, its largest logit, and the size of the terms that were added up."""

    rows: int = 0
    keys: int = 0
    peak: float = -math.inf
    bare: float = -math.inf  # the largest scale·q·k, without what a mask adds
    size: float = 0.0
    rows_of_calls: tuple[Tensor, ...] = ()  # their logits, call by call
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SIGNS, 0.0))

    def add(self, logits: Tensor, bare: Tensor, size: float) -> None:
        """Rows ``(N, K)``; those that see no key are left out."""
        hidden = logits <= HIDES
        self.rows_of_calls += (logits,)
        some = ~hidden.all(-1)
        logits, bare, hidden = logits[some], bare[some], hidden[some]
        if not logits.numel():
            return
        visible = (~hidden).sum(-1).double()
        seen = logits.masked_fill(hidden, 0.0)
        mean = seen.sum(-1) / visible
        apart = (seen - mean[:, None]).square().masked_fill(hidden, 0.0)
        lse = logits.logsumexp(-1)
        weights = (logits - lse[:, None]).exp()
        signs = {
            "visible": visible,
            "mean": mean,
            "variance": apart.sum(-1) / visible,
            "peak": logits.amax(-1),
            "lse": lse,
            "entropy": -torch.special.xlogy(weights, weights).sum(-1),
            "sum_p2": weights.square().sum(-1),
        }
        self.rows += len(logits)
        self.keys = max(self.keys, logits.shape[-1])
        self.peak = max(self.peak, signs["peak"].max().item())
        self.bare = max(self.bare, bare.masked_fill(hidden, -math.inf).max().item())
        self.size = max(self.size, size, seen.abs().max().item())
        for name, values in signs.items():
            self.sums[name] += values.sum().item()

    def join(self, other: Head) -> Head:
        """Both, added up."""
        sums = {name: value + other.sums[name] for name, value in self.sums.items()}
        largest = (max(getattr(self, name), getattr(other, name)) for name in ("keys", "peak", "bare", "size"))
        return Head(self.rows + other.rows, *largest, self.rows_of_calls + other.rows_of_calls, sums)

    @property
    def biased(self) -> bool:
        """Whether something was seen being added to scale·q·k: SDPA alone shows it."""
        return self.bare != self.peak

    def scores(self, scaled: Head, factor: float) -> float:
        """The largest of what a factor multiplied on the way to other logits of the same rows, whose rest is the same."""
        parts = [
            ((one - other) / (1 - factor))[one > HIDES]
            for one, other in zip(self.rows_of_calls, scaled.rows_of_calls, strict=True)
        ]
        return torch.cat(parts).max().item()

    def sign(self, name: str) -> float:
        return self.peak if name == "peak" else self.sums[name] / self.rows


@dataclass
class Call:
    """One call of attention: the modules that were running, outermost first, and its heads."""

    modules: tuple[str, ...]
    heads: list[Head]


class Logger:
    """Logs the attention of one model. ``with logger.installed():`` around building it, ``with logger.of(model):`` around a pass.

    `heads` is their number, or one for each pattern of names; `other` is a pattern of modules whose softmax is no attention;
    `shifted` models subtract the largest of each row before they call the softmax.
    """

    def __init__(self, heads: int | Mapping[str, int], other: str | None, shifted: bool) -> None:
        self.heads = heads if isinstance(heads, Mapping) else {"": heads}
        self.other, self.shifted = other, shifted
        self.shift: Tensor | None = None  # the last maximum of rows that was taken
        self.calls: list[Call] = []
        self.stack: list[str] = []
        self.logging = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Every softmax and SDPA that a module of Python holds is the logger's."""
        softmax, attention = (F.softmax, torch.softmax, torch.special.softmax), F.scaled_dot_product_attention
        mine = {id(one): self._softmax(one) for one in softmax} | {id(attention): self._attention(attention)}
        changed = [
            (module, name, value)
            for module in list(sys.modules.values())
            for name, value in list(getattr(module, "__dict__", {}).items())
            if id(value) in mine
        ]
        method, amax = torch.Tensor.softmax, torch.Tensor.amax
        for module, name, value in changed:
            setattr(module, name, mine[id(value)])
        torch.Tensor.softmax = self._softmax(method)

        def largest(*args: Any, **kwargs: Any) -> Tensor:
            self.shift = amax(*args, **kwargs)
            return self.shift

        if self.shifted:
            torch.Tensor.amax = largest
        try:
            yield
        finally:
            torch.Tensor.softmax, torch.Tensor.amax = method, amax
            for module, name, value in changed:
                setattr(module, name, value)

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[list[Call]]:
        """Log a pass of this model; returns its calls."""
        names = {id(module): name for name, module in model.named_modules()}
        self.calls, self.stack = [], []

        def enter(module: nn.Module, _: Any) -> None:
            self.stack.append(names.get(id(module), self.stack[-1] if self.stack else ""))

        def leave(*_: Any) -> None:
            self.stack.pop()

        handles = (register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True))
        self.logging = True
        try:
            yield self.calls
        finally:
            self.logging = False
            for handle in handles:
                handle.remove()

    def _softmax(self, function: Any) -> Any:
        def softmax(input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A002 (torch's name)
            if self.logging and input.dim() > 2 and dim is not None:
                with self._inside():
                    logits = input.detach().double().movedim(dim, -1)
                    if self.shift is not None:
                        logits, self.shift = logits + self.shift.detach().double(), None
                    self._add(logits, logits)
                    return function(input, dim, *args, **kwargs)
            return function(input, dim, *args, **kwargs)

        return softmax

    def _attention(self, function: Any) -> Any:
        def scaled_dot_product_attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            given = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            if not self.logging:
                return function(query, key, value, attn_mask, **given)
            with self._inside():
                self._log_product(query.detach().double(), key.detach().double(), attn_mask, is_causal, scale)
                return function(query, key, value, attn_mask, **given)

        return scaled_dot_product_attention

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """torch's own softmax may call another of those that were replaced."""
        self.logging = False
        try:
            yield
        finally:
            self.logging = True

    def _log_product(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> None:
        if q.dim() > 3 and k.shape[-3] != q.shape[-3]:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        bare = q @ k.mT * scale
        logits = bare
        if causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
        if mask is not None:
            mask = mask.detach()
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask.double()
        size = scale * q.square().sum(-1).max().sqrt().item() * k.square().sum(-1).max().sqrt().item()
        self._add(logits, bare, size)

    def _add(self, logits: Tensor, bare: Tensor, size: float = 0.0) -> None:
        modules = tuple(self.stack)
        if self.other is not None and any(re.search(self.other, name) for name in modules):
            return
        heads = next(
            count for pattern, count in self.heads.items() if any(re.search(pattern, name) for name in modules)
        )
        found = [Head() for _ in range(heads)]
        for head, one, alone in zip(found, self._by_head(logits, heads), self._by_head(bare, heads), strict=True):
            head.add(one.flatten(0, -2), alone.flatten(0, -2), size)
        self.calls.append(Call(modules, found))

    def _by_head(self, logits: Tensor, heads: int) -> Tensor:
        """``(…, K)`` as ``(H, …, K)``: the dimension that has as many entries as heads, or the one of batches and heads."""
        sizes = list(logits.shape[:-1])
        if heads in sizes:
            assert sizes.count(heads) == 1, f"which of {tuple(logits.shape)} are the {heads} heads?"
            return logits.movedim(sizes.index(heads), 0)
        assert sizes[0] % heads == 0, f"no {heads} heads in {tuple(logits.shape)}"
        return logits.unflatten(0, (-1, heads)).movedim(1, 0)
