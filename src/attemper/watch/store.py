"""Files of a record: JSON lines that are appended crash-safely, and Parquet; both say which schema they hold.

A JSONL file opens with ``{"schema": "attemper.record", "version": 1}``. Then every line is a row, the
``facts`` of a layer, or a ``note``.
Lines are written whole, in one call per step, so a kill can cut only the last one.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError, MissingExtra
from ..heads import HeadSummary
from .call import Facts
from .entry import Entry
from .record import KEYS, Record

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA, VERSION = "attemper.record", 1
HEADER = {"schema": SCHEMA, "version": VERSION}
SUFFIXES = (".jsonl", ".parquet")
WORDS = {"inf": math.inf, "-inf": -math.inf}  # JSON has no infinity; NaN is null


class Journal:
    """Appends to a JSONL file, one write per step. A last line that a kill cut short is removed before the first."""

    def __init__(self, path: Path) -> None:
        check_path("watch", path, (".jsonl",))
        self.path = path
        self.known: dict[tuple[str, str], Facts] = {}
        self.noted = 0
        if path.exists() and path.stat().st_size:
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            _check_header("watch", path, whole.split(b"\n", 1)[0].decode(errors="replace"))
            if len(whole) < len(text):
                os.truncate(path, len(whole))
        else:
            self._append([HEADER])

    def append(self, entries: Iterable[Entry], facts: dict[tuple[str, str], Facts], notes: list[str]) -> None:
        """The rows of a step, after what is new of facts and notes."""
        news = {place: found for place, found in facts.items() if self.known.get(place) != found}
        self.known |= news
        lines = [_facts_line(place, found) for place, found in news.items()]
        lines += [{"note": note} for note in notes[self.noted :]]
        self.noted = len(notes)
        self._append([*lines, *(row for entry in entries for row in entry.to_dicts())])

    def _append(self, lines: Iterable[dict[str, Any]]) -> None:
        text = "".join(_dump(line) + "\n" for line in lines).encode()
        with self.path.open("ab", buffering=0) as file:
            file.write(text)


def check_path(where: str, path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> None:
    if path.suffix not in suffixes:
        raise InputError(f"{where}(): `path` must end in {' or '.join(suffixes)}; got {path.name!r}.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{where}(): there is no folder {str(path.parent)!r} for `path`. Make it first.")


def write(record: Record, path: Path) -> None:
    check_path("Record.write", path)
    if path.suffix == ".parquet":
        missing = MissingExtra(
            "Record.write(): Parquet needs pyarrow, which is not installed. Type pip install 'attemper[record]'."
        )
        table = to_arrow(record, missing)
        from pyarrow import parquet

        parquet.write_table(table, path)
        return
    facts = (_facts_line(*item) for item in record.facts.items())
    lines = [HEADER, *facts, *({"note": note} for note in record.notes), *record.to_dicts()]
    path.write_text("".join(_dump(line) + "\n" for line in lines), encoding="utf-8")


def read(path: Path) -> Record:
    if not path.is_file():
        raise InputError(f"Record.read(): there is no file {str(path)!r}.")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    lines, tail = text.split("\n")[:-1], text.rpartition("\n")[2]
    if not lines:
        raise InputError(f"Record.read(): {str(path)!r} holds no record: it has no complete line.")
    _check_header("Record.read", path, lines[0])
    notes = []
    if tail:
        notes.append(
            f"{path.name}: the last line was cut short and is left out; the {len(lines) - 1} before it are whole."
        )
        warnings.warn(f"Record.read(): {notes[0]}", stacklevel=3)
    rows: list[dict[str, Any]] = []
    facts: dict[tuple[str, str], Facts] = {}
    for number, line in enumerate(lines[1:], 2):
        found = _load(path, number, line)
        if "facts" in found:
            facts[found["layer"], found["kind"]] = Facts(**found["facts"])
        elif "note" in found:
            notes.append(found["note"])
        else:
            rows.append(found)
    return Record(_entries(rows), facts, notes)


def to_arrow(record: Record, missing: MissingExtra) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise missing from None
    rows = record.to_dicts()
    names = list(dict.fromkeys(name for row in rows for name in row)) or list(KEYS)
    types = {"step": pyarrow.int64(), "layer": pyarrow.string(), "kind": pyarrow.string(), "head": pyarrow.int32()}
    columns = [
        pyarrow.array([row.get(name) for row in rows], types.get(name, pyarrow.float64()), from_pandas=False)
        for name in names
    ]
    held = {**HEADER, "facts": [_facts_line(*item) for item in record.facts.items()], "notes": record.notes}
    return pyarrow.table(columns, names=names).replace_schema_metadata({SCHEMA: json.dumps(held)})


def _read_parquet(path: Path) -> Record:
    try:
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra(
            "Record.read(): Parquet needs pyarrow, which is not installed. Type pip install 'attemper[record]'."
        ) from None
    table = parquet.read_table(path)
    held = (table.schema.metadata or {}).get(SCHEMA.encode())
    _check_header("Record.read", path, "" if held is None else held.decode())
    assert held is not None
    found = json.loads(held)
    rows = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
    facts = {(line["layer"], line["kind"]): Facts(**line["facts"]) for line in found["facts"]}
    return Record(_entries(rows), facts, found["notes"])


def _check_header(where: str, path: Path, line: str) -> None:
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise InputError(
            f"{where}(): {str(path)!r} is not a record of attemper: it does not open with its schema. "
            "Write one with Record.write() or watch(path=…)."
        )
    if header.get("version") != VERSION:
        raise InputError(
            f"{where}(): {str(path)!r} has schema version {header.get('version')!r}; this attemper reads version {VERSION}. "
            "Read it with the version of attemper that wrote it, or choose another file."
        )


def _facts_line(place: tuple[str, str], facts: Facts) -> dict[str, Any]:
    return {"layer": place[0], "kind": place[1], "facts": facts.to_dict()}


def _dump(line: dict[str, Any]) -> str:
    plain = {name: _plain(value) for name, value in line.items()}
    return json.dumps(plain, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _load(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError
    except ValueError:
        raise InputError(
            f"Record.read(): line {number} of {str(path)!r} is not a row of a record. Remove that line to read the rest."
        ) from None
    numbers = {
        n: math.nan if v is None else WORDS.get(v, v)
        for n, v in found.items()
        if n not in ("layer", "kind", "facts", "note")
    }
    return {**found, **numbers}


def _entries(rows: list[dict[str, Any]]) -> Iterator[Entry]:
    """Rows back to entries: means times their counts are sums again."""
    for (step, layer, kind), group in groupby(rows, lambda row: (row["step"], row["layer"], row["kind"])):
        heads = list(group)
        column = {name: _column(heads, name) for name in heads[0] if name not in ("layer", "kind")}
        names = [name for name in column if name not in (*KEYS, "peak") and not name.startswith("grad_")]
        sums = torch.stack([_sum(column[name], column.get(_count(name))) for name in names], dim=-1)
        peaks = column.get("peak", torch.full((len(heads),), -math.inf, dtype=torch.float64))
        summary = HeadSummary((*names, "peak") if "peak" in column else tuple(names), sums, peaks)
        yield Entry(step, layer, kind, tuple(row["head"] for row in heads), summary, _gradients(column))


def _column(heads: list[dict[str, Any]], name: str) -> Tensor:
    return torch.tensor([row.get(name, math.nan) for row in heads], dtype=torch.float64)


def _sum(mean: Tensor, count: Tensor | None) -> Tensor:
    """A mean of no rows is NaN and their sum is 0; a NaN of some rows is a NaN that was measured."""
    return mean if count is None else (mean * count).masked_fill(count == 0, 0.0)


def _count(name: str) -> str:
    if name == "rows" or name.endswith("_rows"):
        return ""
    return {"evenness": "evenness_rows", "saturated": "saturable_rows"}.get(name, "rows")


def _gradients(column: dict[str, Tensor]) -> Tensor | None:
    if "grad_q_count" not in column:
        return None
    parts = []
    for name in ("q", "k"):
        count = column[f"grad_{name}_count"]
        rms, median = column[f"grad_{name}_rms"], column[f"grad_{name}_median"]
        parts += [count, _sum(rms.square(), count), _sum(median, count)]
    return torch.stack(parts, dim=-1)
