"""Files written for people: refused before the work where they could not or should not be written, then put there whole."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InputError


def check(path: Path | None, suffixes: tuple[str, ...], force: bool) -> None:
    """Refuse a file that could not or should not be written, before the work and not after it."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise InputError(f"-o must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}; got {path.name!r}.")
    if not path.parent.is_dir():
        raise InputError(f"-o: there is no folder {str(path.parent)!r}. Make it first.")
    try:
        folder, there = path.is_dir(), path.exists()
    except OSError as error:  # a name too long for the disk
        raise _unwritable(path, error) from None
    if folder:
        raise InputError(f"-o: {str(path)!r} is a folder. Choose another file.")
    if there and not force:
        raise InputError(f"-o: {str(path)!r} is there already. Add --force to overwrite it, or choose another file.")
    _beside(path, b"", keep=False)  # rights, full names and special folders show in no other way


def save(path: Path, content: bytes) -> None:
    """Write beside, then move into place: a file that was there stays until the new one is whole."""
    _beside(path, content, keep=True)


def _beside(path: Path, content: bytes, keep: bool) -> None:
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        if keep:
            os.replace(part, target)
        else:
            part.unlink()
    except OSError as error:
        part.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"-o: cannot write {str(path)!r}: {error.strerror}. Choose another file.")
