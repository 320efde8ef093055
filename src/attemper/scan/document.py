"""The document of a scan as dataclasses, and the JSON Schema made from them.

The annotations are the schema. ``Annotated[int, {"minimum": 0}]`` adds keywords of JSON Schema. ``Annotated[Json, Head]`` is a
dict with the fields of ``Head``. A field whose default is None is left out of the document while it is None. ``class_`` is
written ``class``.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from .._files import finite
from ..health import LEVELS, Finding
from ..health.faults import CheckResult

SCHEMA: Literal["attemper.scan/1"] = "attemper.scan/1"

Json = dict[str, Any]


def described(words: str) -> Json:
    """A field's description, as a keyword of JSON Schema."""
    return {"description": words}


Count = Annotated[int, {"minimum": 0}]
Size = Annotated[int, {"minimum": 1}]
Blocks = Annotated[int, {"minimum": 1, "maximum": 16}]
Number = float | None
LayerName = Annotated[
    str,
    described(
        "as model.named_modules() names it; with (call 2) behind it, the second call on the same sequence, as of a shared layer"
    ),
]
Kind = Annotated[str, {"enum": ["self", "cross"], "description": "self-attention or cross-attention"}]
Level = Annotated[str, {"enum": list(LEVELS)}]
FindingRow = Annotated[Json, Finding]
Route = Annotated[str, {"enum": ["sdpa", "fused", "hand-written", "interface", "replaced", "attemper"]}]


@dataclass(kw_only=True)
class AboutModel:
    """The model that was scanned."""

    name: str
    source: Annotated[str, {"enum": ["demo", "folder", "hub", "object"]}]
    class_: str
    type: str | None
    parameters: Count
    dtype: str | None
    sha256: Annotated[str | None, {"pattern": "^[0-9a-f]{64}$"}]
    task: str | None


@dataclass(kw_only=True)
class AboutInput:
    """One input of the model."""

    modality: Annotated[str, {"enum": ["text", "image", "audio", "batch"]}]
    text: str | None
    tokens: list[str] | None
    special: list[bool] | None
    length: Annotated[int | None, {"minimum": 0}]
    generated: Annotated[bool, described("a sample, generated because no file was given")]
    truncated: bool


@dataclass(kw_only=True)
class ScanVerdict:
    """The worst finding in one line."""

    level: Level
    line: Annotated[str, described("one plain sentence")]
    judged: Annotated[
        bool | None, described("false: no token could attend to another one, so nothing is called healthy")
    ] = None


@dataclass(kw_only=True)
class ScaleFactor:
    """One number that q·k is multiplied by."""

    what: str
    number: Number


@dataclass(kw_only=True)
class Scale:
    """The scale of a layer: declared, measured, judged."""

    declared: Number
    declared_by: str | None
    applied: Number
    measured_by: str | None
    factors: list[ScaleFactor]
    rule: str | None
    formula: str | None
    qk_norm: bool | None
    after_softmax: Number
    predicted_std: Number
    logit_std: Number
    verdict: Annotated[str, {"enum": ["ok", "fault"]}]
    message: str
    std_message: Annotated[
        str | None, described("the measured logit std compared with the predicted one, in words")
    ] = None


@dataclass(kw_only=True)
class Layer:
    """One layer and the scale it applies."""

    layer: LayerName
    kind: Kind
    route: Route
    dtype: str
    heads: Count
    kv_heads: Count
    head_dim: Count
    queries: Count
    keys: Count
    causal: bool
    masked: bool
    softcap: Number
    window: int | None
    implementation: str | None
    scale: Scale
    biased: Annotated[bool | None, described("a bias is added to q·k, and the largest q·k without it is not known")] = (
        None
    )
    call: Annotated[
        int | None, {"minimum": 2, "description": "which call of its module on the same sequence, from the second on"}
    ] = None


@dataclass(kw_only=True)
class HeadSigns:
    """The vital signs of one head, over the rows of all inputs."""

    layer: LayerName
    kind: Kind
    head: Count
    rows: Annotated[float, described("how many queries were measured")]
    mean: Number
    variance: Number
    peak: Number
    entropy: Number
    sum_p2: Number
    top_weight: Number
    effective_keys: Number
    evenness: Number
    jacobian_trace: Number
    saturated: Number


