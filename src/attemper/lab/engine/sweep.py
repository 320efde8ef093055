"""sweep: every cell of an experiment, in one process or many, resumed where an earlier run was killed.

joblib runs the cells, on the backend that the caller configures: ``with joblib.parallel_config(backend="dask")`` sends them to a
cluster. The calling process writes the results, so workers need no common disk. Without joblib, cells run here, one by one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..._files import load
from ...errors import AttemperError, MissingExtra, out_of_memory
from .experiment import Cell, Experiment, Row, Value, key
from .fingerprint import fingerprint
from .orphans import end_with
from .store import Store

TRIES = 2  # of a cell whose worker died while nothing else ran
DEATHS = (BrokenExecutor, "KilledWorker")  # a pool's, and a Dask scheduler's, which needs no import to be recognised


@dataclass(frozen=True)
class Failure:
    """A cell that gave no rows, and why."""

    cell: Cell
    reason: str

    def __str__(self) -> str:
        return f"{', '.join(f'{name}={value}' for name, value in self.cell.items())}: {self.reason}"


@dataclass(frozen=True)
class Swept:
    """What a sweep returns: rows in the order of the cells, how many cells were already measured, and those that failed.

    ``unkept`` is a sentence if some rows could not be written to the disk, and else empty.
    """

    rows: list[Row]
    resumed: int
    failures: list[Failure]
    unkept: str = ""


def sweep(
    experiment: Experiment,
    settings: Mapping[str, tuple[Value, ...]],
    *,
    results: Path | None = None,
    jobs: int | None = None,
    done: Callable[[int, int], None] = lambda finished, all_cells: None,
    note: Callable[[str], None] = lambda line: None,
) -> Swept:
    """Measure every cell.

    Args:
        experiment: what to measure.
        settings: the values of each parameter, from ``experiment.settings()``.
        results: a folder in which finished cells are kept and from which they are taken; None keeps them in memory.
        jobs: how many processes; None leaves it to joblib's configuration, which is one unless somebody set it.
        done: called with the number of finished cells and of all cells, each time one finishes.
        note: called with sentences for the user.
    """
    cells = experiment.cells(settings)
    store = Store(results, experiment.name, fingerprint(experiment.measure)) if results is not None else None
    found = dict(store.rows) if store else {}
    if store and store.damaged:
        note(store.damaged)
    waiting = [cell for cell in cells if key(cell) not in found]
    resumed = len(cells) - len(waiting)
    if resumed:
        note(f"{resumed} of {len(cells)} cells were already measured")
    failures, unkept = [], ""
    try:
        done(resumed, len(cells))
        for place, (cell, outcome) in enumerate(_outcomes(experiment, waiting, jobs, note), start=1):
            if isinstance(outcome, str):
                failures.append(Failure(cell, outcome))
            else:
                found[key(cell)] = outcome
                unkept = _keep(store, cell, outcome, unkept, note)
            done(resumed + place, len(cells))
    except KeyboardInterrupt as stop:
        stop.add_note(_kept(cells, found, store))
        raise
    finally:
        if store:
            store.close()
    return Swept([row for cell in cells for row in found.get(key(cell), [])], resumed, failures, unkept)


def _keep(store: Store | None, cell: Cell, rows: list[Row], unkept: str, note: Callable[[str], None]) -> str:
    """Keep a cell. If the disk is full, one note says so, the rows stay in memory, and the next cell is tried again."""
    if store is None:
        return unkept
    try:
        store.add(cell, rows)
    except OSError as error:
        if not unkept:
            note(
                f"cannot keep a cell in {str(store.folder)!r}: {error.strerror}; the sweep continues and keeps it in memory"
            )
        return (
            f"run: not every cell could be kept in {str(store.folder)!r}: {error.strerror}. Free some space and type the same "
            "command again: it measures what is missing."
        )
    return unkept


def _kept(cells: Sequence[Cell], found: Mapping[str, list[Row]], store: Store | None) -> str:
    """What is left of a sweep that was stopped."""
    if store is None:
        measured_cells = sum(key(cell) in found for cell in cells)
        return f"{measured_cells} of {len(cells)} cells were measured, and none is kept: --results FOLDER keeps them."
    kept = sum(key(cell) in store.rows for cell in cells)
    return f"{kept} of {len(cells)} cells are kept in {str(store.folder)!r}" + (
        ": type the same command to continue from them." if kept else "."
    )


def _outcomes(
    experiment: Experiment, cells: Sequence[Cell], jobs: int | None, note: Callable[[str], None]
) -> Iterator[tuple[Cell, list[Row] | str]]:
    """Each cell once, as it finishes, with its rows or the reason why it has none."""
    try:
        joblib: Any = load("run: --jobs above 1", "joblib", "lab")
    except MissingExtra:
        if jobs not in (None, 1):
            raise
        for cell in cells:
            yield cell, measured(experiment, cell)[1]
        return

    backend = joblib.parallel.get_active_backend()[0]
    client = getattr(backend, "client", None)  # of a Dask cluster, if that is configured
    # Workers of joblib's own end with their caller, also while they still import what measuring needs. Whoever calls may have
    # configured a start for them: theirs comes first.
    guard: dict[str, Any] = {}
    if type(backend).__name__ == "LokyBackend" and "initializer" not in backend.backend_kwargs:
        guard = {"initializer": end_with, "initargs": (os.getpid(),)}

    def parallel(some: Sequence[Cell]) -> Iterator[tuple[Cell, list[Row] | str]]:
        if client is not None:
            return _on_dask(client, experiment, some)
        # batches of one: a finished cell is handed over at once, and none waits unsaved behind another
        pool = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered", **guard)
        return pool(joblib.delayed(measured)(experiment, cell) for cell in some)

    left = {key(cell): cell for cell in cells}
    try:
        for cell, outcome in parallel(cells):
            yield left.pop(key(cell)), outcome
    except Exception as death:
        if not _is_death(death):
            raise
        note(
            f"a worker died ({type(death).__name__}); the {len(left)} cells it left unfinished are measured one at a time"
        )
    # A pool that lost a worker cannot say whose cell it was, so each runs alone from here on and answers for itself.
    for cell in left.values():
        yield cell, _alone(cell, parallel)


def _on_dask(client: Any, experiment: Experiment, cells: Sequence[Cell]) -> Iterator[tuple[Cell, list[Row] | str]]:
    """Without joblib, through which a Dask cluster does not report that a worker died: the caller would wait for ever."""
    futures = [client.submit(measured, experiment, cell, pure=False) for cell in cells]
    death: Exception | None = None
    for future in importlib.import_module("distributed").as_completed(futures):
        try:
            yield future.result()
        except Exception as error:
            if not _is_death(error):
                raise
            death = error  # the other cells first
    if death is not None:
        raise death


def _alone(cell: Cell, parallel: Callable[[Sequence[Cell]], Iterator[tuple[Cell, list[Row] | str]]]) -> list[Row] | str:
    reason = ""
    for _ in range(TRIES):
        try:
            return next(iter(parallel([cell])))[1]
        except Exception as death:
            if not _is_death(death):
                raise
            reason = f"its worker died {TRIES} times ({type(death).__name__})"
    return reason


def _is_death(error: Exception) -> bool:
    death, name = DEATHS
    return isinstance(error, death) or type(error).__name__ == name


def measured(experiment: Experiment, cell: Cell) -> tuple[Cell, list[Row] | str]:
    """What a worker does; a Python error becomes the reason why this cell has no rows, and the sweep goes on."""
    try:
        return cell, experiment.rows(cell)
    except MissingExtra:  # true of every cell
        raise
    except AttemperError as error:
        return cell, str(error)
    except Exception as error:
        if out_of_memory(error):
            return cell, "there is not enough memory for it. Use smaller numbers."
        return cell, f"{type(error).__name__}: {error}"
