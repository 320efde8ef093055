"""sweep: every cell of an experiment, in one process or many, resumed where an earlier run was killed.

joblib runs the cells, on the backend that the caller configures; those for Dask and Ray go through clusters.py. The calling
process writes the results, so workers need no common disk. Without joblib, cells run here, one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attemper.errors import AttemperError, InputError, MissingExtra
from attemper.extension.files import load
from attemper.extension.tools import out_of_memory

from .clusters import ClusterLost, WorkerDied, cells_on
from .experiment import Cell, Experiment, Row, Value, key
from .fingerprint import fingerprint
from .orphans import end_with
from .store import Store

TRIES = 2  # of a cell whose worker died while nothing else ran
DEATHS = (BrokenExecutor, WorkerDied)  # a pool's, a cluster's


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

    ``save_error`` is a sentence if some rows could not be written to the disk, otherwise empty.
    """

    rows: list[Row]
    resumed: int
    failures: list[Failure]
    save_error: str = ""


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
    rows_of = dict(store.rows) if store else {}
    if store and store.damaged:
        note(store.damaged)
    waiting = [cell for cell in cells if key(cell) not in rows_of]
    resumed = len(cells) - len(waiting)
    if resumed:
        note(f"{resumed} of {len(cells)} cells were already measured")
    failures, save_error = [], ""
    try:
        done(resumed, len(cells))
        for number, (cell, outcome) in enumerate(_outcomes(experiment, waiting, jobs, note), start=1):
            if isinstance(outcome, str):
                failures.append(Failure(cell, outcome))
            else:
                rows_of[key(cell)] = outcome
                save_error = _save(store, cell, outcome, save_error, note)
            done(resumed + number, len(cells))
    except KeyboardInterrupt as stop:
        stop.add_note(_kept_sentence(cells, rows_of, store))
        raise
    except ClusterLost as lost:
        raise InputError(f"{lost} {_kept_sentence(cells, rows_of, store)}") from lost
    finally:
        if store:
            store.close()
    return Swept([row for cell in cells for row in rows_of.get(key(cell), [])], resumed, failures, save_error)


def _save(store: Store | None, cell: Cell, rows: list[Row], save_error: str, note: Callable[[str], None]) -> str:
    """Keep a cell. If the disk is full, one note says so, the rows stay in memory, and the next cell is tried again."""
    if store is None:
        return save_error
    try:
        store.add(cell, rows)
    except OSError as error:
        if not save_error:
            note(
                f"cannot keep a cell in {str(store.folder)!r}: {error.strerror}; the sweep continues and keeps it in memory"
            )
        return (
            f"run: not every cell could be kept in {str(store.folder)!r}: {error.strerror}. Free some space and type the same "
            "command again: it measures what is missing."
        )
    return save_error


def _kept_sentence(cells: Sequence[Cell], rows_of: Mapping[str, list[Row]], store: Store | None) -> str:
    """A sentence on what a stopped sweep has kept."""
    if store is None:
        measured_cells = sum(key(cell) in rows_of for cell in cells)
        return f"{measured_cells} of {len(cells)} cells were measured, and none is kept: --results FOLDER keeps them."
    kept = sum(key(cell) in store.rows for cell in cells)
    return f"{kept} of {len(cells)} cells are kept in {str(store.folder)!r}" + (
        ": type the same command to continue from them." if kept else "."
    )


def _outcomes(
    experiment: Experiment, cells: Sequence[Cell], jobs: int | None, note: Callable[[str], None]
) -> Iterator[tuple[Cell, list[Row] | str]]:
    """Yield each cell once, as it finishes, with its rows or the reason why it has none."""
    try:
        joblib: Any = load("run: --jobs above 1", "joblib", "lab")
    except MissingExtra:
        if jobs not in (None, 1):
            raise
        for cell in cells:
            yield cell, measure_cell(experiment, cell)[1]
        return

    backend = joblib.parallel.get_active_backend()[0]
    on_cluster = cells_on(backend, measure_cell)
    # Make loky's workers exit with their parent, also while they still import, unless the user set an initializer.
    guard: dict[str, Any] = {}
    if type(backend).__name__ == "LokyBackend" and "initializer" not in backend.backend_kwargs:
        guard = {"initializer": end_with, "initargs": (os.getpid(),)}

    def parallel(some: Sequence[Cell]) -> Iterator[tuple[Cell, list[Row] | str]]:
        if on_cluster is not None:
            return on_cluster(experiment, some)
        # batches of one: a finished cell is handed over at once, and none waits unsaved behind another
        pool = joblib.Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered", **guard)
        return pool(joblib.delayed(measure_cell)(experiment, cell) for cell in some)

    unfinished = {key(cell): cell for cell in cells}
    try:
        for cell, outcome in parallel(cells):
            yield unfinished.pop(key(cell)), outcome
    except DEATHS as death:
        note(
            f"a worker died ({_name(death)}); the {len(unfinished)} cells it left unfinished are measured one at a time"
        )
    # A pool that lost a worker cannot say whose cell it was: run the rest one at a time to find it.
    for cell in unfinished.values():
        yield cell, _alone(cell, parallel)


def _alone(cell: Cell, parallel: Callable[[Sequence[Cell]], Iterator[tuple[Cell, list[Row] | str]]]) -> list[Row] | str:
    reason = ""
    for _ in range(TRIES):
        try:
            return next(iter(parallel([cell])))[1]
        except DEATHS as death:
            reason = f"its worker died {TRIES} times ({_name(death)})"
    return reason


def _name(death: Exception) -> str:
    return str(death) if isinstance(death, WorkerDied) else type(death).__name__


def measure_cell(experiment: Experiment, cell: Cell) -> tuple[Cell, list[Row] | str]:
    """Measure a cell in a worker. An error becomes the reason why the cell has no rows, and the sweep goes on."""
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
