"""command: what `attemper run` does between parsing and printing: an experiment's own options, processes, progress."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ...env import cores as _cores
from ...errors import InputError, nearest
from .experiment import Experiment, Value
from .sweep import Swept, sweep

RESULTS = Path("attemper-results")
"""Where a training sweep keeps its cells by default, so that a kill loses nothing."""


COMMON = ("--list", "--preset", "--jobs", "--results", "--json", "--output", "--force")
"""The options of `attemper run` itself, to be suggested for a misspelt one."""


def options(experiment: Experiment, words: Sequence[str]) -> dict[str, str]:
    """``["--d", "16,64", "--rule=none"]`` → {"d": "16,64", "rule": "none"}."""
    name = experiment.name
    known = {parameter.flag: parameter.name for parameter in experiment.parameters}
    found: dict[str, str] = {}
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
        found[known[f"--{option}"]] = value
    return found


def processes(
    asked: int | None, experiment: Experiment, settings: Mapping[str, tuple[Value, ...]], note: Callable[[str], None]
) -> int | None:
    """How many processes measure: never more than there are cells or cores.

    By default, one per core for experiments that train on a CPU, since small models train best on one core each. None leaves it
    to joblib's configuration: for other experiments, or without joblib.
    """
    cells, cores = len(experiment.cells(settings)), _cores()
    most = max(1, min(cells, cores))
    if asked is not None:
        if asked > most:
            note(f"--jobs {asked} is lowered to {most}: there are {cells} cells to measure and {cores} cores")
        return min(asked, most)
    on_cpu = settings.get("device") == ("cpu",)
    return most if experiment.trains and on_cpu and importlib.util.find_spec("joblib") is not None else None


def measure(
    experiment: Experiment,
    settings: Mapping[str, tuple[Value, ...]],
    results: Path | None,
    jobs: int | None,
    note: Callable[[str], None],
) -> Swept:
    """Sweep with a progress bar on stderr; an experiment that trains always keeps its cells in a folder."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    if results is None and experiment.trains:
        results = RESULTS
        note(f"finished cells are kept in {RESULTS}/; a run that is killed continues from them")
    jobs = processes(jobs, experiment, settings, note)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(experiment.name, total=None)

        def done(finished: int, cells: int) -> None:
            bar.update(task, completed=finished, total=cells)

        return sweep(experiment, settings, results=results, jobs=jobs, done=done, note=note)
