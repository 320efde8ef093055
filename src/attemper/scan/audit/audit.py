"""The scale audit: for every layer the scale declared and applied, the rule it matches, and its fault."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from ...health.faults import FAULTS
from ...health.thresholds import LEVELS
from ...scale import RULES
from ...vitals import Vitals
from ...watch.examine import AttentionCall, Traced
from ..document import Scale, ScaleFactor
from .applied import Applied, applied, logit_std, predicted_std
from .declared import declared, hinted, is_of_transformers, layer_index, width
from .judge import REMARKS, WEIGHTS_CLOSE, MeasuredScale, close, explain, judge, out_of_line, outliers, spread


@dataclass(kw_only=True)
class LayerScale(Scale):
    """The scale of one layer as the document has it, its place, and its fault: one of ``health.faults.FAULTS`` or None."""

    layer: str
    kind: str  # "self" or "cross"
    head_dim: int
    keys: float | None  # visible to a row, on average
    fault: str | None
    advice: str

    def part(self) -> Scale:
        """The ``scale`` of the document's layer."""
        return Scale(**{field.name: getattr(self, field.name) for field in fields(Scale)})


@dataclass
class CallScale:
    """The scale of one call in numbers; `traced` is still filled after the softmax."""

    measured: MeasuredScale
    applied: Applied
    predicted: float | None
    sums: tuple[float, float, float]  # rows, variances, keys
    traced: Traced | None


@dataclass
class SameScale:
    """The calls of a layer with the same scale: the best traced of them, and sums over all."""

    best: CallScale
    rows: float = 0.0
    variance: float = 0.0
    keys: float = 0.0

    def takes(self, scale: CallScale) -> bool:
        """Whether a call belongs to these: it applies the same scale, or its scale cannot be compared."""
        if not (scale.applied.followed and self.best.applied.followed):
            return True
        numbers, varied = (scale.applied.number, self.best.applied.number), (scale.measured, self.best.measured)
        if any(measured.varies is not None for measured in varied) or None in numbers:
            return True
        return close(numbers[0] or 0.0, numbers[1] or 0.0, WEIGHTS_CLOSE)

    def add(self, scale: CallScale) -> None:
        if scale.applied.followed and not self.best.applied.followed:
            self.best = scale  # keys from a cache cannot be traced: an earlier call computed them
        rows, variance, keys = scale.sums
        self.rows, self.variance, self.keys = self.rows + rows, self.variance + variance, self.keys + keys


@dataclass
class Audit:
    """Examiner: read ``layers()`` after the run."""

    traces: bool = True
    calls: dict[tuple[str, str], list[SameScale]] = field(default_factory=dict)  # most layers apply one scale

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> CallScale:
        call_scale = applied(call)
        info, number = call.info, call_scale.number
        stated = declared(call, vitals.visible)
        if stated is None and number is not None:
            stated = hinted(call, number / call_scale.stretch, call_scale.counted)
        measured = MeasuredScale(
            head_dim=info.head_dim,
            heads=info.heads,
            applied=number,
            factors=tuple(call_scale.counted),
            varies=call_scale.varies,
            learned=call_scale.learned,
            stretch=call_scale.stretch,
            log_n=_grows(call, vitals),
            norms=call_scale.norms,
            softcap=info.softcap if info.softcap is not None else call.softcap,
            width=width(call),
            layer=layer_index(call),
            declared=stated,
            given=info.declared,
            argument=call_scale.call,
            by_design=is_of_transformers(call.frames[-1].module) or (stated is not None and stated.firm),
            followed=call_scale.followed,
        )
        predicted = predicted_std(call, call_scale.at_product)
        return CallScale(measured, call_scale, predicted, logit_std(call, vitals, rows), call.traced)

    def keep(self, name: str, call: AttentionCall, call_scale: CallScale | None) -> None:
        if call_scale is None:
            return
        groups = self.calls.setdefault((name, call.info.kind), [])
        group = next((candidate for candidate in groups if candidate.takes(call_scale)), None)
        if group is None:
            group = SameScale(call_scale)
            groups.append(group)
        group.add(call_scale)

    def layers(self) -> list[LayerScale]:
        """Every layer that was measured, in the order of the model."""
        measured = {place: [_complete(calls) for calls in groups] for place, groups in self.calls.items()}
        layered = _follow_layers([scale for several in measured.values() for scale in several])
        scales = []
        for place, several in measured.items():
            known = [replace(scale, layered=layered) for scale in several]
            judged = [_layer(place, calls, scale) for calls, scale in zip(self.calls[place], known, strict=True)]
            levels = [0 if scale.fault is None else LEVELS.index(FAULTS[scale.fault].level) for scale in judged]
            worst = levels.index(max(levels))
            scales.append((_combined(judged, worst), known[worst]))
        layers = [layer for layer, _ in scales]
        for odd in outliers([(layer.layer, layer.kind, measured) for layer, measured in scales]):
            layer = layers[odd.index]
            if layer.fault in (None, "unknown") and layer.applied is not None:
                message, advice = out_of_line(layer.applied, odd.others, odd.common)
                layers[odd.index] = replace(layer, fault="odd", message=f"{layer.message} {message}", advice=advice)
        return layers


