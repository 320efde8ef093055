"""candidates: what is measured, and one call of each, forward alone or forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attemper import Attended, Vitals, attention, kernels
from attemper.errors import InputError
from attemper.extension.tools import nearest

from . import eager

CANDIDATES = {
    "attemper": "attemper, all vitals",
    "attemper_bare": "attemper, no vitals",
    "sdpa": "torch SDPA",
    "eager": "eager",
    "eager_statistics": "eager, same statistics",
}
"""Candidates: name in JSON → name in tables."""

DIRECTIONS = {"forward": "forward", "forward_backward": "forward + backward"}
DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """One case to measure: attention over keys of shape (B, H, L, E), random normal, with `rows` queries, or L if 0."""

    shape: tuple[int, int, int, int]
    causal: bool
    direction: str = "forward"
    dtype: str = "float32"
    device: str = "cpu"
    kernel: str = "auto"
    rows: int = 0

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        shape = ", ".join(map(str, self.shape)) + (f"; {self.rows} query" if self.rows else "")
        return f"({shape}) {mask}, {self.dtype} on {self.device}, {DIRECTIONS[self.direction]}"

    @property
    def flops(self) -> float:
        """Operations no method avoids: two products forward, four backward; half of each when causal."""
        batch, heads, length, head_dim = self.shape
        products = 2 if self.direction == "forward" else 6
        return products * 2.0 * batch * heads * (self.rows or length) * length * head_dim / (2 if self.causal else 1)

    def tensors(self) -> Tensors:
        return Tensors(self)


class Tensors:
    """The inputs of a case, and the gradients that arrive from the loss when there is a backward."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator().manual_seed(0)
        self.case, self.backward = case, case.direction == "forward_backward"

        def normal(*shape: int) -> Tensor:
            # one tensor at a time, in its own dtype: what memory.py counts must not hide in scratch left behind
            tensor = torch.empty(shape, dtype=getattr(torch, case.dtype), device="cpu").normal_(generator=generator)
            return tensor.to(case.device)

        batch, heads, length, head_dim = case.shape
        query_shape = (batch, heads, case.rows or length, head_dim)
        self.inputs = tuple(
            normal(*shape).requires_grad_(self.backward) for shape in (query_shape, case.shape, case.shape)
        )
        self.g_output = normal(*query_shape) if self.backward else None
        # an entropy bonus, as a loss would have it: the same small weight on every row
        wide = torch.promote_types(getattr(torch, case.dtype), torch.float32)
        self.g_entropy = torch.full(query_shape[:3], -0.01, dtype=wide, device=case.device) if self.backward else None

    def kernel(self, candidate: str) -> str | None:
        """Which of our kernels runs this case; None for the candidates that are not ours."""
        if not candidate.startswith("attemper"):
            return None
        verdicts = kernels.why(*self.inputs, causal=self.case.causal, kernel=self.case.kernel)
        return next(verdict.kernel for verdict in verdicts if verdict.taken)


def call(name: str, tensors: Tensors) -> Callable[[], tuple[Tensor, ...]]:
    """A function that runs a candidate on a case and returns its output, its signs and its gradients."""
    if name not in CANDIDATES:
        raise InputError(f"bench: unknown candidate {name!r}. {nearest(name, CANDIDATES)}")

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return _results(_attend(name, tensors))

    def forward_backward() -> tuple[Tensor, ...]:
        attended = _attend(name, tensors)
        ends, upstream = [attended.output], [tensors.g_output]
        if "entropy" in attended.vitals.measured:
            ends.append(attended.vitals.entropy)
            upstream.append(tensors.g_entropy)
        gradients = torch.autograd.grad(ends, tensors.inputs, upstream)
        return (*_results(attended), *gradients)

    return forward_backward if tensors.backward else forward


def _attend(name: str, tensors: Tensors) -> Attended:
    (query, key, value), case = tensors.inputs, tensors.case
    match name:
        case "attemper":
            return attention(query, key, value, causal=case.causal, kernel=case.kernel)
        case "attemper_bare":
            return attention(query, key, value, causal=case.causal, kernel=case.kernel, signs=())
        case "sdpa":
            return Attended(scaled_dot_product_attention(query, key, value, is_causal=case.causal), Vitals())
        case "eager":
            return Attended(eager.attention(query, key, value, causal=case.causal), Vitals())
        case _:
            return eager.with_statistics(query, key, value, causal=case.causal)


def _results(attended: Attended) -> tuple[Tensor, ...]:
    vitals = attended.vitals
    return (attended.output, *(getattr(vitals, name) for name in vitals.measured))
