"""baseline: what changed since an older scan: findings that are new or gone, scales, and signs that moved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..health import LEVELS

FACTOR = 1.5
"""A sign has moved when it is this many times what it was, or the other way round."""
MOVING = {"peak": 1.0, "effective_keys": 0.5, "variance": 0.25, "entropy": 0.1}
"""The signs that are compared, and by how much they must differ besides: half of nearly nothing is nothing."""

Document = dict[str, Any]
Place = tuple[str, str, int | None]


def read(path: Path, schema: str) -> Document:
    """An older document, from a file that may be anything.

    Args:
        path: what ``attemper scan --json`` or ``-o scan.json`` wrote.
        schema: the schema that it must name.
    """
    found: Document
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"--baseline: cannot read {str(path)!r}: {error.strerror}. Give an older scan's JSON."
        ) from None
    except (ValueError, RecursionError):
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


def compare(old: Document, new: Document, name: str) -> Document:
    """What changed, as plain data.

    Args:
        old: the older document.
        new: the one at hand.
        name: what the older one is called: its file.
    """
    same = [one["text"] for one in old["inputs"]] == [one["text"] for one in new["inputs"]]
    # what a head does depends on the text: of other texts only what is wrong can be compared
    before, after = (
        {_key(one): one for one in document["findings"] if same or LEVELS.index(one["level"]) >= LEVELS.index("warn")}
        for document in (old, new)
    )
    return {
        "file": name,
        "created": old["created"],
        "says": list(_differences(old, new)),
        "new": [one for key, one in after.items() if key not in before],
        "gone": [one for key, one in before.items() if key not in after],
        "scales": list(_scales(old, new)),
        "factor": FACTOR,
        "moved": sorted(
            _moved(old, new) if same else (), key=lambda one: -one["times"] if one["times"] > 1 else -1 / one["times"]
        ),
    }


def _differences(old: Document, new: Document) -> Iterator[str]:
    """Why the two may differ without anything having changed."""
    before, after = old["model"], new["model"]
    if before["name"] != after["name"] or before["class"] != after["class"]:
        yield f"the older scan is of another model: {before['name']} ({before['class']})."
    elif before["sha256"] and after["sha256"] and before["sha256"] != after["sha256"]:
        yield "the weights are others than then."
    if before["dtype"] != after["dtype"]:
        yield f"the older scan ran in {before['dtype']}, this one in {after['dtype']}."
    if [one["text"] for one in old["inputs"]] != [one["text"] for one in new["inputs"]]:
        yield "the older scan is of other texts: only scales and findings from warn on are compared."
    for name in ("attemper", "torch"):
        if old[name] != new[name]:
            yield f"the older scan was made with {name} {old[name]}, this one with {new[name]}."


def _scales(old: Document, new: Document) -> Iterator[Document]:
    before = {(one["layer"], one["kind"]): one["scale"].get("applied") for one in old["layers"]}
    for one in new["layers"]:
        place = (one["layer"], one["kind"])
        was, now = before.get(place), one["scale"].get("applied")
        if place in before and was != now and (was is None or now is None or abs(was - now) > 1e-3 * abs(was)):
            yield {"layer": one["layer"], "kind": one["kind"], "before": was, "after": now}


def _moved(old: Document, new: Document) -> Iterator[Document]:
    before = {_place(row): row for row in old["heads"]}
    for row in new["heads"]:
        then = before.get(_place(row))
        for sign, least in MOVING.items() if then is not None else ():
            was, now = then.get(sign), row.get(sign)  # type: ignore[union-attr]
            if not isinstance(was, (int, float)) or not isinstance(now, (int, float)) or was <= 0 or now <= 0:
                continue
            times = now / was
            if max(times, 1 / times) > FACTOR and abs(now - was) > least:
                where = {name: row[name] for name in ("layer", "kind", "head")}
                yield {**where, "sign": sign, "before": was, "after": now, "times": times}


def _key(finding: Document) -> tuple[Any, ...]:
    return tuple(finding[name] for name in ("kind", "fault", "level", "layer", "layer_kind", "head"))


def _place(row: Document) -> Place:
    return row["layer"], row["kind"], row["head"]


def _is_whole(document: Document) -> bool:
    """Whether every part that is compared is there, with the names it is compared by."""
    try:
        for name in ("name", "class", "sha256", "dtype"):
            document["model"][name]
        for name in ("attemper", "torch", "created"):
            document[name].strip()
        hash(tuple((_key(one), LEVELS.index(one["level"])) for one in document["findings"]))
        hash(tuple(map(_place, document["heads"])))
        hash(tuple((one["layer"], one["kind"], one["scale"].get("applied")) for one in document["layers"]))
        hash(tuple(one["text"] for one in document["inputs"]))
    except (KeyError, TypeError, AttributeError, ValueError):
        return False
    return True
