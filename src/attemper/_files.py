"""Files: checked before the work and written whole; rows as JSON, CSV and Parquet; files of lines that survive a kill.

check, save                            -o: refuse what cannot be written; write to another name, then rename
finite, json_text, json_bytes,
csv_bytes, parquet_bytes, columns      plain data and rows as bytes
load                                   an optional package, or the pip command that installs it
open_lines, lock, append,
end_of_last_line                       files of lines: one writer at a time, a line whole or not at all
"""

from __future__ import annotations

import contextlib
import csv
import errno
import importlib
import io
import json
import math
import os
import secrets
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import InputError, MissingExtra, out_of_memory

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

CHUNK = 1 << 16
NEW: set[str] = set()
"""Files that did not exist when they were checked: writing them must not replace a file that was made since."""
PIP_NAMES = {"PIL": "Pillow"}  # of packages that are imported by another name
OLDEST = {"transformers": (4, 48)}
"""The oldest versions that work; pyproject.toml has them too."""


def check(path: Path | None, suffixes: tuple[str, ...], force: bool) -> None:
    """Refuse a file that cannot or should not be written, before the work."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" if len(suffixes) > 1 else suffixes[0]
        raise InputError(f"-o must end in {known}; got {path.name!r}. Use -o out{suffixes[0]}, for example.")
    try:
        if not path.parent.is_dir():
            raise InputError(f"-o: there is no folder {str(path.parent)!r}. Make it first.")
        mode = _mode(path)
    except OSError as error:  # a name too long for the disk, links that lead to one another, a folder one may not enter
        raise _unwritable(path, error) from None
    if mode is not None and stat.S_ISDIR(mode):
        raise InputError(f"-o: {str(path)!r} is a folder. Choose another file.")
    if mode is not None and not stat.S_ISREG(mode):  # a file moved onto a device would replace it, for everybody
        raise InputError(f"-o: {str(path)!r} is a device, a pipe or a socket. Choose another file.")
    if mode is not None and not force:
        raise InputError(f"-o: {str(path)!r} already exists. Add --force to overwrite it, or choose another file.")
    (NEW.discard if force else NEW.add)(os.path.realpath(path))
    _write_and_rename(path, b"", keep=False)  # only this shows whether permissions, names and special folders allow it


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"-o: cannot write {str(path)!r}: {error.strerror}. Choose another file.")


def save(path: Path, content: bytes, failed: Callable[[Path, OSError], InputError] = _unwritable) -> None:
    """Write to another name in the same folder, then rename: an existing file stays until the new one is complete on the disk."""
    _write_and_rename(path, content, keep=True, failed=failed)


def _mode(path: Path) -> int | None:
    """The mode of the file at a path, links followed; None: there is none."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _write_and_rename(
    path: Path, content: bytes, keep: bool, failed: Callable[[Path, OSError], InputError] = _unwritable
) -> None:
    target = Path(os.path.realpath(path))  # a link stays, and its target is replaced
    part = target.with_name(f".attemper-{secrets.token_hex(4)}.part")
    try:
        mode = _mode(path)
        with open(part, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep:
            if mode is not None:
                part.chmod(stat.S_IMODE(mode))  # the new file has the permissions of the old one
            if str(target) in NEW:
                _make(part, target, path)
            else:
                os.replace(part, target)
    except OSError as error:
        raise failed(path, error) from None
    finally:  # after Ctrl-C too; on a read-only disk, removing a file that does not exist fails as well
        with contextlib.suppress(OSError):
            part.unlink()


def _make(part: Path, target: Path, path: Path) -> None:
    """Give a file its name, unless another run has made a file of that name since the check."""
    NEW.discard(str(target))
    try:
        os.link(part, target)
    except FileExistsError:
        raise InputError(
            f"-o: another program wrote {str(path)!r} while this one worked, so it was not replaced. Type the command again "
            "with --force to overwrite it, or choose another file."
        ) from None
    except OSError:  # a file system without links
        os.replace(part, target)


def finite(value: Any, unpack: Callable[[Any], Any] = lambda value: value) -> Any:
    """Plain data with None for NaN and the infinities, which JSON does not have; ``unpack`` turns objects into plain data."""
    value = unpack(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: finite(part, unpack) for name, part in value.items()}
    return [finite(part, unpack) for part in value] if isinstance(value, list | tuple) else value


def json_text(document: Any, indent: int | None = None) -> str:
    """One strict JSON document."""
    return json.dumps(finite(document), indent=indent, ensure_ascii=False, allow_nan=False)


def json_bytes(document: Any) -> bytes:
    """A JSON file for people and programs: indented by one space."""
    return f"{json_text(document, indent=1)}\n".encode()


def columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every column of the rows, in the order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))


