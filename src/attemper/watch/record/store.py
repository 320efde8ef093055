"""Store: write a record to a JSONL or Parquet file, which hold their schema, and read it; write its rows as CSV."""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

from ... import _files
from ...errors import InputError
from .entry import KEYS
from .jsonl import (
    HEADER,
    OPENING,
    SCHEMA,
    ParsedLines,
    WrittenStep,
    check_header,
    dump,
    info_line,
    logged_line,
    row_lines,
)
from .record import Record

SUFFIXES = (".jsonl", ".parquet", ".csv")
EXTRA = "record"  # of attemper: pandas and pyarrow
DOCUMENT = re.compile(rb'\s*\{\s*"schema":\s*"(attemper\.\w+/\d+)"')  # how the documents of scan and report begin
AFTER_A_STEP = "If the run has just begun, try again after its first measured step; else give another file."


def to_path(where: str, path: object) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(
            f"{where}(): `path` must be a string or a Path; got {type(path).__name__} {path!r}. Use 'run.jsonl'."
        )
    return Path(os.fsdecode(path))


def check_path(where: str, path: Path, suffixes: tuple[str, ...] = SUFFIXES, name: str = "path") -> None:
    if path.suffix not in suffixes:
        known = " or ".join(filter(None, (", ".join(suffixes[:-1]), suffixes[-1])))
        raise InputError(
            f"{where}(): `{name}` must end in {known}; got {path.name!r}. Use 'run{suffixes[0]}', for example."
        )
    if not path.absolute().parent.is_dir():
        raise InputError(f"{where}(): there is no folder {str(path.parent)!r} for `{name}`. Make it first.")
    if path.is_dir():
        raise InputError(f"{where}(): `{name}` must be a file; {str(path)!r} is a folder. Choose another name.")


def write(record: Record, path: Path) -> None:
    check_path("Record.write", path)
    if path.suffix == ".parquet":
        table, sink = to_arrow(record, "Record.write(): Parquet"), io.BytesIO()
        _files.load("Record.write(): Parquet", "pyarrow.parquet", EXTRA).write_table(table, sink)
        content = sink.getvalue()
    elif path.suffix == ".csv":
        content = _files.csv_bytes(record.to_dicts()) if len(record) else f"{','.join(KEYS)}\n".encode()
    else:
        info = (info_line(*item) for item in record.info.items())
        lines = [HEADER, *info, *({"note": note} for note in record.notes), *row_lines(record.entries)]
        lines += [logged_line(*item) for item in record.logged.items()]
        content = "".join(map(dump, lines)).encode()
    _files.save(path, content, _unwritable)


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"Record.write(): {str(path)!r} could not be written: {error.strerror or error}. "
        "Nothing was changed. Free some disk space, or choose another path."
    )


def read(path: Path, where: str = "Record.read()") -> Record:
    """The record of a file; ``where`` begins every error and warning."""
    _check_readable(path, where)
    if path.suffix == ".csv":
        raise InputError(
            f"{where}: {str(path)!r} is a table of rows, without the info and notes of a record. Read the .jsonl or "
            ".parquet file of the same run, or the table itself with pandas.read_csv()."
        )
    with path.open("rb") as file:
        start = file.read(_files.CHUNK)
    if not start:
        raise InputError(f"{where}: {str(path)!r} is empty. {AFTER_A_STEP}")
    if document := DOCUMENT.match(start):
        raise InputError(
            f"{where}: {str(path)!r} is not a record but a document with the schema {document[1].decode()!r}. "
            "Read the .jsonl or .parquet file that a watch or Record.write() wrote."
        )
    is_parquet = start.startswith(b"PAR1") or (path.suffix == ".parquet" and not start.startswith(b"{"))
    return _read_parquet(path, where) if is_parquet else _read_lines(path, where)


def _check_readable(path: Path, where: str) -> None:
    if path.is_dir():
        there = sorted(str(file) for file in path.iterdir() if file.suffix in (".jsonl", ".parquet"))
        files = (
            f"Give one of its files: {', '.join(map(repr, there[:3]))}."
            if there
            else "Give the file that watch(path=…) wrote: here is none."
        )
        raise InputError(f"{where}: {str(path)!r} is a folder, and a record is a file. {files}")
    if str(path) == "-":
        raise InputError(
            f"{where}: a record is read from a file, not from stdin. Save it, and give its name, such as 'run.jsonl'."
        )
    if not path.exists():
        raise InputError(f"{where}: there is no file {str(path)!r}. Check the path and the folder you are in.")
    if not path.is_file():
        raise InputError(
            f"{where}: {str(path)!r} is a pipe or a device, and a record is a file. Save it first, and give its name."
        )


