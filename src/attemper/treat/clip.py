"""qk_clip(): scale the projections of heads whose logits exploded, so that their largest logit is tau again."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._display import plural
from ..errors import InputError, checked_options, nearest
from ..watch import Record
from .afterwards import NO_EFFECT, Afterwards, Expected, HeadKey, RowsKey, settled
from .finder import last_projections
from .finder import projections as find
from .peaks import LOCAL, NOT_FINITE, LayerPeaks, LocalHeads, agree, check_record, group_of, peaks_of
from .table import (
    BY_LAYER,
    TAKES,
    LayerProjections,
    Projections,
    check_model,
    check_number,
    check_projections,
    factors_of,
    parameters_of,
)
from .write import Copies, check_there, check_whole, reshard, scale_rows, unscalable, unwrapped

SHARED = ("query", "group")


class ClippedHead(NamedTuple):
    """What became of one head."""

    layer: str
    kind: str
    head: int
    before: float  # its largest logit, before a softcap
    factor: float  # what its scores are multiplied by
    how: str  # "per head", or "by layer": one gain serves all heads
    parameters: tuple[str, ...]


class LeftAlone(NamedTuple):
    """A head above tau that was not clipped, and why; ``head`` is None if the reason holds for the layer."""

    layer: str
    head: int | None
    reason: str


@dataclass
class Clip(Sequence[ClippedHead]):
    """What :func:`qk_clip` did: the heads that it clipped. Its length is 0 if no head was above tau."""

    step: int
    tau: float
    largest: tuple[float, str, int]  # the largest logit of the step, its layer and head
    heads: list[ClippedHead] = field(default_factory=list)
    skipped: list[LeftAlone] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.heads)

    def __getitem__(self, place: Any) -> Any:
        return self.heads[place]

    def __iter__(self) -> Iterator[ClippedHead]:
        return iter(self.heads)

    def __str__(self) -> str:
        peak, layer, head = self.largest
        where = f"the largest logit is {peak:.4g}, {layer or 'the model'} head {head}"
        where = "no head shows its largest logit" if peak == -math.inf else where
        if not self.heads and not self.skipped:
            return f"qk_clip(): step {self.step}: no head is above {self.tau:g}; {where}."
        first = f"qk_clip(): step {self.step}: nothing was clipped to {self.tau:g}; {where}."
        if self.heads:
            layers = len({clipped.layer for clipped in self.heads})
            counts = f"{plural(len(self.heads), 'head')} of {plural(layers, 'layer')} clipped to {self.tau:g}"
            least = min(clipped.factor for clipped in self.heads)
            first = f"qk_clip(): step {self.step}: {counts}; {where}; the smallest factor is {least:.3g}."
        rest = [
            f"{skipped_head.layer}{'' if skipped_head.head is None else f' head {skipped_head.head}'}: {skipped_head.reason}"
            for skipped_head in self.skipped
        ]
        shown = [*rest, *self.notes]
        more = f" And {len(shown) - 2} more." if len(shown) > 2 else ""
        return first + (f"\nLeft alone, or to be noted: {'. '.join(shown[:2])}.{more}" if shown else "")


@checked_options
def qk_clip(
    model: nn.Module,
    record: Record,
    tau: float = 100.0,
    *,
    alpha: float = 0.5,
    step: int | None = None,
    shared: str = "query",
    projections: Projections | None = None,
    optimizer: Any = None,
    group: Any = None,
) -> Clip:
    """Scale q and k of every head whose largest logit S is above ``tau`` by γ = tau / S, exactly, in the weights.

    Call it after the optimizer's step, with the record of a watch. The rows of W_q that make a head are multiplied by γ^alpha
    and those of W_k by γ^(1 − alpha), with their biases. Keys that other heads or layers use are left alone, and q takes all
    of γ. Behind a norm, its gain is scaled: per head, or for the layer by its smallest γ if all heads share one gain. Other
    heads keep their bits. With several ranks, the largest logit over all of them counts: call it on every rank.

    S is what the record measured: before this update, and on watched steps only. A head whose S is inf or NaN is left alone, and
    so is one that did not come down after earlier clips: ``skipped`` says so until :func:`projections` is called again.

    Args:
        model: the model that was watched, with or without its wrapper.
        record: ``watch.record``.
        tau: the largest logit that is allowed, above 0.
        alpha: the share of the factor that q takes, from 0 to 1.
        step: the step of the record to read; left out, the last one.
        shared: where key heads serve several query heads: ``"query"`` leaves keys alone, exact for every head; ``"group"``
            scales q and k of the whole group by the smallest γ in it, as Megatron does.
        projections: the result of :func:`projections`; left out, its last result for this model. A Hugging Face model that
            was never searched is run once on its ``dummy_inputs``.
        optimizer: if it holds copies of the weights (float32 masters of half weights, ScheduleFree's z), they are scaled too.
        group: the process group of the ranks that hold the same heads; left out, that of DistributedDataParallel or of sharded
            parameters, else all ranks.

    Returns:
        a :class:`Clip`: the clipped heads, ``skipped`` with reasons, and ``notes``; ``print()`` shows two lines.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> x = torch.randn(1, 5, 16)
        >>> projections = attemper.projections(model, x)
        >>> with attemper.watch(model) as watch:
        ...     output = model(x)
        >>> len(attemper.qk_clip(model, watch.record, tau=100.0))
        0
    """
    _check(model, tau, alpha, shared, projections)
    step = check_record(record, step)
    layers = peaks_of(record, step)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        layers = agree(layers, group_of(model, group), step, tau, alpha, shared)
    local = [layer.layer for layer in layers if layer.local]
    if local and group is None:
        check_whole("qk_clip()", model, parameters_of(model))  # a better reason
        raise LocalHeads(LOCAL.format(layer=local[0]))
    clip = Clip(step, float(tau), _largest(layers))
    for layer in layers:
        reasons = set(layer.reasons.values())
        if len(reasons) == 1 and len(layer.reasons) == len(layer.heads):
            clip.skipped.append(LeftAlone(layer.layer, None, reasons.pop()))
        else:
            clip.skipped += [LeftAlone(layer.layer, head, reason) for head, reason in layer.reasons.items()]
    if all(bool((layer.scores <= tau).all()) for layer in layers):
        settled(model)
        return clip
    known, optimizers = _known(model, projections, record), unwrapped("qk_clip", optimizer)
    _apply(clip, model, layers, alpha, shared, known, optimizers)
    return clip


def _check(model: object, tau: object, alpha: object, shared: object, projections: object) -> None:
    check_model("qk_clip", model)
    check_number(
        "qk_clip", "tau", tau, "a finite number above 0", lambda n: 0 < n < math.inf, "Use 100, or 30 for a small model"
    )
    check_number("qk_clip", "alpha", alpha, "a number from 0 to 1", lambda n: 0 <= n <= 1, "Use 0.5 to split γ equally")
    if shared not in SHARED:
        raise InputError(f"qk_clip(): unknown `shared` {shared!r}. {nearest(shared, SHARED)}")
    if projections is not None:
        check_projections("qk_clip", projections)


def _largest(layers: list[LayerPeaks]) -> tuple[float, str, int]:
    largest = (-math.inf, "", 0)
    for layer in layers:
        for head, score in zip(layer.heads, layer.scores.tolist(), strict=True):
            if score > largest[0] or math.isnan(score):
                largest = (score, layer.layer, head)
    return largest


def _known(model: nn.Module, given: Projections | None, record: Record) -> Projections:
    known = given if given is not None else last_projections(model)
    if known is not None:
        return known
    inner = getattr(model, "module", model)
    sample = getattr(inner, "dummy_inputs", None)
    advice = (
        "qk_clip(): which parameters make q and k is not known yet. Call attemper.projections(model, batch) once, with what you "
        "call the model with."
    )
    if sample is None:
        raise InputError(advice)
    device = next((parameter.device for parameter in inner.parameters()), torch.device("cpu"))
    try:
        return find(model, {name: value.to(device) for name, value in sample.items()})
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{advice} The model's own dummy_inputs do not run: {error}") from error


def _apply(
    clip: Clip,
    model: nn.Module,
    layers: list[LayerPeaks],
    alpha: float,
    shared: str,
    known: Projections,
    optimizers: list[Any],
) -> None:
    reshard(model)
    parameters = parameters_of(model)
    check_whole("qk_clip()", model, parameters)
    afterwards = Afterwards.of(model, known)
    afterwards.judge(clip.step, layers, clip.tau, parameters)
    factors: dict[tuple[int, int, float], tuple[Tensor, Tensor]] = {}  # parameter, dimension, offset
    places: dict[RowsKey, tuple[int, int, float]] = {}
    for layer in layers:
        if bool((layer.scores <= clip.tau).all()):
            continue
        projections = known.get((layer.layer, layer.kind))
        if projections is None or max(layer.heads) >= projections.heads or layer.calls not in (None, projections.heads):
            raise InputError(_mismatch(layer, known))
        missing = [part.parameter for part in projections.parts if part.parameter not in parameters]
        if missing:
            raise InputError(
                f"qk_clip(): the projections name the parameter {missing[0]}, which the model no longer has. Call "
                "attemper.projections(model, batch) again."
            )
        for part in projections.parts:
            check_there("qk_clip()", part.parameter, parameters[part.parameter])
        scores = _scores(clip, layer, projections)
        if not bool((scores > clip.tau).any()):
            continue
        projections = _scalable(projections, parameters, clip)
        if projections.how is None:
            clip.skipped.append(LeftAlone(layer.layer, None, str(projections.why)))
            continue
        scores = _without_failed(afterwards.failed, clip, layer, projections, scores)
        gamma = _gamma(clip, layer, projections, scores)
        for name, dim, offset, factor in factors_of(projections, gamma, alpha, shared):
            parameter = parameters[name]
            if factor.numel() != (parameter.shape[dim] if parameter.dim() else 1):
                raise InputError(
                    f"qk_clip(): {name} has {parameter.shape[dim]} rows now, and had {factor.numel()} when its projections were "
                    "found. Call attemper.projections(model, batch) again."
                )
            place = places[name, dim, offset] = (id(parameter), dim, offset)
            before = factors.get(place)
            # a parameter that two layers share is scaled once, by the smaller factor
            factors[place] = (parameter, factor if before is None else torch.minimum(before[1], factor))
    # what may raise an error comes before the first change
    every = list(model.parameters())
    copies = {id(parameter): Copies.of(parameter, optimizers, every) for parameter, _ in factors.values()}
    for (place_of, dim, offset), (_, factor) in factors.items():
        if bool((factor != 1).any()):
            scale_rows(copies[place_of], dim, factor, offset)
    expected: dict[HeadKey, Expected] = {
        (clipped.layer, clipped.kind, clipped.head): Expected(
            clipped.before * clipped.factor, -math.log(clipped.factor)
        )
        for clipped in clip
    }
    shown = {place: factors[held][1] for place, held in places.items()}
    afterwards.note(clip.step, layers, expected, shown, parameters)


def _without_failed(
    failed: Container[HeadKey], clip: Clip, layer: LayerPeaks, projections: LayerProjections, scores: Tensor
) -> Tensor:
    """The scores without heads that an earlier clip did not bring down. If one gain serves all heads, one of them stops it."""
    heads = [head for head in range(projections.heads) if (layer.layer, layer.kind, head) in failed]
    if heads and projections.how == BY_LAYER:
        heads = list(range(projections.heads))
    clip.skipped += [LeftAlone(layer.layer, head, NO_EFFECT) for head in heads if float(scores[head]) > clip.tau]
    scores = scores.clone()
    scores[heads] = -math.inf
    return scores


def _mismatch(layer: LayerPeaks, known: Projections) -> str:
    projections = known.get((layer.layer, layer.kind))
    if projections is not None:
        return (
            f"qk_clip(): the record has {layer.calls or max(layer.heads) + 1} heads in {layer.layer!r}, and the model's "
            f"projections have {projections.heads}. Pass the record of this model."
        )
    names = [name for name, _ in known]
    return (
        f"qk_clip(): the record has the layer {layer.layer!r} ({layer.kind}), which the model's projections do not have. "
        f"{nearest(layer.layer, names[:6])} Pass the record of this model, or call attemper.projections(model, batch) with a "
        "batch that runs this layer."
    )


def _scores(clip: Clip, layer: LayerPeaks, projections: LayerProjections) -> Tensor:
    """The largest score of each head. An infinite or NaN score, which no factor mends, is skipped."""
    scores = torch.full((projections.heads,), -math.inf, dtype=torch.float64, device="cpu")
    scores[list(layer.heads)] = layer.scores
    for head in (scores.isnan() | (scores == math.inf)).nonzero().flatten().tolist():
        clip.skipped.append(LeftAlone(layer.layer, head, NOT_FINITE.format(peak=float(scores[head]))))
        scores[head] = -math.inf
    return scores


def _scalable(projections: LayerProjections, parameters: dict[str, Tensor], clip: Clip) -> LayerProjections:
    """The projections without a side that is frozen or quantised, if the other side can take the whole factor."""
    fixed = {
        part.side: reason
        for part in reversed(projections.parts)
        if (reason := unscalable(part.parameter, parameters[part.parameter])) is not None
    }
    if not fixed:
        return projections
    rest = tuple(
        replace(part, whole=part.whole | (part.side == "q")) for part in projections.parts if part.side not in fixed
    )
    every = projections.key_heads == projections.heads and not any(bool(part.whole.any()) for part in projections.parts)
    reason = fixed.get("q") or next(iter(fixed.values()))
    if not projections.splits or not rest or ("q" in fixed and not every):
        return replace(projections, how=None, why=reason)
    clip.notes.append(f"{projections.layer}: {reason}; {TAKES[rest[0].side]}")
    return replace(projections, parts=rest)


def _gamma(clip: Clip, layer: LayerPeaks, projections: LayerProjections, scores: Tensor) -> Tensor:
    """The factor of each head of a layer; adds the heads that it scales to ``clip``."""
    # a tensor over a tensor: a number over a tensor is its reciprocal, times the number
    gamma = torch.full_like(scores, clip.tau) / scores.clamp(min=clip.tau)
    if projections.how == BY_LAYER:
        gamma = gamma.min().expand(projections.heads)
    names = tuple(part.parameter for part in projections.parts)
    assert projections.how is not None
    for head in (gamma < 1).nonzero().flatten().tolist():
        clipped = ClippedHead(
            layer.layer, layer.kind, head, float(scores[head]), float(gamma[head]), projections.how, names
        )
        clip.heads.append(clipped)
    return gamma
