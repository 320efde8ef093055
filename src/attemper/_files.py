"""Files written for people: refused before the work where they could not or should not be written, then put there whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from .errors import InputError


def check(path: Path | None, suffixes: tuple[str, ...], force: bool) -> None:
    """Refuse a file that could not or should not be written, before the work and not after it."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        known = f"{', '.join(suffixes[:-1])} or {suffixes[-1]}" if len(suffixes) > 1 else suffixes[0]
        raise InputError(f"-o must end in {known}; got {path.name!r}.")
    try:
        if not path.parent.is_dir():
            raise InputError(f"-o: there is no folder {str(path.parent)!r}. Make it first.")
        mode = _mode(path)
    except OSError as error:  # a name too long for the disk, links that lead to one another, a folder one may not enter
        raise _unwritable(path, error) from None
    if mode is not None and stat.S_ISDIR(mode):
        raise InputError(f"-o: {str(path)!r} is a folder. Choose another file.")
    if mode is not None and not stat.S_ISREG(mode):  # a file moved onto a device would take its place, for everybody
        raise InputError(f"-o: {str(path)!r} is a device, a pipe or a socket. Choose another file.")
    if mode is not None and not force:
        raise InputError(f"-o: {str(path)!r} is there already. Add --force to overwrite it, or choose another file.")
    _beside(path, b"", keep=False)  # rights, full names and special folders show in no other way


def save(path: Path, content: bytes) -> None:
    """Write beside, then move into place: a file that was there stays until the new one is whole and on the disk."""
    _beside(path, content, keep=True)


def _mode(path: Path) -> int | None:
    """What is at a path, through links; None: nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _beside(path: Path, content: bytes, keep: bool) -> None:
    target = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
    part = target.with_name(f".attemper-{secrets.token_hex(4)}.part")
    try:
        mode = _mode(path)
        with open(part, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep:
            if mode is not None:
                part.chmod(stat.S_IMODE(mode))  # who may read the old one may read the new one, and nobody else
            os.replace(part, target)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:  # after Ctrl-C too; on a disk that is read-only taking away what is not there fails as well
        with contextlib.suppress(OSError):
            part.unlink()


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(f"-o: cannot write {str(path)!r}: {error.strerror}. Choose another file.")