def _read_lines(path: Path, where: str) -> Record:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines, tail = text.split("\n")[:-1], text.rpartition("\n")[2]
    if not lines and OPENING.decode().startswith(tail):
        raise InputError(f"{where}: {str(path)!r} holds no record: it has no complete line. {AFTER_A_STEP}")
    check_header(where, path, (lines or [tail])[0])
    held = ParsedLines()
    for number, line in enumerate(lines[1:], 2):
        held.take(number, line)
    cut = f"the last line was cut short and is left out; the {len(lines) - 1} before it are complete."
    return _to_record(path, where, held, [cut] if tail else [])


def _damaged(bad: list[int]) -> str:
    if len(bad) == 1:
        return f"line {bad[0]} is not a row of a record and is left out."
    return f"lines {_some(bad)} are not rows of a record and are left out."


def _cut(steps: list[WrittenStep], held: ParsedLines) -> str:
    if len(steps) == 1:
        step = steps[0]
        return f"step {step.step} was cut short, with {held.lines[step]} of its {step.rows} rows, and is left out."
    return f"steps {_some([step.step for step in steps])} were cut short and are left out."


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")


def _to_record(path: Path, where: str, held: ParsedLines, left_out: list[str]) -> Record:
    """The record. What was left out is a warning and a note; rows that were written again are a note."""
    if held.bad:
        left_out.append(_damaged(held.bad))
    cut = held.leave_out_cut()
    if cut:
        left_out.append(_cut(cut, held))
    notes = [f"{path.name}: {sentence}" for sentence in left_out]
    for note in notes:
        warnings.warn(f"{where}: {note}", stacklevel=5)
    entries, dropped = held.entries()
    if dropped:
        notes.append(f"{path.name}: {dropped} rows were written again later, by a resumed run or by two runs at once.")
    return Record(entries, held.info, [*notes, *held.notes], held.logged)


def to_arrow(record: Record, what: str) -> Any:
    pyarrow = _files.load(what, "pyarrow", EXTRA)
    rows = record.to_dicts()
    names = _files.columns(rows) or list(KEYS)
    types = {"step": pyarrow.int64(), "layer": pyarrow.string(), "kind": pyarrow.string(), "head": pyarrow.int32()}
    columns = [
        pyarrow.array([row.get(name) for row in rows], types.get(name, pyarrow.float64()), from_pandas=False)
        for name in names
    ]
    held = {
        **HEADER,
        "info": [info_line(*item) for item in record.info.items()],
        "logged": [logged_line(*item) for item in record.logged.items()],
        "notes": record.notes,
    }
    return pyarrow.table(columns, names=names).replace_schema_metadata({SCHEMA: json.dumps(held)})


def _read_parquet(path: Path, where: str) -> Record:
    pyarrow, parquet = (_files.load(f"{where}: Parquet", package, EXTRA) for package in ("pyarrow", "pyarrow.parquet"))
    try:
        table = parquet.read_table(path)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError):
        raise _damaged_parquet(path, where) from None
    metadata = (table.schema.metadata or {}).get(SCHEMA.encode(), b"").decode(errors="replace")
    check_header(where, path, metadata)
    header, held = json.loads(metadata), ParsedLines()
    info, logged, notes = (header.get(name, []) for name in ("info", "logged", "notes"))
    if not all(isinstance(part, list) for part in (info, logged, notes)):
        raise _damaged_parquet(path, where)
    for line in (*info, *logged, *({"note": note} for note in notes)):
        held.take(0, line)
    for number, row in enumerate(rows, 1):
        held.take(number, {name: value for name, value in row.items() if value is not None})
    return _to_record(path, where, held, [])


def _damaged_parquet(path: Path, where: str) -> InputError:
    return InputError(
        f"{where}: {str(path)!r} is not a Parquet file, or is damaged. Read the .jsonl file that it was made from."
    )