def csv_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows as CSV; a column that a row does not have is empty.

    A text that a spreadsheet would run as a formula begins with an apostrophe: names and tokens may come from an untrusted model.
    """
    sheet = io.StringIO()
    writer = csv.DictWriter(sheet, columns(rows), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _harmless(cell) if isinstance(cell, str) else cell for name, cell in row.items()})
    return sheet.getvalue().encode()


def _harmless(cell: str) -> str:
    cell = cell.replace("\r", "\n")  # which csv quotes; after a bare return a reader begins another row
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\n")) else cell


def parquet_bytes(rows: Sequence[Mapping[str, Any]], extra: str) -> bytes:
    """Rows as Parquet, which needs pyarrow; ``extra`` is the extra of attemper that has it."""
    arrow, parquet = (load("-o *.parquet", package, extra) for package in ("pyarrow", "pyarrow.parquet"))
    sink = io.BytesIO()
    parquet.write_table(arrow.table({name: [row.get(name) for row in rows] for name in columns(rows)}), sink)
    return sink.getvalue()


def load(what: str, package: str, extra: str) -> Any:
    """Import a package that ``what`` needs, or raise with the pip command of the extra that installs it."""
    module, name = installed(what, package), package.split(".")[0]
    if module is None:
        raise MissingExtra(f"{what} needs {PIP_NAMES.get(name, name)}. Type pip install 'attemper[{extra}]'.")
    oldest = OLDEST.get(package)
    if oldest is not None and version_of(module) < oldest:
        raise InputError(
            f"{what} needs {name} {'.'.join(map(str, oldest))} or newer; {module.__version__} is installed. "
            f"Type pip install -U 'attemper[{extra}]'."
        )
    return module


def installed(what: str, package: str) -> Any:
    """Import a package that ``what`` needs; None if it is not installed; an error if its installation is broken."""
    name = package.split(".")[0]
    try:
        importlib.import_module(name)
        return importlib.import_module(package)
    except Exception as error:  # an installation that is broken raises more than ImportError
        if out_of_memory(error):
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        words = " ".join(str(error).split())[:400].rstrip(".")
        raise MissingExtra(
            f"{what} needs {name}, which is installed but cannot be imported: {type(error).__name__}: {words}. Reinstall "
            f"it; python -c 'import {package}' shows the whole error."
        ) from error


def version_of(package: Any) -> tuple[int, ...]:
    """The first two numbers of a package's version."""
    return tuple(map(int, str(package.__version__).split(".")[:2]))


def open_lines(path: Path) -> int:
    """A file descriptor to read lines from and append them to; the file is created if it does not exist."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)


def lock(file: int, wait: bool = True) -> bool:
    """Lock an open file until it is closed; False if another process holds the lock and ``wait`` is False.

    Where the system or the file system has no locks, nothing is locked.
    """
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        except OSError:
            pass
    return True


def append(file: int, text: bytes, sync: bool = False) -> None:
    """Append to a file opened for appending, whole or not at all: a write that fails is undone, and raises.

    ``sync`` waits until it is on the disk.
    """
    before = os.fstat(file).st_size
    try:
        rest = memoryview(text)
        while rest:  # a nearly full disk takes a part, and fails only at the rest
            count = os.write(file, rest)
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest = rest[count:]
        if sync:
            os.fsync(file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.ftruncate(file, before)
        raise


def end_of_last_line(file: int) -> int:
    """Where the last whole line of an open file ends; the rest was cut short by a kill, and may be truncated."""
    end = os.fstat(file).st_size
    while end:
        start = max(0, end - CHUNK)
        os.lseek(file, start, os.SEEK_SET)
        newline = os.read(file, end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
