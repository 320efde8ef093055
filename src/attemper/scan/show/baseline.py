"""Baseline: what changed since an older scan: findings, scales and signs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...health import LEVELS
from ..document import Baseline, Json, plain
from ..input import pipes

FACTOR = 1.5
"""A sign has moved if it is this many times larger or smaller."""
MOVING = {"peak": 1.0, "effective_keys": 0.5, "variance": 0.25, "entropy": 0.1}
"""The signs that are compared, and by how much they must differ in addition."""

RECORD = b'{"schema": "attemper.record"'  # how the lines of a record begin
LARGEST = 2**30  # bytes; with --attention a scan of a long text has a few hundred million

HeadPlace = tuple[str, str, int | None]


def read(path: Path, schema: str, progress: pipes.Progress = lambda words: None) -> Json:
    """An older document, from an untrusted file that must name ``schema``; ``progress`` is called with what is waited for."""
    found: Json
    try:
        raw = pipes.read(path, LARGEST + 1, "--baseline:", progress)
        if len(raw) > LARGEST:
            raise InputError(f"--baseline: {str(path)!r} is too large for a scan. Give an older scan's JSON.")
        found = json.loads(raw.decode("utf-8"))
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
    named = found.get("schema") if isinstance(found, dict) else None
    if named != schema:
        raise InputError(
            f"--baseline: {str(path)!r} must be a scan with schema {schema!r}; it has {named!r}. "
            "Make one with attemper scan -o old.json."
        )
    if not _is_whole(found):
        raise InputError(f"--baseline: {str(path)!r} is damaged: parts of the scan are missing. Make it again.")
    return found


def compare(old: Json, new: Json, name: str) -> Json:
    """What changed since an older document, as plain data; ``name`` is the file of the older one."""
    same = _texts(old) == _texts(new)
    # what a head does depends on the text: with other texts only faults can be compared
    least = LEVELS.index("healthy" if same else "warn")
    before, after = _worst(old["findings"]), _worst(new["findings"])
    told_before, told_after = (
        {about: one for about, one in some.items() if _level(one) >= least} for some in (before, after)
    )
    changed = [about for about in after if about in before and _level(after[about]) != _level(before[about])]
    moved = list(_moved(old, new)) if same else []
    found = Baseline(
        file=name,
        created=old["created"],
        says=list(_differences(old, new)),
        new=[one for about, one in told_after.items() if about not in before],
        worse=[one for about, one in told_after.items() if about not in before or _level(one) > _level(before[about])],
        levels=[
            {"before": before[about], "after": after[about]}
            for about in changed
            if about in told_before or about in told_after
        ],
        gone=[one for about, one in told_before.items() if about not in after],
        uncompared=[one for about, one in after.items() if not same and one["level"] == "note" and about not in before],
        scales=list(_scales(old, new)),
        factor=FACTOR,
        compared=len(_both(old, new)) if same else 0,
        moved=sorted(moved, key=lambda one: -max(one["times"], 1 / one["times"])),
    )
    changes: Json = plain(found)
    return changes


def _worst(findings: Iterable[Json]) -> dict[tuple[Any, ...], Json]:
    """The findings by name and place, each at its highest level."""
    found: dict[tuple[Any, ...], Json] = {}
    for one in findings:
        if _about(one) not in found or _level(one) > _level(found[_about(one)]):
            found[_about(one)] = one
    return found


def _texts(document: Json) -> list[Any]:
    return [one["text"] for one in document["inputs"]]


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
        yield f"the model was called {before['name']} then; it is not known whether its weights are the same."
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
    before = {(one["layer"], one["kind"]): one["scale"].get("applied") for one in old["layers"]}
    for one in new["layers"]:
        place = (one["layer"], one["kind"])
        was, now = before.get(place), one["scale"].get("applied")
        if place in before and was != now and (was is None or now is None or abs(was - now) > 1e-3 * abs(was)):
            yield {"layer": one["layer"], "kind": one["kind"], "before": was, "after": now}


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


def _place(row: Json) -> HeadPlace:
    return row["layer"], row["kind"], row["head"]


def _is_known(row: Json) -> bool:
    """Whether a head has a sign that can be compared; NaN is null."""
    return any(row.get(sign) is not None for sign in MOVING)


def _numbers(*values: object) -> None:
    for value in values:
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError


def _is_whole(document: Json) -> bool:
    """Whether a document has every part that is compared."""
    try:
        for name in ("name", "class", "sha256", "dtype"):
            document["model"][name]
        for name in ("attemper", "torch", "created"):
            document[name].strip()
        hash(tuple((_about(one), _level(one)) for one in document["findings"]))
        for one in document["findings"]:
            one["says"].strip()
            _numbers(one["head"], one["value"], one["threshold"])
        hash(tuple(map(_place, document["heads"])))
        for row in document["heads"]:
            _numbers(*(row[sign] for sign in MOVING))
        hash(tuple((one["layer"], one["kind"]) for one in document["layers"]))
        _numbers(*(one["scale"].get("applied") for one in document["layers"]))
        hash(tuple(one["text"] for one in document["inputs"]))
    except (KeyError, TypeError, AttributeError, ValueError):
        return False
    return True
