"""Record: a table of vitals per step, layer and head, that merges, filters, and goes to files and data frames."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, MissingExtra
from ..heads import HeadSummary
from .call import Facts

KEYS = ("step", "layer", "kind", "head")


@dataclass(frozen=True)
class Entry:
    """One layer in one step: its heads, their summary, and the sums of their gradients where a backward gave them."""

    step: int
    layer: str
    kind: str
    heads: tuple[int, ...]
    summary: HeadSummary
    gradients: Tensor | None = None  # (H, 6)

    @property
    def place(self) -> tuple[int, str, str, tuple[int, ...]]:
        return self.step, self.layer, self.kind, self.heads

    def on_host(self) -> Entry:
        """The same with its numbers in host memory; this is where a device is waited for."""
        if self.summary.sums.device.type == "cpu" and (self.gradients is None or self.gradients.device.type == "cpu"):
            return self
        summary = HeadSummary(self.summary.columns, self.summary.sums.cpu(), self.summary.peaks.cpu())
        return Entry(*self.place, summary, None if self.gradients is None else self.gradients.cpu())

    def take(self, heads: Sequence[int]) -> Entry | None:
        chosen = [place for place, head in enumerate(self.heads) if head in heads]
        if not chosen:
            return None
        rows = torch.tensor(chosen)
        summary = HeadSummary(self.summary.columns, self.summary.sums[rows], self.summary.peaks[rows])
        names = tuple(self.heads[place] for place in chosen)
        return Entry(
            self.step, self.layer, self.kind, names, summary, None if self.gradients is None else self.gradients[rows]
        )

    def to_dicts(self) -> list[dict[str, Any]]:
        columns = {name: getattr(self.summary, name).tolist() for name in self.summary.columns}
        if self.gradients is not None:
            columns |= {name: column.tolist() for name, column in _gradient_columns(self.gradients).items()}
        keys = {"step": self.step, "layer": self.layer, "kind": self.kind}
        return [
            {**keys, "head": head, **{name: column[place] for name, column in columns.items()}}
            for place, head in enumerate(self.heads)
        ]


def _gradient_columns(sums: Tensor) -> dict[str, Tensor]:
    found = {}
    for name, place in (("q", 0), ("k", 3)):
        count = sums[:, place]
        found[f"grad_{name}_rms"] = (sums[:, place + 1] / count).sqrt()
        found[f"grad_{name}_median"] = sums[:, place + 2] / count
        found[f"grad_{name}_count"] = count
    return found


class Record:
    """Vitals per step, layer and head, as ``watch.record`` holds them and as files keep them.

    A row has ``step``, ``layer`` (as the model names it), ``kind`` (self or cross), ``head``, and one number per sign: the mean
    over the rows counted (``rows`` of them), except ``peak``, which is the largest. With gradients also ``grad_q_rms``,
    ``grad_q_median``, ``grad_k_rms``, ``grad_k_median``. ``facts`` holds, per layer and kind, what the calls were: scale,
    head dim, heads, lengths, route. ``notes`` says what was not measured, and why.

    Example:
        >>> model = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        >>> x = torch.zeros(1, 5, 16)
        >>> with attemper.watch(model) as watch:
        ...     _ = model(x, x, x)
        >>> watch.record
        Record(1 step, 1 layer, 2 rows)
        >>> round(watch.record.to_dicts()[0]["effective_keys"], 4)      # five equal keys
        5.0
    """

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        facts: dict[tuple[str, str], Facts] | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self._entries = list(entries)
        self._on_host = 0  # how many of them are
        self.facts = dict(facts or {})
        self.notes = list(notes)

    @property
    def entries(self) -> list[Entry]:
        """One entry per step and layer, its numbers in host memory."""
        for place in range(self._on_host, len(self._entries)):
            self._entries[place] = self._entries[place].on_host()
        self._on_host = len(self._entries)
        return self._entries

    def add(self, entries: Iterable[Entry], facts: dict[tuple[str, str], Facts]) -> None:
        """Take in a step. The one before it is brought to the host by now: its device is done with it."""
        self.entries.extend(entries)
        self.facts |= facts

    @property
    def steps(self) -> list[int]:
        """The steps that were watched, in order."""
        return sorted({entry.step for entry in self._entries})

    @property
    def layers(self) -> list[str]:
        """The layers, in the order they ran."""
        return list(dict.fromkeys(entry.layer for entry in self._entries))

    @property
    def signs(self) -> list[str]:
        """The columns that hold measurements."""
        names: dict[str, None] = {}
        for entry in self._entries:
            names |= dict.fromkeys(entry.summary.signs)
            if entry.gradients is not None:
                names |= dict.fromkeys(("grad_q_rms", "grad_q_median", "grad_k_rms", "grad_k_median"))
        return list(names)

    def filter(
        self,
        *,
        steps: int | Iterable[int] | None = None,
        layers: str | Callable[[str], bool] | None = None,
        heads: int | Iterable[int] | None = None,
        kind: str | None = None,
    ) -> Record:
        """The rows that fit all of what is given.

        Args:
            steps: one step or several.
            layers: a name, with ``*`` and ``?`` as in file names, or a function that takes a name and says yes.
            heads: one head or several.
            kind: ``"self"`` or ``"cross"``.
        """
        chosen = self.entries
        if steps is not None:
            wanted = {steps} if isinstance(steps, int) else set(steps)
            chosen = [entry for entry in chosen if entry.step in wanted]
        if layers is not None:
            fits = layers if callable(layers) else lambda name: fnmatch.fnmatchcase(name, layers)
            chosen = [entry for entry in chosen if fits(entry.layer)]
        if kind is not None:
            chosen = [entry for entry in chosen if entry.kind == kind]
        if heads is not None:
            numbers = (heads,) if isinstance(heads, int) else tuple(heads)
            chosen = [part for entry in chosen if (part := entry.take(numbers)) is not None]
        named = {(entry.layer, entry.kind) for entry in chosen}
        return Record(chosen, {place: facts for place, facts in self.facts.items() if place in named}, self.notes)

    def merge(self, *others: Record) -> Record:
        """The rows of all of them; the same step, layer and heads in two of them become one, exactly.

        Args:
            others: records of other ranks, other data or other steps of the same model.
        """
        found: dict[tuple[Any, ...], Entry] = {}
        for entry in (entry for record in (self, *others) for entry in record.entries):
            present = found.get(entry.place)
            found[entry.place] = entry if present is None else join(present, entry)
        facts = {place: facts for record in (self, *others) for place, facts in record.facts.items()}
        notes = dict.fromkeys(note for record in (self, *others) for note in record.notes)
        return Record(sorted(found.values(), key=lambda entry: entry.step), facts, notes)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict per step, layer and head."""
        return [row for entry in self.entries for row in entry.to_dicts()]

    def to_pandas(self) -> Any:
        """A pandas DataFrame of the rows. Needs ``pip install 'attemper[record]'``."""
        try:
            import pandas
        except ImportError:
            raise _missing("to_pandas", "pandas") from None
        return pandas.DataFrame(self.to_dicts(), columns=None if len(self) else list(KEYS))

    def to_arrow(self) -> Any:
        """A pyarrow Table of the rows, with the facts in its metadata. Needs ``pip install 'attemper[record]'``."""
        from .store import to_arrow

        return to_arrow(self, _missing("to_arrow", "pyarrow"))

    def write(self, path: str | Path) -> None:
        """Write the record to a new file, by suffix.

        Args:
            path: ending in ``.jsonl``, or ``.parquet``, which needs ``pip install 'attemper[record]'``.
        """
        from .store import write

        write(self, Path(path))

    @classmethod
    def read(cls, path: str | Path) -> Record:
        """Read a record; a last line that a kill cut short is left out, with a warning.

        Args:
            path: a file that ``write()`` or ``watch(path=…)`` made.
        """
        from .store import read

        return read(Path(path))

    def __len__(self) -> int:
        return sum(len(entry.heads) for entry in self._entries)

    def __repr__(self) -> str:
        counts = ((len(self.steps), "step"), (len(self.layers), "layer"), (len(self), "row"))
        return f"Record({', '.join(f'{n} {word}' if n == 1 else f'{n} {word}s' for n, word in counts)})"

    def _repr_html_(self) -> str:
        from .html import table

        return table(self)


def join(first: Entry, second: Entry) -> Entry:
    """The same layer and step, of other rows."""
    if first.summary.columns != second.summary.columns:
        raise InputError(
            f"merge(): both records must hold the same signs for step {first.step} of {first.layer!r}; got "
            f"{first.summary.columns} and {second.summary.columns}. Watch both with the same signs=."
        )
    gradients = [part for part in (first.gradients, second.gradients) if part is not None]
    total = torch.stack(gradients).sum(0) if gradients else None
    return Entry(*first.place, first.summary.merge(second.summary), total)


def _missing(where: str, package: str) -> MissingExtra:
    return MissingExtra(
        f"Record.{where}(): needs {package}, which is not installed. Type pip install 'attemper[record]'."
    )
