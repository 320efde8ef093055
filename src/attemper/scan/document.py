"""The document of a scan, part by part, as dataclasses: what is in it, and what its JSON Schema is made from.

The annotations are the schema. ``Annotated[int, {"minimum": 0}]`` adds keywords of JSON Schema. ``Annotated[Json, Head]`` is a
dict with the fields of ``Head``. A field whose default is None is left out of the document while it is None. ``class_`` is
written ``class``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal

from .._files import finite
from ..health import LEVELS, Finding
from ..health.faults import CheckResult

SCHEMA: Literal["attemper.scan/1"] = "attemper.scan/1"

Json = dict[str, Any]


def said(words: str) -> Json:
    """The keyword of JSON Schema that describes a field."""
    return {"description": words}


Count = Annotated[int, {"minimum": 0}]
Size = Annotated[int, {"minimum": 1}]
Blocks = Annotated[int, {"minimum": 1, "maximum": 16}]
Number = float | None
LayerName = Annotated[str, said("as model.named_modules() names it")]
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
    generated: Annotated[bool, said("a sample, generated because no file was given")]
    truncated: bool


@dataclass(kw_only=True)
class ScanVerdict:
    """The worst finding in one line."""

    level: Level
    line: Annotated[str, said("one plain sentence")]
    judged: Annotated[
        bool | None, said("false: no token could attend to another one, so nothing is called healthy")
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
    says: str
    std_says: Annotated[str | None, said("the measured logit std compared with the predicted one, in words")] = None


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
    biased: Annotated[bool | None, said("the largest q·k without what is added to it is not known")] = None


@dataclass(kw_only=True)
class HeadSigns:
    """The vital signs of one head, over the rows of all inputs."""

    layer: LayerName
    kind: Kind
    head: Count
    rows: Annotated[float, said("how many queries were measured")]
    mean: Number
    variance: Number
    peak: Number
    entropy: Number
    p2: Number
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
            "enum": [None, -1, 0, 1],
            "description": "the token before, itself or the token after: where neighbour_weight is",
        },
    ]
    text_distance: Annotated[Number, said("null with one text")]
    score_peak: Annotated[Number, said("the largest scale · q·k, where numbers are added to it; left out if not")] = (
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
    token: Annotated[TokenAttention | None, said("only with a token: its attention under this rule")] = None


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
    others: Annotated[float | None, said("the mean weight that other queries give it in this head")] = None


@dataclass(kw_only=True)
class TokenHead:
    """The weights of one token's query in one head."""

    layer: LayerName
    kind: Kind
    head: Count
    weights: list[Number]
    others: Annotated[
        list[Number] | None,
        said(
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
    best: Annotated[Target | None, said("without special tokens and neighbours")]
    strongest: Target | None


@dataclass(kw_only=True)
class Patches:
    """The queries and keys are patches of an image, row by row."""

    rows: Size
    columns: Size
    first: Annotated[Count, said("the token that is the first patch; tokens before it are not in the image")]


@dataclass(kw_only=True)
class LayerMap:
    """Which layer and input attention weights are of, and their sizes."""

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
        said(
            "base64 of little-endian unsigned integers, heads × queries × keys: weight × the largest integer, rounded"
        ),
    ]
    patches: Patches | None = None


@dataclass(kw_only=True)
class Thumbnail:
    """The weights of a layer added up in blocks of queries and keys."""

    rows: Annotated[Blocks, said("blocks of queries, in order, as even as can be")]
    columns: Annotated[Blocks, said("blocks of keys")]
    data: Annotated[
        str,
        said("base64 of bytes, heads × rows × columns: the share of the queries' weight on the keys × 255, rounded"),
    ]


@dataclass(kw_only=True)
class TopMap(LayerMap):
    """The largest attention weights of some rows of a layer, for one input."""

    format: Literal["top"] = "top"
    k: Count
    rows: list[Count]
    indices: Annotated[str, said("base64, heads × rows × k")]
    weights: Annotated[str, said("base64, heads × rows × k")]
    thumbnail: Thumbnail | None = None
    patches: Patches | None = None


@dataclass(kw_only=True)
class SmallImage:
    """The image that patches are drawn on."""

    input: Count
    width: Size
    height: Size
    data: Annotated[str, said("base64 of bytes, height × width × 3: red, green and blue, scaled down")]


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
    says: list[str]
    new: Annotated[list[FindingRow], said("not in the older scan, at any level")]
    worse: Annotated[
        list[FindingRow] | None,
        said("not in the older scan, or at a lower level there: what --fail-on fails on"),
    ] = None
    levels: Annotated[list[Annotated[Json, LevelChange]] | None, said("in both scans, at different levels")] = None
    gone: Annotated[list[Json], said("only in the older scan, at any level")]
    uncompared: Annotated[
        list[FindingRow] | None,
        said("notes that the older scan does not have because it is of other texts: whether they are new is unknown"),
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
    inputs: Annotated[list[AboutInput], said("each was run by itself")]
    verdict: ScanVerdict
    layers: Annotated[list[Layer], said("in the order they ran")]
    heads: list[Annotated[Json, Head]]
    findings: Annotated[list[Finding], said("the worst first")]
    checks: Annotated[list[CheckResult] | None, said("is attention computed right? a failed one is in findings")] = None
    what_if: Annotated[list[WhatIf] | None, said("only on request: the same model with another scale")] = None
    token: TokenAttention | None = None
    attention: Annotated[list[DenseMap | TopMap] | None, said("only on request: the weights themselves")] = None
    images: Annotated[list[SmallImage] | None, said("with attention, where the tokens are patches of an image")] = None
    baseline: Baseline | None = None
    notes: Annotated[list[str], said("what was not measured, and why")]


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
