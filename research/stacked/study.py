"""study: which stack comes next, until everything is measured or the time is over.

A study plans from the rows that exist, so it continues where an earlier call ended, also where learning rates depend on what
was found. Every finished run is on the disk before the next one counts.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from attemper.errors import InputError
from attemper.extension.tools import out_of_memory
from attemper_lab.engine.experiment import Cell, Row, Rows, key, origin
from attemper_lab.engine.store import Store

from .text import sources

Settings = Mapping[str, Any]  # of a preset
SAID = 10.0  # seconds between two lines of progress


class Deadline:
    """A budget of seconds; ``over`` is asked between steps."""

    def __init__(self, seconds: float) -> None:
        self.began, self.seconds, self._said = time.monotonic(), seconds, 0.0

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float:
        return self.seconds - self.spent

    @property
    def over(self) -> bool:
        return self.left <= 0

    def say(self, words: str, always: bool = False) -> None:
        """Print a line of progress on stderr, at most every few seconds."""
        if always or self.spent - self._said >= SAID:
            self._said = self.spent
            print(f"[{self.spent:6.1f} s of {self.seconds:g}] {words}", file=sys.stderr, flush=True)


def _all_rows(rows: Rows) -> list[Row]:
    return [dict(row) for row in rows]


def _alike(cell: Cell, settings: Settings) -> float:
    return 1.0


@dataclass(frozen=True)
class Study:
    """A question that takes many runs.

    ``plan(rows, settings)`` gives the cells of the next stack, or none when all are measured; ``train(cells, rows, settings,
    device, deadline)`` gives each cell with its rows as it ends, and stops early when the deadline is over; ``rows`` are those
    that exist. ``weight(cell, settings)`` is what a cell costs beside others, and ``total(settings)`` about what all cells cost.
    ``packed(rows)`` is what docs/data/ keeps of rows, from which the same is found.
    ``version`` is raised when rows of older code may not be mixed with new ones.
    """

    name: str
    question: str
    presets: Mapping[str, Settings]
    plan: Callable[[Rows, Settings], list[Cell]] = field(repr=False)
    train: Callable[[Sequence[Cell], Rows, Settings, str, Deadline], Iterator[tuple[Cell, list[Row]]]] = field(
        repr=False
    )
    total: Callable[[Settings], float] = field(repr=False)
    finding: Callable[[Rows], str] = field(repr=False)
    summary: Callable[[Rows], list[Row]] = field(repr=False)
    draw: Callable[[Rows, str], Any] = field(repr=False)
    weight: Callable[[Cell, Settings], float] = field(repr=False, default=_alike)
    packed: Callable[[Rows], list[Row]] = field(repr=False, default=_all_rows)
    version: int = 1


def define(module: Mapping[str, Any], question: str, presets: Mapping[str, Settings], **more: Any) -> Study:
    """The study of a module, from the functions there that have the names of a study's fields; ``more`` are other fields."""
    own = {one.name: module[one.name] for one in fields(Study) if callable(module.get(one.name))}
    return Study(module["__name__"].rpartition(".")[2], question, presets, **{**own, **more})


def work(study: Study, preset: str, results: Path, device: str, seconds: float) -> list[Row]:
    """Measure what is missing, for at most this many seconds, and return all rows, those of earlier calls first."""
    settings, deadline = study.presets[preset], Deadline(seconds)
    with Store(results, study.name, f"{preset} {study.version}") as store:
        found = dict(store.rows)
        _same_text(found, store.path)
        deadline.say(f"{study.name} {preset}: {len(found)} runs are already measured", always=True)
        done, wanted, most = 0.0, True, sys.maxsize
        left = study.total(settings) - sum(study.weight(rows[0], settings) for rows in found.values())
        while not deadline.over:
            cells = study.plan(_all(found), settings)[:most]
            if not cells:
                wanted = False
                break
            stack, began = sum(study.weight(cell, settings) for cell in cells), deadline.spent
            each = deadline.spent / done if done else math.nan
            said = (
                f"about {each * stack:.0f} s, all that is left about {each * max(left, stack):.0f} s"
                if done
                else "time unknown"
            )
            deadline.say(f"a stack of {len(cells)} runs, {said}: {_common(cells)}", always=True)
            try:
                for cell, rows in study.train(cells, _all(found), settings, device, deadline):
                    kept = [{**origin(study.name), **cell, **row} for row in rows]
                    store.add(cell, kept)
                    found[key(cell)] = kept
                    done += study.weight(cell, settings)
                    left -= study.weight(cell, settings)
            except Exception as error:
                if not out_of_memory(error) or len(cells) == 1:
                    raise
                most = len(cells) // 2
                deadline.say(
                    f"there is not enough memory for {len(cells)} runs: stacks of {most} from here on", always=True
                )
            deadline.say(f"the stack took {deadline.spent - began:.1f} s", always=True)
            free(device)
        ended = "the time is over; the same command continues" if wanted else "everything is measured"
        deadline.say(f"{study.name}: {len(found)} runs, {ended}", always=True)
    return _all(found)


def _same_text(found: Mapping[str, list[Row]], path: Path) -> None:
    """Raise if rows were measured on another text than this Python's sources: losses of two texts are not comparable."""
    texts = {str(row["text"]) for row in _all(found) if "text" in row}
    if texts and texts != {sources()[1]}:
        raise InputError(
            f"stacked: the runs in {str(path)!r} were trained on a text of {' and '.join(sorted(texts))}; this Python's sources "
            f"are {sources()[1]}. Continue with the Python that began, or choose another --results."
        )


def _all(found: Mapping[str, list[Row]]) -> list[Row]:
    return [row for rows in found.values() for row in rows]


def free(device: str) -> None:
    """Free the memory of a stack before the next one allocates its own."""
    gc.collect()
    if device.startswith("cuda"):
        import torch

        torch.cuda.empty_cache()


def _common(cells: Sequence[Cell]) -> str:
    """A few words on what differs between the cells and what they have in common."""
    parts = []
    for name in cells[0]:
        values = sorted({cell[name] for cell in cells}, key=str)
        parts.append(f"{name} {values[0] if len(values) == 1 else f'({len(values)})'}")
    return ", ".join(parts)


def missing(rows: Rows, wanted: Sequence[Cell]) -> list[Cell]:
    """The cells that have no row yet."""
    if not wanted:
        return []
    names = list(wanted[0])
    there = {tuple(row.get(name) for name in names) for row in rows}
    return [cell for cell in wanted if tuple(cell[name] for name in names) not in there]
