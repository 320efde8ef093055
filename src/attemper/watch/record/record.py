"""Record: a table of vitals per step, layer and head; it merges, filters, and converts to files and data frames."""

from __future__ import annotations

import difflib
import fnmatch
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from ... import _files
from ...errors import InputError
from ..call import CallInfo
from .buffer import MOST_WAITING, EntryBuffer, Slot, Transfer, are_done
from .entry import KEYS, SCORE_PEAK, Entry

LOCAL = (
    "merge(): both records have step {step} of {layer!r}, whose heads, or the rows or keys of them, are those of one rank "
    "(info[layer, kind].local), so that equal numbers are not equal heads. Read the records one by one."
)

Method = TypeVar("Method", bound=Callable[..., Any])


def locked(method: Method) -> Method:
    """A method during which no other thread runs one of the same object: one may read a record while a step ends in another."""

    @wraps(method)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(Method, alone)


class Record:
    """Vitals per step, layer and head, as ``watch.record`` holds them and as files keep them.

    A row has ``step``, ``layer`` (as the model names it), ``kind`` (self or cross), ``head``, and one number per sign: the mean
    over the rows counted (``rows`` of them), except ``peak``, which is the largest logit. Where numbers are added to the scores
    (ALiBi, T5), ``score_peak`` is the largest scale · q·k without them, by which alerts and the clip judge. With gradients also
    ``grad_q_rms``, ``grad_q_median``, ``grad_k_rms``, ``grad_k_median``. ``info`` holds the scale, head dim, heads, lengths and
    route of the calls, per layer and kind. ``logged`` holds what ``watch.log()`` was given, such as the loss, by step. ``notes``
    lists what was not measured, and why, and whether only the last steps are in memory.

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
        info: dict[tuple[str, str], CallInfo] | None = None,
        notes: Iterable[str] = (),
        logged: dict[int, dict[str, float]] | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self._buffer = EntryBuffer()
        # their device may still compute; it is waited for when they are read
        self._waiting = deque((Transfer(entries),))
        self.info = dict(info or {})
        self.notes = list(notes)
        self.logged = {step: dict(numbers) for step, numbers in (logged or {}).items()}

    @property
    @locked
    def entries(self) -> list[Entry]:
        """One entry per step and layer, in host memory: its heads, their summary, and the sums of their gradients."""
        return [self._buffer.get(slot) for slot in self._slots]

    def _settle(self, most: int = 0) -> None:
        """Put the steps that have arrived into the buffer, and wait for others until no more than so many are missing."""
        while self._waiting and (len(self._waiting) > most or are_done(self._waiting[0].events)):
            arrived = self._waiting.popleft()
            arrived.wait()
            self._buffer.put(arrived.entries, arrived.on_host)

    @locked
    def _add(self, entries: Iterable[Entry], info: dict[tuple[str, str], CallInfo]) -> None:
        """Add a step."""
        self._waiting.append(Transfer(entries))
        self.info |= info
        self._settle(MOST_WAITING)

    @locked
    def _forget(self, keep: int) -> bool:
        """Keep the last steps only; whether there were more. Those that wait for their device count, and are kept."""
        self._settle(keep)
        dropped = self._buffer.drop(keep - len(self._waiting))
        if dropped and self._buffer.slots:
            first = self._buffer.slots[0].step
            self.logged = {step: numbers for step, numbers in self.logged.items() if step >= first}
        return dropped

    @property
    def _slots(self) -> list[Slot]:
        self._settle()
        return self._buffer.slots

    @property
    @locked
    def steps(self) -> list[int]:
        """The steps that were watched, in order."""
        slots = self._slots
        return sorted({slots[first].step for first in self._buffer.begins})

    @property
    @locked
    def layers(self) -> list[str]:
        """The layers, in the order they ran."""
        return list(dict.fromkeys(slot.layer for slot in self._slots))

    @property
    @locked
    def signs(self) -> list[str]:
        """The columns that hold measurements."""
        names: dict[str, None] = {}
        for slot in self._slots:
            names |= dict.fromkeys(name for name in slot.columns if not name.endswith("_rows"))
            if slot.has_scores:
                names[SCORE_PEAK] = None
            if slot.has_gradients:
                names |= dict.fromkeys(("grad_q_rms", "grad_q_median", "grad_k_rms", "grad_k_median"))
        return list(names)

    @locked
    def filter(
        self,
        *,
        steps: int | Iterable[int] | None = None,
        layers: str | Iterable[str] | Callable[[str], bool] | None = None,
        heads: int | Iterable[int] | None = None,
        kind: str | None = None,
    ) -> Record:
        """The rows that match every argument.

        Args:
            steps: one step or several; a step that this record does not have adds no rows.
            layers: one name or several, with ``*`` and ``?`` as in file names, or a function that returns True for a name.
            heads: one head or several.
            kind: ``"self"`` or ``"cross"``.
        """
        slots, logged = self._slots, self.logged
        if steps is not None:
            wanted = _numbers("steps", steps)
            begins, ends = self._buffer.begins, [*self._buffer.begins[1:], len(slots)]
            parts = [slice(*part) for part in zip(begins, ends, strict=True) if slots[part[0]].step in wanted]
            slots = [slot for part in parts for slot in slots[part]]
            logged = {step: numbers for step, numbers in logged.items() if step in wanted}
        if layers is not None:
            fits = layers if callable(layers) else self._named(layers)
            slots = [slot for slot in slots if fits(slot.layer)]
        if kind is not None:
            if kind not in ("self", "cross"):
                raise InputError(
                    f"Record.filter(): `kind` must be 'self' or 'cross'; got {kind!r}. Leave it out for both."
                )
            slots = [slot for slot in slots if slot.kind == kind]
        chosen = [self._buffer.get(slot) for slot in slots]
        if heads is not None:
            numbers = _numbers("heads", heads)
            highest = max((max(slot.heads) for slot in self._slots), default=-1)
            if self._slots and not any(0 <= number <= highest for number in numbers):
                raise InputError(
                    f"Record.filter(): `heads` must be some of 0 … {highest}, which this record has; got {heads!r}. "
                    "Leave it out for all."
                )
            chosen = [part for entry in chosen if (part := entry.take(numbers)) is not None]
        named = {(entry.layer, entry.kind) for entry in chosen}
        info = {place: info for place, info in self.info.items() if place in named}
        return Record(chosen, info, self.notes, logged)

    def _named(self, layers: str | Iterable[str]) -> Callable[[str], bool]:
        """A function that is True for a layer that matches one of these names; each must match some layer."""
        patterns = [layers] if isinstance(layers, str) else list(layers) if isinstance(layers, Iterable) else [layers]
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise InputError(
                    f"Record.filter(): `layers` must be names or a function; got {pattern!r}. Use '*' for all."
                )
            if self.layers and not fnmatch.filter(self.layers, pattern):
                raise InputError(_no_layer(pattern, self.layers))
        return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    def merge(self, *others: Record) -> Record:
        """The rows of all of them; the same step, layer and heads in two of them become one, exactly.

        Args:
            others: records of other ranks, other data or other steps of the same model. Where ranks run different heads of a
                layer (``info[layer, kind].local``), their rows of one step cannot be merged: head 0 is another one on each.
        """
        merged: dict[tuple[Any, ...], Entry] = {}
        for entry in (entry for record in (self, *others) for entry in record.entries):
            present = merged.get(entry.place)
            if present is not None and any(
                record.info[entry.place[1:3]].local for record in (self, *others) if entry.place[1:3] in record.info
            ):
                raise InputError(LOCAL.format(layer=entry.layer, step=entry.step))
            merged[entry.place] = entry if present is None else present.join(entry)
        info = {place: info for record in (self, *others) for place, info in record.info.items()}
        notes = dict.fromkeys(note for record in (self, *others) for note in record.notes)
        logged: dict[int, dict[str, float]] = {}
        for record in (self, *others):
            for step, numbers in record.logged.items():
                logged.setdefault(step, {}).update(numbers)
        return Record(sorted(merged.values(), key=lambda entry: entry.step), info, notes, logged)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One dict per step, layer and head."""
        return [row for entry in self.entries for row in entry.to_dicts()]

    def to_pandas(self) -> Any:
        """A pandas DataFrame of the rows. Needs ``pip install 'attemper[record]'``."""
        from .store import EXTRA

        pandas = _files.load("Record.to_pandas()", "pandas", EXTRA)
        return pandas.DataFrame(self.to_dicts(), columns=None if len(self) else list(KEYS))

    def to_arrow(self) -> Any:
        """A pyarrow Table of the rows, with the info in its metadata. Needs ``pip install 'attemper[record]'``."""
        from .store import to_arrow

        return to_arrow(self, "Record.to_arrow()")

    def write(self, path: str | Path) -> None:
        """Write the record to a new file, by suffix. An existing file is replaced once the new one is complete.

        Args:
            path: ending in ``.jsonl``, or ``.parquet``, which needs ``pip install 'attemper[record]'``, or ``.csv`` for the rows
                alone, as in ``to_dicts()``: a table for other programs, which ``read()`` does not take.
        """
        from .store import to_path, write

        write(self, to_path("Record.write", path))

    @classmethod
    def read(cls, path: str | Path) -> Record:
        """Read a record. Lines that are cut short or damaged are left out, with a warning that lists them.

        If a resumed run wrote a step again, the last rows are read, with a note.

        Args:
            path: a file that ``write()`` or ``watch(path=…)`` made.
        """
        from .store import read, to_path

        return read(to_path("Record.read", path))

    @locked
    def __len__(self) -> int:
        return sum(len(slot.heads) for slot in self._slots)

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (self.entries, self.info, self.notes, self.logged)  # a copy has a lock of its own

    def __repr__(self) -> str:
        counts = ((len(self.steps), "step"), (len(self.layers), "layer"), (len(self), "row"))
        return f"Record({', '.join(f'{n} {word}' if n == 1 else f'{n} {word}s' for n, word in counts)})"

    def _repr_html_(self) -> str:
        from .html import table

        return table(self)


def _numbers(name: str, given: int | Iterable[int]) -> frozenset[int]:
    """One number or several. A string, which is several letters, is an error."""
    several = (given,) if isinstance(given, int) or not isinstance(given, Iterable) else tuple(given)
    # numpy's integers are allowed; a bool would be head 0 or 1
    if any(isinstance(number, (bool, str)) or not hasattr(number, "__index__") for number in several):
        raise InputError(
            f"Record.filter(): `{name}` must be a whole number or several; got {given!r}. Use {name}=[0, 1]."
        )
    return frozenset(several)


def _no_layer(pattern: str, layers: list[str]) -> str:
    near = difflib.get_close_matches(pattern, layers, 1, 0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(map(repr, layers[:6])) + (f" and {len(layers) - 6} more" if len(layers) > 6 else "")
    return f"Record.filter(): no layer matches {pattern!r}.{hint} The layers are: {shown}."
