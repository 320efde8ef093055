"""Compute: the kernel of a call, wrapped where documents or a sink ask for more than kernels know."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from ... import kernels
from ...kernels.contract import KEEP_LAYOUT, OUTPUT_LOW_BIT, Gradients, NeedsGrad, Problem, Results, Upstream, gathered
from ...vitals import HALVES
from . import documents, sink


def kernel_of(problem: Problem, name: str) -> ModuleType | WithParts:
    """The kernel of this name, as this problem needs it."""
    return kernels.load(name) if problem.documents is problem.sink is None else WithParts(name)


class WithParts:
    """Runs a kernel on one document after another, and adds a sink to the results."""

    def __init__(self, name: str) -> None:
        self.kernel, self.keeps_layout = kernels.load(name), name in KEEP_LAYOUT

    def forward(self, problem: Problem, sign_bits: int, saved: bool = False) -> tuple[Tensor | None, Results]:
        bits = sign_bits
        if problem.sink is not None:
            saved = True
            if problem.query.dtype in HALVES:
                bits |= OUTPUT_LOW_BIT
        if problem.documents is None:
            results = gathered(*self.kernel.forward(problem, bits, saved))
        else:
            results = documents.forward(self.kernel, problem, bits, saved, as_query=self.keeps_layout)
        if problem.sink is not None:
            results = sink.fold(results, problem.sink, sign_bits)
        return results.output, results._replace(output=None)  # type: ignore[arg-type]

    def backward(self, problem: Problem, saved: Results, upstream: Upstream, needs_grad: NeedsGrad) -> Gradients:
        if problem.documents is None:
            gradients: Gradients = self.kernel.backward(problem, saved, upstream, needs_grad)
        else:
            gradients = documents.backward(
                self.kernel, problem, saved, upstream, needs_grad, as_input=self.keeps_layout
            )
        if problem.sink is None or not needs_grad.sink:
            return gradients
        return gradients._replace(sink=sink.gradient(problem.sink, saved, upstream))
