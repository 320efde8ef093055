"""All experiments on one input, in order; the result of each, and their findings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...health import Finding
from ...health.faults import CHECKS, CheckResult
from ...watch.examine import examine
from ..checks.examiner import AttentionChecks
from ..input.model import reason
from .cache import cache
from .dtype import dtype
from .future import future
from .items import items
from .long import long
from .padding import padding
from .permutation import permutation
from .position import PositionExaminer, asking, position
from .runner import Runner
from .subject import CannotRun, Subject
from .trial import ERRORS, Answer, Trial

EXPERIMENTS: dict[str, Callable[[Trial], Answer]] = {
    "future": future,
    "padding": padding,
    "batch": items,
    "cache": cache,
    "long": long,
    "permutation": permutation,
    "dtype": dtype,
}


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
    try:
        queries = sorted({length for _, length in sizes})
        subject = Subject.of(model, batch, sizes, checks.causal_lengths)
        trial = Trial(subject, Runner(model, [name for name, _ in checks.layers]), checks, order, queries, strict)
        progress("experiments: the batch as it is")
        asked = _prepare(trial, "position" in names)
    except (CannotRun, *ERRORS) as error:
        return [_skipped(name, error) for name in names], [], None
    results, found = [], []
    for name in names:
        progress(f"experiments: {CHECKS[name].passes}")
        try:
            answer = position(trial, asked) if name == "position" else EXPERIMENTS[name](trial)
        except (CannotRun, *ERRORS) as error:
            results.append(_skipped(name, error))
            continue
        state = "skipped" if answer.skipped else "failed" if answer.findings else "passed"
        results.append(CheckResult(name=name, state=state, deep=True, layers=None, says=answer.says))
        found += answer.findings
        trial.failed += [name] if answer.findings else []
    return results, found, trial.runner


def _prepare(trial: Trial, with_position: bool) -> dict[str, str | None]:
    """The passes that all experiments share; meanwhile every attention module is asked about its positions."""
    found: dict[str, str | None] = {}
    if not with_position or not trial.order:
        trial.prepare()
        return found

    @contextmanager
    def asked(judge: nn.Module) -> Iterator[None]:
        examiner = PositionExaminer()
        with warnings.catch_warnings(), examine(judge, [examiner], caller="scan"):
            warnings.filterwarnings("ignore", message=r"watch\(\): ")
            with asking(judge, trial.order, examiner, found):
                yield

    trial.prepare(asked)
    return found


def _skipped(name: str, error: Exception) -> CheckResult:
    says = str(error) if isinstance(error, CannotRun) else f"could not be run: {reason(error, 120)}"
    return CheckResult(name=name, state="skipped", deep=True, layers=None, says=says)
