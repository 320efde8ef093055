"""command: the part of `attemper run` between parsing and printing: an experiment's own options, processes, progress."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from attemper.errors import InputError
from attemper.extension.machine import cores as _cores
from attemper.extension.tools import nearest

from .clusters import opened
from .experiment import Experiment, Value
from .sweep import Swept, sweep

RESULTS = Path("attemper-results")
"""Where a training sweep keeps its cells by default, so that a kill loses nothing."""


COMMON = ("--list", "--preset", "--jobs", "--backend", "--address", "--results", "--json", "--output", "--force")
"""Options of `attemper run` itself, suggested when an option is misspelt."""


def options(experiment: Experiment, words: Sequence[str]) -> dict[str, str]:
    """``["--d", "16,64", "--rule=none"]`` → {"d": "16,64", "rule": "none"}."""
    name = experiment.name
    known = {parameter.flag: parameter.name for parameter in experiment.parameters}
    chosen: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            raise InputError(
                f"run {name}: {word!r} belongs to no option. For example: --d 16,64. `attemper run --list` shows them."
            )
        option, equals, value = word.removeprefix("--").partition("=")
        if f"--{option}" not in known:
            raise InputError(f"run {name}: unknown option '--{option}'. {nearest(f'--{option}', [*known, *COMMON])}")
        if not equals:
            if not left:
                raise InputError(f"run {name}: --{option} needs a value. For example: --{option} 16,64.")
            value = left.pop(0)
        chosen[known[f"--{option}"]] = value
    return chosen


def processes(
    requested: int | None,
    experiment: Experiment,
    settings: Mapping[str, tuple[Value, ...]],
    note: Callable[[str], None],
) -> int | None:
    """How many processes to use: never more than there are cells or cores.

    The default is one per core for experiments that train on a CPU, since small models train best on one core each. For other
    experiments, and without joblib, it is None, which leaves the number to joblib's configuration.
    """
    cells, cores = len(experiment.cells(settings)), _cores()
    most = max(1, min(cells, cores))
    if requested is not None:
        if requested > most:
            note(f"--jobs {requested} is lowered to {most}: there are {cells} cells to measure and {cores} cores")
        return min(requested, most)
    on_cpu = settings.get("device") == ("cpu",)
    return most if experiment.trains and on_cpu and importlib.util.find_spec("joblib") is not None else None


def measure(
    experiment: Experiment,
    settings: Mapping[str, tuple[Value, ...]],
    results: Path | None,
    jobs: int | None,
    note: Callable[[str], None],
    backend: str | None = None,
    address: str | None = None,
) -> Swept:
    """Sweep with a progress bar on stderr; an experiment that trains, or runs on a cluster, keeps its cells in a folder."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if address is None:
        jobs = processes(jobs, experiment, settings, note)
    cluster: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if backend is not None:
        workers = jobs or min(len(experiment.cells(settings)), _cores())
        cluster = opened(backend, address, workers, note)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())
    with cluster, shown as bar:
        if results is None and (experiment.trains or backend is not None):
            results = RESULTS
            note(f"finished cells are kept in {RESULTS}/; a run that is killed continues from them")
        task = bar.add_task(experiment.name, total=None)

        def done(finished: int, cells: int) -> None:
            bar.update(task, completed=finished, total=cells)

        return sweep(experiment, settings, results=results, jobs=jobs, done=done, note=note)
