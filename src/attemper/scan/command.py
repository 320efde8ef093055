"""What `attemper scan` does between parsing and printing: check the options, read the inputs, scan, compare."""

from __future__ import annotations

import os
import select
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._display import plural
from ..errors import InputError, nearest
from .document import SCHEMA
from .input import pipes
from .input.batch import check_texts, make
from .input.model import load
from .result import Scan
from .run import run
from .show import baseline, output
from .what_if import check_rules

FAILING = ("note", "warn", "act", "critical", "diverging")
PATIENCE = 1.0  # seconds to wait for a stdin that no option names
LARGEST_TEXT = 2**26  # bytes of a text; /dev/zero has no end


@dataclass(frozen=True)
class ScanOptions:
    """The options of the command, as typed."""

    model: str | None = None
    texts: Sequence[str] = ()
    files: Sequence[str] = ()
    images: Sequence[str] = ()
    sounds: Sequence[str] = ()
    task: str | None = None
    truncate: bool = False
    token: str | None = None
    what_if: str | None = None
    deep: bool = False
    as_json: bool = False
    attention: bool = False
    baseline: Path | None = None
    output: Path | None = None
    force: bool = False
    fail_on: str | None = None
    allow_download: bool = False
    dtype: str | None = None
    device: str = "auto"


def answer(asked: ScanOptions, progress: Callable[[str], object] = lambda words: None) -> Scan:
    """The scan for some options; wrong options are refused before the work. ``progress`` is called with what is being done."""
    if asked.fail_on is not None and asked.fail_on not in FAILING:
        raise InputError(f"scan: unknown --fail-on {asked.fail_on!r}. {nearest(asked.fail_on, FAILING)}")
    output.check(asked.output, asked.force)
    older = None if asked.baseline is None else baseline.read(asked.baseline, SCHEMA, progress)
    rules = [word.strip() for word in (asked.what_if or "").split(",") if word.strip()]
    if asked.what_if is not None and not rules:
        raise InputError("scan: --what-if needs the names of rules. Type --what-if none,dk.")
    check_rules(rules)
    suffix = "" if asked.output is None else asked.output.suffix.lower()
    if asked.attention and not asked.as_json and suffix not in (".json", ".html"):
        raise InputError(
            "scan: --attention puts the weights into the JSON. Add --json or -o FILE.json, or leave it out."
        )
    given = read_texts(asked.texts, asked.files, progress)
    if not given and not asked.images and not asked.sounds:
        given = read_texts((), ("-",), progress) if is_piped() else []
        given = [text for text in given if text]  # an empty pipe, as under a scheduler, is not a text
    check_texts(given)
    loaded = load(
        asked.model,
        task=asked.task,
        dtype=asked.dtype,
        device=asked.device,
        allow_download=asked.allow_download,
        progress=progress,
    )
    progress("reading the inputs")
    inputs = make(
        loaded, texts=given, images=asked.images, sounds=asked.sounds, truncate=asked.truncate, progress=progress
    )
    pictures = asked.attention or suffix == ".html"
    progress("running the model")
    found = run(loaded, inputs, rules=rules, token=asked.token, pictures=pictures, deep=asked.deep, progress=progress)
    if older is not None and asked.baseline is not None:
        found.document["baseline"] = baseline.compare(older, found.document, asked.baseline.name)
    return found


def fails(document: dict[str, Any], level: str | None) -> str | None:
    """Why --fail-on fails: a finding at a level or above, which with a baseline must be new or worse; or nothing was judged; or
    notes could not be compared. None: nothing fails."""
    if level is None:
        return None
    if not document["verdict"]["judged"]:
        return "nothing was judged, so --fail-on cannot pass"
    counted = document["baseline"]["worse"] if "baseline" in document else document["findings"]
    if any(one["level"] in FAILING[FAILING.index(level) :] for one in counted):
        return f"a finding is {'new or worse, and ' if 'baseline' in document else ''}at {level!r} or above"
    unknown = len(document["baseline"]["uncompared"]) if "baseline" in document else 0
    if level == "note" and unknown:
        return (
            f"--fail-on note cannot pass: the older scan used other texts, so {plural(unknown, 'note')} could not be compared, "
            "only scales and findings at warn or above. Scan the same texts, or type --fail-on warn"
        )
    return None


def read_texts(texts: Sequence[str], files: Sequence[str], progress: pipes.Progress) -> list[str]:
    """The texts of the command line, then those of files, each file one text; ``-`` is stdin."""
    found = [text.encode("utf-8", "replace").decode() for text in texts]  # an argument may hold invalid bytes
    for name in files:
        if name == "-" and sys.stdin is None:
            raise InputError("scan: --file -: stdin is closed, so there is nothing to read. Pipe a text in.")
        try:
            if name == "-":
                raw = pipes.read_stdin(LARGEST_TEXT + 1, progress)
            else:
                raw = pipes.read(Path(name), LARGEST_TEXT + 1, "scan: --file", progress)
            if len(raw) > LARGEST_TEXT:
                raise InputError(f"scan: --file {name!r} has over {LARGEST_TEXT:,} bytes. Give a shorter text.")
            found.append(raw.decode("utf-8-sig").strip())
        except OSError as error:
            raise InputError(f"scan: --file: cannot read {name!r}: {error.strerror}. Give a text file.") from None
        except UnicodeDecodeError:
            raise InputError(f"scan: --file {name!r} is not UTF-8 text. Give a text file.") from None
    return found


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
