"""What changed since an older scan: findings, scales and signs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...health import LEVELS
from ...report import OUTDATED, is_outdated
from ..document import SCHEMA, Baseline, Json, plain
from ..input import pipes

FACTOR = 1.5
"""A sign has moved if it is this many times larger or smaller."""
MOVING = {"peak": 1.0, "effective_keys": 0.5, "variance": 0.25, "entropy": 0.1}
"""The signs that are compared, and the least difference that counts, in addition."""

RECORD = b'{"schema": "attemper.record"'  # how the lines of a record begin
LARGEST = 2**30  # bytes; with --attention a scan of a long text has a few hundred million

HeadKey = tuple[str, str, int | None]


def read(path: Path, progress: pipes.Progress = lambda words: None) -> Json:
    """An older document, from an untrusted file; ``progress`` gets what it waits for."""
    document: Json
    try:
        raw = pipes.read(path, LARGEST + 1, "--baseline:", progress)
        if len(raw) > LARGEST:
            raise InputError(f"--baseline: {str(path)!r} is too large for a scan. Give an older scan's JSON.")
        document = json.loads(raw.decode("utf-8"))
    except InputError:
        raise
    except OSError as error:
        raise InputError(
            f"--baseline: cannot read {str(path)!r}: {error.strerror}. Give an older scan's JSON."
        ) from None
    except (ValueError, RecursionError):
        if raw.startswith(RECORD):
            raise InputError(
                f"--baseline: {str(path)!r} is the record of a watch, not a scan; attemper report shows it. "
                "Make a baseline with attemper scan -o old.json."
            ) from None
        raise InputError(f"--baseline: {str(path)!r} is not JSON. Make one with attemper scan -o old.json.") from None
    named = document.get("schema") if isinstance(document, dict) else None
    if named != SCHEMA:
        raise InputError(
            f"--baseline: {str(path)!r} must be a scan with schema {SCHEMA!r}; it has {named!r}. "
            "Make one with attemper scan -o old.json."
        )
    if is_outdated(document):
        raise InputError(f"--baseline: {str(path)!r} {OUTDATED}. Scan the older model again with -o old.json.")
    if not _is_whole(document):
        raise InputError(f"--baseline: {str(path)!r} is damaged: parts of the scan are missing. Make it again.")
    return document


def compare(old: Json, new: Json, name: str) -> Json:
    """What changed since an older document, as plain data; ``name`` is the file of the older one."""
    same = _texts(old) == _texts(new)
    # what a head does depends on the text: with other texts only faults can be compared
    least = LEVELS.index("healthy" if same else "warn")
    before, after = _worst(old["findings"]), _worst(new["findings"])
    shown_before, shown_after = (
        {about: finding for about, finding in some.items() if _level(finding) >= least} for some in (before, after)
    )
    changed = [about for about in after if about in before and _level(after[about]) != _level(before[about])]
    moved = list(_moved(old, new)) if same else []
    comparison = Baseline(
        file=name,
        created=old["created"],
        differences=list(_differences(old, new)),
        new=[finding for about, finding in shown_after.items() if about not in before],
        worse=[
            finding
            for about, finding in shown_after.items()
            if about not in before or _level(finding) > _level(before[about])
        ],
        levels=[
            {"before": before[about], "after": after[about]}
            for about in changed
            if about in shown_before or about in shown_after
        ],
        gone=[finding for about, finding in shown_before.items() if about not in after],
        uncompared=[
            finding
            for about, finding in after.items()
            if not same and finding["level"] == "note" and about not in before
        ],
        scales=list(_scales(old, new)),
        factor=FACTOR,
        compared=len(_both(old, new)) if same else 0,
        moved=sorted(moved, key=lambda finding: -max(finding["times"], 1 / finding["times"])),
    )
    changes: Json = plain(comparison)
    return changes


def _worst(findings: Iterable[Json]) -> dict[tuple[Any, ...], Json]:
    """The findings by name and place, each at its highest level."""
    worst: dict[tuple[Any, ...], Json] = {}
    for finding in findings:
        if _about(finding) not in worst or _level(finding) > _level(worst[_about(finding)]):
            worst[_about(finding)] = finding
    return worst


def _texts(document: Json) -> list[Any]:
    return [given["text"] for given in document["inputs"]]


def _level(finding: Json) -> int:
    return LEVELS.index(finding["level"])


def _differences(old: Json, new: Json) -> Iterator[str]:
    """Why the two scans may differ although the model has not changed."""
    before, after = old["model"], new["model"]
    digests = before["sha256"], after["sha256"]
    known = None not in digests
    if before["class"] != after["class"] or (before["name"] != after["name"] and known and digests[0] != digests[1]):
        yield f"the older scan is of another model: {before['name']} ({before['class']})."
    elif known and digests[0] != digests[1]:
        yield "the weights have changed since."
    elif before["name"] != after["name"] and not known:
        yield f"the older scan calls the model {before['name']}; whether its weights are the same is not known."
    if before["dtype"] != after["dtype"]:
        yield f"the older scan ran in {before['dtype']}, this one in {after['dtype']}."
    if _texts(old) != _texts(new):
        yield "the older scan used other texts: scales and findings at warn or above are compared, notes and signs are not."
    wanted, both = sum(map(_is_known, new["heads"])), len(_both(old, new))
    if both < wanted:
        yield f"the older scan has no signs for {wanted - both} of {wanted} heads: they are not compared."
    for name in ("attemper", "torch"):
        if old[name] != new[name]:
            yield f"the older scan was made with {name} {old[name]}, this one with {new[name]}."


def _scales(old: Json, new: Json) -> Iterator[Json]:
    before = {(layer["layer"], layer["kind"]): layer["scale"].get("applied") for layer in old["layers"]}
    for layer in new["layers"]:
        place = (layer["layer"], layer["kind"])
        was, now = before.get(place), layer["scale"].get("applied")
        if place in before and was != now and (was is None or now is None or abs(was - now) > 1e-3 * abs(was)):
            yield {"layer": layer["layer"], "kind": layer["kind"], "before": was, "after": now}


def _both(old: Json, new: Json) -> list[tuple[Json, Json]]:
    """The heads that have signs in both."""
    before = {_place(row): row for row in old["heads"] if _is_known(row)}
    return [(before[_place(row)], row) for row in new["heads"] if _place(row) in before and _is_known(row)]


def _moved(old: Json, new: Json) -> Iterator[Json]:
    for then, row in _both(old, new):
        for sign, least in MOVING.items():
            was, now = then.get(sign), row.get(sign)
            if not isinstance(was, (int, float)) or not isinstance(now, (int, float)) or was <= 0 or now <= 0:
                continue
            times = now / was
            if max(times, 1 / times) > FACTOR and abs(now - was) > least:
                where = {name: row[name] for name in ("layer", "kind", "head")}
                yield {**where, "sign": sign, "before": was, "after": now, "times": times}


def _about(finding: Json) -> tuple[Any, ...]:
    return tuple(finding[name] for name in ("name", "fault", "layer", "kind", "head"))


def _place(row: Json) -> HeadKey:
    return row["layer"], row["kind"], row["head"]


def _is_known(row: Json) -> bool:
    """Whether a head has a sign that can be compared; NaN is null."""
    return any(row.get(sign) is not None for sign in MOVING)


def _check_numbers(*values: object) -> None:
    """Raise for what is neither a number nor None."""
    for value in values:
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError


def _is_whole(document: Json) -> bool:
    """Whether a document has every part that is compared, as hashable keys and numbers."""
    try:
        for name in ("name", "class", "sha256", "dtype"):
            document["model"][name]
        for name in ("attemper", "torch", "created"):
            document[name].strip()
        for finding in document["findings"]:
            hash((_about(finding), _level(finding)))
            finding["message"].strip()
            _check_numbers(finding["head"], finding["value"], finding["threshold"])
        for row in document["heads"]:
            hash(_place(row))
            _check_numbers(*(row[sign] for sign in MOVING))
        for layer in document["layers"]:
            hash((layer["layer"], layer["kind"]))
            _check_numbers(layer["scale"].get("applied"))
        hash(tuple(_texts(document)))
    except (KeyError, TypeError, AttributeError, ValueError):
        return False
    return True