@dataclass(kw_only=True)
class Head(HeadSigns):
    """The signs of one head, with what the examiners measured."""

    sink_weight: Number
    sink_token: str | None
    sink_position: int | None
    evenness_without_sinks: Number
    neighbour_weight: Number
    neighbour_offset: Annotated[
        int | None,
        {
            "enum": [None, -2, -1, 0, 1, 2],
            "description": "how far from the token neighbour_weight is; −1 is the token before",
        },
    ]
    text_distance: Annotated[Number, described("null with one text")]
    score_peak: Annotated[Number, described("the largest scale · q·k before a bias is added; left out if none is")] = (
        None
    )


@dataclass(kw_only=True)
class WhatIf:
    """The signs of a model's heads under one rule, and a few numbers over all of them.

    ``saturated_heads`` counts the heads in which most rows give one key more than 0.99 of their weight. ``effective_keys`` is the
    mean over heads, ``peak`` the largest logit, ``logit_std`` the root of the heads' mean variance.
    """

    rule: str
    heads: list[Annotated[Json, HeadSigns]]
    saturated_heads: Count
    effective_keys: Number
    peak: Number
    logit_std: Number
    token: Annotated[TokenAttention | None, described("only with a token: its attention under this rule")] = None


@dataclass(kw_only=True)
class Target:
    """A token, and the head that gives it the most weight."""

    layer: LayerName
    kind: Kind
    head: Count
    token: str
    position: Count
    weight: float
    special: bool
    others: Annotated[float | None, described("the mean weight that other queries give it in this head")] = None


@dataclass(kw_only=True)
class TokenHead:
    """The weights of one token's query in one head."""

    layer: LayerName
    kind: Kind
    head: Count
    weights: list[Number]
    others: Annotated[
        list[Number] | None,
        described(
            "for each token the mean weight of other queries: special tokens, the token asked for and itself left out"
        ),
    ] = None


@dataclass(kw_only=True)
class TokenAttention:
    """What one token attends to."""

    asked: str
    token: str
    input: Count
    position: Count
    heads: list[TokenHead]
    targets: list[Target]
    best: Annotated[Target | None, described("without special tokens and neighbours")]
    strongest: Target | None


@dataclass(kw_only=True)
class Patches:
    """Where the patches of an image are among the tokens, row by row."""

    rows: Size
    columns: Size
    first: Annotated[Count, described("the token that is the first patch; tokens before it are not in the image")]


@dataclass(kw_only=True)
class LayerMap:
    """The layer and the input of some attention weights, and their sizes."""

    layer: LayerName
    kind: Kind
    input: Count
    heads: Count
    queries: Count
    keys: Count


@dataclass(kw_only=True)
class DenseMap(LayerMap):
    """All attention weights of a layer for one input."""

    format: Literal["dense"] = "dense"
    bits: Annotated[int, {"enum": [8, 16]}]
    data: Annotated[
        str,
        described(
            "base64 of little-endian unsigned integers, heads × queries × keys: weight × the largest integer, rounded"
        ),
    ]
    patches: Patches | None = None


@dataclass(kw_only=True)
class Thumbnail:
    """The weights of a layer added up in blocks of queries and keys."""

    rows: Annotated[Blocks, described("blocks of queries, in order, as even as can be")]
    columns: Annotated[Blocks, described("blocks of keys")]
    data: Annotated[
        str,
        described(
            "base64 of bytes, heads × rows × columns: the share of the queries' weight on the keys × 255, rounded"
        ),
    ]


@dataclass(kw_only=True)
class TopMap(LayerMap):
    """The largest attention weights of some rows of a layer, for one input."""

    format: Literal["top"] = "top"
    k: Count
    rows: list[Count]
    indices: Annotated[str, described("base64, heads × rows × k")]
    weights: Annotated[str, described("base64, heads × rows × k")]
    thumbnail: Thumbnail | None = None
    patches: Patches | None = None


@dataclass(kw_only=True)
class SmallImage:
    """The image that patches are drawn on."""

    input: Count
    width: Size
    height: Size
    data: Annotated[str, described("base64 of bytes, height × width × 3: red, green and blue, scaled down")]


