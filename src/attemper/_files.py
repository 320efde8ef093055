"""Files written for people: refused before the work where they could not or should not be written, then put there whole."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import InputError


def check(path: Path | None, suffixes: tuple[str, ...], force: bool) -> None:
    """Refuse a file that could not or should not be written, before the work and not after it."""
    if path is None:
        return
    if path.suffix not in suffixes:
        raise InputError(f"-o must end in {', '.join(suffixes[:-1])} or {suffixes[-1]}; got {path.name!r}.")
    if not path.parent.is_dir():
        raise InputError(f"-o: there is no folder {str(path.parent)!r}. Make it first.")
    if path.is_dir():
        raise InputError(f"-o: {str(path)!r} is a folder. Choose another file.")
    if path.exists() and not force:
        raise InputError(f"-o: {str(path)!r} is there already. Add --force to overwrite it, or choose another file.")


def save(path: Path, content: bytes) -> None:
    """Write beside, then move into place: a file that was there stays until the new one is whole."""
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        os.replace(part, target)
    except OSError as error:
        raise InputError(f"-o: cannot write {str(path)!r}: {error.strerror}. Choose another file.") from None
    finally:
        part.unlink(missing_ok=True)
