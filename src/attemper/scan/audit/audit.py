"""The scale audit: for every layer the scale declared and applied, the rule it matches, and its fault."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

from torch import Tensor

from ...health.thresholds import FAULTS, LEVELS
from ...scale import RULES
from ...vitals import Vitals
from ...watch.examine import AttentionCall, Traced
from ..document import Scale, ScaleFactor
from .applied import Applied, applied, predicted_std
from .declared import declared, hinted, is_of_transformers, layer_index, width
from .judge import REMARKS, WEIGHTS_CLOSE, MeasuredScale, close, judge
from .outliers import outliers
from .sentences import explain, out_of_line, spread
from .spread import logit_std


@dataclass(kw_only=True)
class LayerScale(Scale):
    """The scale of one layer as the document has it, its place, and its fault: one of ``health.thresholds.FAULTS`` or None."""

    layer: str
    kind: str  # "self" or "cross"
    head_dim: int
    keys: float | None  # visible to a row, on average
    fault: str | None
    todo: str

    def part(self) -> Scale:
        """The ``scale`` of the document's layer."""
        return Scale(**{field.name: getattr(self, field.name) for field in fields(Scale)})


@dataclass
class CallScale:
    """The scale of one call in numbers; what tracing finds after the softmax is added to `traced` later."""

    measured: MeasuredScale
    applied: Applied
    predicted: float | None
    sums: tuple[float, float, float]  # rows, variances, keys
    traced: Traced | None


@dataclass
class SameScale:
    """The calls of a layer that apply the same scale: the best of them, and the sums over all."""

    best: CallScale
    rows: float = 0.0
    variance: float = 0.0
    keys: float = 0.0

    def takes(self, scale: CallScale) -> bool:
        """Whether a call belongs here: it applies the same scale, or its scale cannot be compared."""
        if not (scale.applied.followed and self.best.applied.followed):
            return True
        numbers, varied = (scale.applied.number, self.best.applied.number), (scale.measured, self.best.measured)
        if any(one.varies is not None for one in varied) or None in numbers:
            return True
        return close(numbers[0] or 0.0, numbers[1] or 0.0, WEIGHTS_CLOSE)

    def add(self, scale: CallScale) -> None:
        if scale.applied.followed and not self.best.applied.followed:
            self.best = scale  # keys from a cache cannot be followed; in another call they were computed
        rows, variance, keys = scale.sums
        self.rows, self.variance, self.keys = self.rows + rows, self.variance + variance, self.keys + keys


@dataclass
class Audit:
    """Examiner: read ``layers()`` after the run."""

    traces: bool = True
    calls: dict[tuple[str, str], list[SameScale]] = field(default_factory=dict)  # most layers apply one scale

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> CallScale:
        found = applied(call)
        facts, number = call.facts, found.number
        stated = declared(call, vitals.visible)
        if stated is None and number is not None:
            stated = hinted(call, number / found.stretch, found.counted)
        measured = MeasuredScale(
            head_dim=facts.head_dim,
            heads=facts.heads,
            applied=number,
            factors=tuple(found.counted),
            varies=found.varies,
            learned=found.learned,
            stretch=found.stretch,
            log_n=_grows(call, vitals),
            norms=found.norms,
            softcap=facts.softcap if facts.softcap is not None else call.softcap,
            width=width(call),
            layer=layer_index(call),
            declared=stated,
            given=facts.declared,
            argument=found.call,
            by_design=is_of_transformers(call.frames[-1].module) or (stated is not None and stated.firm),
            followed=found.followed,
        )
        predicted = predicted_std(call, found.at_product)
        return CallScale(measured, found, predicted, logit_std(call, vitals, rows), call.traced)

    def keep(self, name: str, call: AttentionCall, found: CallScale | None) -> None:
        if found is None:
            return
        groups = self.calls.setdefault((name, call.facts.kind), [])
        group = next((one for one in groups if one.takes(found)), None)
        if group is None:
            group = SameScale(found)
            groups.append(group)
        group.add(found)

    def layers(self) -> list[LayerScale]:
        """Every layer that was measured, in the order of the model."""
        measured = {place: [_complete(calls) for calls in groups] for place, groups in self.calls.items()}
        layered = _follow_layers([one for several in measured.values() for one in several])
        found = []
        for place, several in measured.items():
            known = [replace(one, layered=layered) for one in several]
            judged = [_layer(place, calls, one) for calls, one in zip(self.calls[place], known, strict=True)]
            levels = [0 if one.fault is None else LEVELS.index(FAULTS[one.fault][0]) for one in judged]
            worst = levels.index(max(levels))
            found.append((_said(judged, worst), known[worst]))
        layers = [layer for layer, _ in found]
        for odd in outliers([(layer.layer, layer.kind, measured) for layer, measured in found]):
            layer = layers[odd.place]
            if layer.fault is None and layer.applied is not None:
                says, todo = out_of_line(layer.applied, odd.others, odd.common)
                layers[odd.place] = replace(layer, fault="odd", says=f"{layer.says} {says}", todo=todo)
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


def _said(judged: list[LayerScale], worst: int) -> LayerScale:
    """A layer by its worst calls, with all the scales that its calls apply."""
    layer = judged[worst]
    if len(judged) == 1:
        return layer
    numbers = [f"{one.applied:.4g}" for one in judged if one.applied is not None]
    return replace(layer, says=f"{layer.says} Its calls apply {', '.join(numbers[:-1])} and {numbers[-1]}.")


def _follow_layers(found: list[MeasuredScale]) -> bool:
    """Whether two or more layers apply 1/((layer + 1) √d_k): in one layer that may be chance."""
    at = [one for one in found if one.layer is not None and one.applied is not None]
    following = [one for one in at if one.applied and close(one.applied, one.head_dim**-0.5 / ((one.layer or 0) + 1))]
    return len({one.layer for one in following}) > 1 and len(following) == len(at)


def _layer(place: tuple[str, str], calls: SameScale, measured: MeasuredScale) -> LayerScale:
    judged = judge(measured)
    says, todo = explain(measured, judged)
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
        says=says,
        std_says=spread(measured.logit_std, best.predicted),
        todo=todo,
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
