"""All experiments on one input, in order; the result of each, and their findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ...health import Finding
from ...health.faults import CHECKS, CheckResult
from ..checks.declared import is_packed
from ..checks.examiner import AttentionChecks
from ..input.model import reason
from .backend import backend
from .cache import cache
from .changes import future, inputs, items, long, padding, permutation
from .chunks import chunks
from .dtype import dtype
from .packed import packed
from .position import position
from .reach import modes, reach
from .relative import relative
from .repeat import repeat
from .runner import Runner
from .subject import CannotRun, NamedBatch
from .trial import ERRORS, Answer, Trial
from .unpadded import unpadded
from .unused import unused

EXPERIMENTS: dict[str, Callable[[Trial], Answer]] = {
    "repeat": repeat,
    "future": future,
    "padding": padding,
    "batch": items,
    "input": inputs,
    "position": position,
    "reach": reach,
    "relative": relative,
    "unpadded": unpadded,
    "packed": packed,
    "cache": cache,
    "chunks": chunks,
    "permutation": permutation,
    "long": long,
    "backend": backend,
    "modes": modes,
    "unused": unused,
    "dtype": dtype,
}
"""In the order in which they run: the worst faults first, because passes are limited."""


def experiments(
    model: nn.Module,
    batch: Any,
    checks: AttentionChecks,
    sizes: set[tuple[int, int]],
    only: tuple[str, ...] = (),
    strict: bool = False,
    progress: Callable[[str], object] = lambda words: None,
    weights: dict[tuple[str, str], Tensor] | None = None,
) -> tuple[list[CheckResult], list[Finding], Runner | None]:
    """Run the experiments on a model in evaluation mode.

    ``sizes`` are (batch, queries) of its self-attention; ``weights`` those of some rows of every layer, for `dtype`.
    """
    names = [name for name, check in CHECKS.items() if check.deep and (not only or name in only)]
    if any(finding.fault == "dropout_in_eval" for finding in checks.findings()):
        random = CannotRun(
            "the model drops weights in evaluation mode, so no two passes are equal", "one that does not"
        )
        return [_skipped(name, random) for name in names], [], None
    try:
        trial = prepared(model, batch, checks, sizes, strict, weights, progress)
    except (CannotRun, *ERRORS) as error:
        return [_skipped(name, error) for name in names], [], None
    joined = CannotRun(
        "the batch is packed: with other tokens its documents would begin elsewhere", "one document for each item"
    )
    results: dict[str, CheckResult] = {}
    findings: list[Finding] = []
    for name, experiment in EXPERIMENTS.items():
        if name not in names:
            continue
        progress(f"experiments: {CHECKS[name].passes}")
        try:
            if trial.unsteady is not None and name != "repeat" and not (name == "dtype" and trial.rough):
                raise trial.unsteady
            if name != "packed" and (checks.packed or is_packed(trial.subject.arguments)):
                raise joined
            answer = experiment(trial)
        except (CannotRun, *ERRORS) as error:
            results[name] = _skipped(name, error)
            continue
        state = "skipped" if answer.skipped else "failed" if answer.findings else "passed"
        results[name] = CheckResult(
            name=name, state=state, deep=True, layers=None, message=answer.message, needs=answer.needs
        )
        findings += answer.findings
        trial.failed += [name] if answer.findings else []
    return [results[name] for name in names], findings, trial.runner


def prepared(
    model: nn.Module,
    batch: Any,
    checks: AttentionChecks,
    sizes: set[tuple[int, int]],
    strict: bool = False,
    weights: dict[tuple[str, str], Tensor] | None = None,
    progress: Callable[[str], object] = lambda words: None,
) -> Trial:
    """A trial after the passes that all experiments share."""
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose graphs are of one shape
    subject = NamedBatch.of(model, batch, sizes, checks.causal_lengths)
    order = [name for name, kind in checks.layers if kind == "self"]
    lengths = sorted({length for _, length in sizes})
    runner = Runner(model, [name for name, _ in checks.layers])
    trial = Trial(subject, runner, checks, order, lengths, strict=strict)
    trial.weights = weights or {}
    progress("experiments: the batch as it is")
    trial.prepare()
    return trial


def _skipped(name: str, error: Exception) -> CheckResult:
    if isinstance(error, CannotRun):
        message, needs = str(error), error.needs
    else:
        message = f"could not be run: {reason(error, 120)}"
        needs = None if name == "dtype" else "a batch for which the model does not raise this"
    return CheckResult(name=name, state="skipped", deep=True, layers=None, message=message, needs=needs)
