"""The parts of `attemper scan` between parsing and printing: check the options, read the texts, decide how it exits."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._display import plural
from ..errors import InputError, nearest
from .input import pipes
from .input.batch import check_texts
from .input.batch import make as make
from .input.model import load as load
from .result import check_output
from .run import run as run
from .settled import parsed as parsed
from .show import baseline as baseline
from .what_if import check_rules

FAILING = ("note", "warn", "error", "critical", "diverging")
PATIENCE = 1.0  # seconds to wait for a stdin that no option names
LARGEST_TEXT = 2**26  # bytes of a text; /dev/zero has no end


def check(
    fail_on: str | None, output: Path | None, force: bool, what_if: str | None, attention: bool, as_json: bool
) -> list[str]:
    """Refuse wrong options before the work; returns the rules of --what-if."""
    if fail_on is not None and fail_on not in FAILING:
        raise InputError(f"scan: unknown --fail-on {fail_on!r}. {nearest(fail_on, FAILING)}")
    check_output(output, force)
    rules = [word.strip() for word in (what_if or "").split(",") if word.strip()]
    if what_if is not None and not rules:
        raise InputError("scan: --what-if needs the names of rules. Type --what-if none,dk.")
    check_rules(rules)
    if attention and not as_json and (output is None or output.suffix.lower() not in (".json", ".html")):
        raise InputError(
            "scan: --attention puts the weights into the JSON. Add --json or -o FILE.json, or leave it out."
        )
    return rules


def fails(document: dict[str, Any], level: str | None) -> str | None:
    """Why --fail-on fails, or None: a finding at the level or above (with a baseline, a new or worse one); nothing was judged;
    or notes could not be compared."""
    if level is None:
        return None
    if not document["verdict"]["judged"]:
        return "nothing was judged, so --fail-on cannot pass"
    counted = document["baseline"]["worse"] if "baseline" in document else document["findings"]
    if any(finding["level"] in FAILING[FAILING.index(level) :] for finding in counted):
        return f"a finding is {'new or worse, and ' if 'baseline' in document else ''}at {level!r} or above"
    unknown = len(document["baseline"]["uncompared"]) if "baseline" in document else 0
    if level == "note" and unknown:
        return (
            f"--fail-on note cannot pass: the older scan used other texts, so {plural(unknown, 'note')} could not be compared, "
            "only scales and findings at warn or above. Scan the same texts, or type --fail-on warn"
        )
    return None


def read_texts(texts: Sequence[str], files: Sequence[str], others: bool, progress: pipes.Progress) -> list[str]:
    """The texts of the command line, then those of files, each file one text; ``-`` is stdin, which is also read if there is no
    other input."""
    decoded = [text.encode("utf-8", "replace").decode() for text in texts]  # an argument may hold invalid bytes
    if not texts and not files and not others and is_piped():
        decoded = [
            text for text in (_read_text("-", progress),) if text
        ]  # an empty pipe, as under a scheduler, is not a text
    decoded += [_read_text(name, progress) for name in files]
    check_texts(decoded)
    return decoded


def _read_text(name: str, progress: pipes.Progress) -> str:
    if name == "-" and sys.stdin is None:
        raise InputError("scan: --file -: stdin is closed, so there is nothing to read. Pipe a text in.")
    try:
        most = LARGEST_TEXT + 1
        raw = (
            pipes.read_stdin(most, progress) if name == "-" else pipes.read(Path(name), most, "scan: --file", progress)
        )
        if len(raw) > LARGEST_TEXT:
            raise InputError(f"scan: --file {name!r} has over {LARGEST_TEXT:,} bytes. Give a shorter text.")
        return raw.decode("utf-8-sig").strip()
    except OSError as error:
        raise InputError(f"scan: --file: cannot read {name!r}: {error.strerror}. Give a text file.") from None
    except UnicodeDecodeError:
        raise InputError(f"scan: --file {name!r} is not UTF-8 text. Give a text file.") from None


def is_piped() -> bool:
    """Whether stdin is a file, or a pipe that has data or has ended; a silent pipe is not read."""
    try:
        descriptor = sys.stdin.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode):
            return True
        return stat.S_ISFIFO(mode) and bool(select.select([descriptor], [], [], PATIENCE)[0])
    except (AttributeError, OSError, ValueError):  # no stdin at all, one without a descriptor, a pipe on Windows
        return False
