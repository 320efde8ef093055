"""The JSON Schema of a scan's document, made from the dataclasses of document.py."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .document import SCHEMA, Document, key


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of the document; what ``attemper scan --schema`` prints."""
    definitions: dict[str, Any] = {}
    whole = _of_class(Document, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA,
        **whole,
        "title": "What attemper scan --json prints",
        "description": "NaN and infinity are null. Within /1 nothing is renamed or removed.",
        "$defs": definitions,
    }


_TYPES = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    NoneType: "null",
}


def _of_class(part: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a dataclass; those it needs are added to the definitions."""
    hints, properties, required = get_type_hints(part, include_extras=True), {}, []
    for field in fields(part):
        found = _of_hint(hints[field.name], definitions)
        if field.default is not None:
            required.append(key(field.name))
        elif isinstance(found.get("type"), list):  # left out in place of null
            found["type"] = next(name for name in found["type"] if name != "null")
        elif "anyOf" in found:
            found = {**found["anyOf"][0], **{name: said for name, said in found.items() if name != "anyOf"}}
        properties[key(field.name)] = found
    about = (part.__doc__ or "").partition("\n")[0]
    closed = {"additionalProperties": False, "required": required, "properties": properties}
    return {"type": "object", "description": about, **closed}


def _of_hint(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of an annotation."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if is_dataclass(inner[1]):
            return _of_hint(inner[1], definitions)
        return dict(ChainMap(*reversed(inner[1:]), _of_hint(inner[0], definitions)))
    if origin is Literal:
        return {"const": inner[0]}
    if isinstance(hint, type) and is_dataclass(hint):
        name = hint.__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _of_class(hint, definitions)
        return {"$ref": f"#/$defs/{name}"}
    if NoneType in inner or (len(inner) > 1 and origin not in (dict, list)):
        return _of_union([_of_hint(one, definitions) for one in inner])
    items = {"items": _of_hint(inner[0], definitions)} if origin is list else {}
    return {"type": _TYPES[origin or hint], **items}


def _of_union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 2 and parts[1] == {"type": "null"} and "type" in parts[0]:
        return {**parts[0], "type": [parts[0]["type"], "null"]}
    return {"anyOf": parts}
