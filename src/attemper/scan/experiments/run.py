"""All experiments on one input, in order; the result of each, and their findings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from ...health import Finding
from ...health.faults import CHECKS, CheckResult
from ...watch.examine import examine
from ..checks.examiner import AttentionChecks
from ..checks.padding import is_packed, named_arguments
from ..input.model import reason
from .cache import cache
from .dtype import RowWeights, dtype
from .future import future
from .items import items
from .long import long
from .padding import padding
from .permutation import permutation
from .position import position
from .runner import Runner
from .subject import CannotRun, NamedBatch
from .trial import ERRORS, Answer, Trial

EXPERIMENTS: dict[str, Callable[[Trial], Answer]] = {
    "future": future,
    "padding": padding,
    "batch": items,
    "position": position,
    "cache": cache,
    "permutation": permutation,
    "long": long,
    "dtype": dtype,
}
"""In the order in which they run: those that find the worst faults first, as passes are limited."""


def experiments(
    model: nn.Module,
    batch: Any,
    checks: AttentionChecks,
    sizes: set[tuple[int, int]],
    only: tuple[str, ...] = (),
    strict: bool = False,
    progress: Callable[[str], object] = lambda words: None,
) -> tuple[list[CheckResult], list[Finding], Runner | None]:
    """Run the experiments on a model in evaluation mode. ``sizes`` are (batch, queries) of its self-attention."""
    names = [name for name, check in CHECKS.items() if check.deep and (not only or name in only)]
    order = [name for name, kind in checks.layers if kind == "self"]
    if any(one.fault == "dropout_in_eval" for one in checks.findings()):
        random = CannotRun("the model drops weights in evaluation mode, so no two passes are equal")
        return [_skipped(name, random) for name in names], [], None
    if checks.packed or is_packed(named_arguments(model, batch)):
        packed = CannotRun("the batch is packed: with other tokens its documents would begin elsewhere")
        return [_skipped(name, packed) for name in names], [], None
    try:
        queries = sorted({length for _, length in sizes})
        subject = NamedBatch.of(model, batch, sizes, checks.causal_lengths)
        trial = Trial(subject, Runner(model, [name for name, _ in checks.layers]), checks, order, queries, strict)
        progress("experiments: the batch as it is")
        _prepare(trial, names)
    except (CannotRun, *ERRORS) as error:
        return [_skipped(name, error) for name in names], [], None
    results: dict[str, CheckResult] = {}
    found: list[Finding] = []
    for name, experiment in EXPERIMENTS.items():
        if name not in names:
            continue
        progress(f"experiments: {CHECKS[name].passes}")
        try:
            answer = experiment(trial)
        except (CannotRun, *ERRORS) as error:
            results[name] = _skipped(name, error)
            continue
        state = "skipped" if answer.skipped else "failed" if answer.findings else "passed"
        results[name] = CheckResult(name=name, state=state, deep=True, layers=None, says=answer.says)
        found += answer.findings
        trial.failed += [name] if answer.findings else []
    return [results[name] for name in names], found, trial.runner


def _prepare(trial: Trial, names: list[str]) -> None:
    """The passes that all experiments share; if it is asked for, the weights of some rows are kept."""
    rows = RowWeights()

    def around() -> AbstractContextManager[object]:
        return (
            examine(trial.subject.model, [rows], caller="scan") if "dtype" in names and trial.order else nullcontext()
        )

    trial.prepare(around)
    trial.weights = rows.layers


def _skipped(name: str, error: Exception) -> CheckResult:
    says = str(error) if isinstance(error, CannotRun) else f"could not be run: {reason(error, 120)}"
    return CheckResult(name=name, state="skipped", deep=True, layers=None, says=says)