def _complete(calls: SameScale) -> MeasuredScale:
    best = calls.best
    std = (calls.variance / calls.rows) ** 0.5 if calls.rows else None
    traced = best.traced
    return replace(
        best.measured,
        logit_std=std,
        keys=calls.keys / calls.rows if calls.rows else None,
        row_sums=traced.sums if traced is not None else None,
        output_factors=tuple(factor.number for factor in traced.after) if traced is not None else (),
    )


def _combined(judged: list[LayerScale], worst: int) -> LayerScale:
    """The layer with the verdict of its worst calls, and a sentence that names the scales of all its calls."""
    layer = judged[worst]
    if len(judged) == 1:
        return layer
    numbers = [f"{scale.applied:.4g}" for scale in judged if scale.applied is not None]
    return replace(layer, message=f"{layer.message} Its calls apply {', '.join(numbers[:-1])} and {numbers[-1]}.")


def _follow_layers(scales: list[MeasuredScale]) -> bool:
    """Whether two or more layers apply 1/((layer + 1) √d_k): in one layer that may be chance."""
    at = [scale for scale in scales if scale.layer is not None and scale.applied is not None]
    following = [
        scale for scale in at if scale.applied and close(scale.applied, scale.head_dim**-0.5 / ((scale.layer or 0) + 1))
    ]
    return len({scale.layer for scale in following}) > 1 and len(following) == len(at)


def _layer(place: tuple[str, str], calls: SameScale, measured: MeasuredScale) -> LayerScale:
    judged = judge(measured)
    message, advice = explain(measured, judged)
    stated, best = measured.declared, calls.best
    return LayerScale(
        layer=place[0],
        kind=place[1],
        head_dim=measured.head_dim,
        keys=measured.keys,
        declared=stated.number if stated is not None else None,
        declared_by=stated.by if stated is not None else None,
        applied=measured.applied,
        measured_by=best.applied.measured_by,
        factors=[ScaleFactor(what=factor.what, number=factor.number) for factor in best.applied.factors],
        rule=judged.rule,
        formula=RULES[judged.rule].formula if judged.rule is not None else None,
        qk_norm=measured.norms is not None,
        after_softmax=judged.after_softmax,
        predicted_std=best.predicted,
        logit_std=measured.logit_std,
        verdict="ok" if judged.fault is None or judged.fault in REMARKS else "fault",
        fault=judged.fault,
        message=message,
        std_message=spread(measured.logit_std, best.predicted),
        advice=advice,
    )


def _grows(call: AttentionCall, vitals: Vitals) -> bool:
    """Whether a scale per row is one number times the logarithm of the keys that the row sees."""
    if not isinstance(call.scale, Tensor) or call.scale.dim() < 4 or call.scale.shape[-2] == 1:
        return False
    logs = vitals.visible.double().clamp(min=1).log()
    scale = call.scale.detach().double().expand(*logs.shape, 1)[..., 0]
    used = logs > 0
    ratio = (scale / logs.where(used, 1.0)).where(used, 0.0)
    mean = ratio.sum(-1, keepdim=True) / used.sum(-1, keepdim=True).clamp(min=1)
    differ = bool((logs[used] != logs[used][:1]).any())  # if all rows see the same number of keys, this shows nothing
    return differ and bool(((ratio - mean).abs() <= 1e-3 * mean.abs()).where(used, True).all())