@dataclass(kw_only=True)
class LevelChange:
    """A finding of both scans, at different levels."""

    before: Json
    after: FindingRow


@dataclass(kw_only=True)
class ScaleChange:
    """A layer whose scale changed."""

    layer: LayerName
    kind: Kind
    before: Number
    after: Number


@dataclass(kw_only=True)
class SignChange:
    """A sign of a head that moved."""

    layer: LayerName
    kind: Kind
    head: Count
    sign: str
    before: float
    after: float
    times: float


@dataclass(kw_only=True)
class Baseline:
    """What changed since an older scan."""

    file: str
    created: str
    differences: list[str]
    new: Annotated[list[FindingRow], described("not in the older scan, at any level")]
    worse: Annotated[
        list[FindingRow] | None,
        described("not in the older scan, or at a lower level there: what --fail-on fails on"),
    ] = None
    levels: Annotated[list[Annotated[Json, LevelChange]] | None, described("in both scans, at different levels")] = None
    gone: Annotated[list[Json], described("only in the older scan, at any level")]
    uncompared: Annotated[
        list[FindingRow] | None,
        described(
            "notes that the older scan does not have because it is of other texts: whether they are new is unknown"
        ),
    ] = None
    scales: list[Annotated[Json, ScaleChange]]
    factor: float
    compared: Annotated[int | None, {"minimum": 0, "description": "heads whose signs are in both scans"}] = None
    moved: list[Annotated[Json, SignChange]]


@dataclass(kw_only=True)
class Document:
    """What attemper scan --json prints."""

    schema: Literal["attemper.scan/1"] = SCHEMA
    attemper: str
    torch: str
    created: Annotated[str, {"format": "date-time"}]
    model: AboutModel
    inputs: Annotated[list[AboutInput], described("each was run by itself")]
    verdict: ScanVerdict
    layers: Annotated[list[Layer], described("in the order they ran")]
    heads: list[Annotated[Json, Head]]
    findings: Annotated[list[Finding], described("the worst first")]
    checks: Annotated[
        list[CheckResult] | None, described("is attention computed right? a failed one is in findings")
    ] = None
    what_if: Annotated[list[WhatIf] | None, described("only on request: the same model with another scale")] = None
    token: TokenAttention | None = None
    attention: Annotated[list[DenseMap | TopMap] | None, described("only on request: the weights themselves")] = None
    images: Annotated[
        list[SmallImage] | None, described("with attention, where the tokens are patches of an image")
    ] = None
    baseline: Baseline | None = None
    notes: Annotated[list[str], described("what was not measured, and why")]


SIGNS = tuple(field.name for field in fields(HeadSigns))
"""The columns of a head that ``Record.to_dicts()`` has."""
COLUMNS = tuple(field.name for field in fields(Head) if field.default is not None)
"""The columns of every head in the document."""


def key(name: str) -> str:
    """The name of a field in the document."""
    return name.removesuffix("_")


def plain(value: Any) -> Any:
    """A part of the document as data that JSON takes; NaN and infinity, which it does not have, become None."""
    return finite(value, _as_dict)


def _as_dict(value: Any) -> Any:
    """A dataclass as a dict, without the fields that are left out."""
    if not is_dataclass(value):
        return value
    parts = ((field, getattr(value, field.name)) for field in fields(value))
    return {key(field.name): part for field, part in parts if part is not None or field.default is not None}


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
        schema = _of_hint(hints[field.name], definitions)
        if field.default is not None:
            required.append(key(field.name))
        elif isinstance(schema.get("type"), list):  # left out in place of null
            schema["type"] = next(name for name in schema["type"] if name != "null")
        elif "anyOf" in schema:
            schema = {**schema["anyOf"][0], **{name: value for name, value in schema.items() if name != "anyOf"}}
        properties[key(field.name)] = schema
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
        return _of_union([_of_hint(part, definitions) for part in inner])
    items = {"items": _of_hint(inner[0], definitions)} if origin is list else {}
    return {"type": _TYPES[origin or hint], **items}


def _of_union(parts: list[dict[str, Any]]) -> dict[str, Any]:
    if len(parts) == 2 and parts[1] == {"type": "null"} and "type" in parts[0]:
        return {**parts[0], "type": [parts[0]["type"], "null"]}
    return {"anyOf": parts}
