"""Files of a record: JSON lines and Parquet, in and out; both say which schema they hold. journal.py appends."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import InputError, MissingExtra
from .lines import HEADER, SCHEMA, VERSION, Lines, Step, dump, facts_line, row_lines, to_entries
from .record import KEYS, Record

SUFFIXES = (".jsonl", ".parquet")
PIP = "Type pip install 'attemper[record]'."


def to_path(where: str, path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"{where}(): `path` must be a string or a Path; got {type(path).__name__} {path!r}.")
    return Path(os.fsdecode(path))


def check_path(where: str, path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> None:
    if path.suffix not in suffixes:
        raise InputError(f"{where}(): `path` must end in {' or '.join(suffixes)}; got {path.name!r}.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{where}(): there is no folder {str(path.parent)!r} for `path`. Make it first.")
    if path.is_dir():
        raise InputError(f"{where}(): `path` must be a file; {str(path)!r} is a folder.")


def check_header(where: str, path: Path, line: str) -> None:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
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


def write(record: Record, path: Path) -> None:
    check_path("Record.write", path)
    if path.suffix == ".parquet":
        table = to_arrow(record, MissingExtra(f"Record.write(): Parquet needs pyarrow, which is not installed. {PIP}"))
        from pyarrow import parquet

        _put(path, lambda part: parquet.write_table(table, part))
        return
    facts = (facts_line(*item) for item in record.facts.items())
    lines = [HEADER, *facts, *({"note": note} for note in record.notes), *row_lines(record.entries)]
    text = "".join(map(dump, lines)).encode()
    _put(path, lambda part: part.write_bytes(text))


def _put(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside, then move into place: a file that was there stays until the new one is whole."""
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, target)
    except OSError as error:
        raise InputError(
            f"Record.write(): {str(path)!r} could not be written: {error.strerror or error}. "
            "Nothing was changed; free some room, or choose another place."
        ) from error
    finally:
        part.unlink(missing_ok=True)


def read(path: Path) -> Record:
    if not path.is_file():
        raise InputError(f"Record.read(): there is no file {str(path)!r}.")
    return _read_parquet(path) if path.suffix == ".parquet" else _read_lines(path)


def _read_lines(path: Path) -> Record:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines, tail = text.split("\n")[:-1], text.rpartition("\n")[2]
    if not lines:
        raise InputError(f"Record.read(): {str(path)!r} holds no record: it has no complete line.")
    check_header("Record.read", path, lines[0])
    held = Lines()
    for number, line in enumerate(lines[1:], 2):
        held.take(number, line)
    said = []
    if tail:
        said.append(f"the last line was cut short and is left out; the {len(lines) - 1} before it are complete.")
    return _told(path, held, said)


def _numbered(bad: list[int]) -> str:
    if len(bad) == 1:
        return f"line {bad[0]} is no row"
    shown = ", ".join(map(str, bad[:10])) + (f" and {len(bad) - 10} more" if len(bad) > 10 else "")
    return f"lines {shown} are no rows"


def _cut(steps: list[Step], held: Lines) -> str:
    if len(steps) == 1:
        step = steps[0]
        return f"step {step.step} was cut short, with {held.lines[step]} of its {step.rows} rows, and is left out."
    shown = ", ".join(str(step.step) for step in steps[:10]) + (
        f" and {len(steps) - 10} more" if len(steps) > 10 else ""
    )
    return f"steps {shown} were cut short and are left out."


def _told(path: Path, held: Lines, said: list[str]) -> Record:
    """The record, with what was left out of it said: broken lines and steps aloud, rows that were written again in a note."""
    if held.bad:
        said.append(f"{_numbered(held.bad)} of a record and left out.")
    cut = held.leave_out_cut()
    if cut:
        said.append(_cut(cut, held))
    notes = [f"{path.name}: {sentence}" for sentence in said]
    for note in notes:
        warnings.warn(f"Record.read(): {note}", stacklevel=5)
    entries, dropped = to_entries(held.rows)
    if dropped:
        notes.append(
            f"{path.name}: {dropped} rows were written again later, by a run that was resumed or by two at once."
        )
    return Record(entries, held.facts, [*notes, *held.notes])


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
    held = {**HEADER, "facts": [facts_line(*item) for item in record.facts.items()], "notes": record.notes}
    return pyarrow.table(columns, names=names).replace_schema_metadata({SCHEMA: json.dumps(held)})


def _read_parquet(path: Path) -> Record:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtra(f"Record.read(): Parquet needs pyarrow, which is not installed. {PIP}") from None
    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError):
        raise InputError(
            f"Record.read(): {str(path)!r} is no Parquet file, or a damaged one. Read the .jsonl it was made from."
        ) from None
    metadata = (table.schema.metadata or {}).get(SCHEMA.encode(), b"").decode(errors="replace")
    check_header("Record.read", path, metadata)
    found, held = json.loads(metadata), Lines()
    for line in (*found.get("facts", ()), *({"note": note} for note in found.get("notes", ()))):
        held.take(0, line)
    for number, row in enumerate(table.to_pylist(), 1):
        held.take(number, {name: value for name, value in row.items() if value is not None})
    return _told(path, held, [])
