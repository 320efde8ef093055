"""The examiner of the checks: what is read of every attention call, and the faults of all layers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...health import Finding
from ...health.faults import ATTENTION_FAULTS, CHECKS, CheckResult
from ...vitals import Vitals
from ...watch.examine import AttentionCall, Traced, WeakMask
from ..audit.judge import WEIGHTS_CLOSE, close
from . import sentences
from .declared import AHEAD, BACKWARD, DIFFERS, is_causal_module, is_decoder, is_published, says
from .masks import MaskPattern, pattern, weak_argument
from .padding import real_tokens

NUMBER = re.compile(r"\d+")
FLOAT32 = torch.finfo(torch.float32).eps
"""A weight below this cannot move a sum whose other weights are 1 in all; a mask that hides leaves none."""
Place = tuple[str, str]


@dataclass
class CallReading:
    """What was read of one call."""

    pattern: MaskPattern | None
    weak: WeakMask | None
    dropout: float
    causal: bool | None  # what the module says
    modules: tuple[nn.Module, ...]
    beside: bool
    traced: Traced | None
    queries: int
    packed: bool = False  # whether it is one document of a packed call
    over: str = "keys"
    softmaxes: int = 1


@dataclass
class AttentionChecks:
    """Examiner: call ``begin`` before each pass, read ``findings()`` and ``results()`` after the last."""

    model: nn.Module
    traces: bool = True
    layers: dict[Place, list[CallReading]] = field(default_factory=dict)
    real: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    last: tuple[Tensor | None, tuple[Any, ...], MaskPattern | None] | None = None  # the mask that was read last

    def begin(self, batch: Any) -> None:
        """Set the batch of the coming pass."""
        self.last = None
        self.real = real_tokens(self.model, batch)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> CallReading:
        facts = call.facts
        return CallReading(
            pattern=self._pattern(call),
            weak=weak_argument(call, vitals),
            dropout=facts.dropout,
            causal=is_causal_module(call),
            modules=tuple(frame.module for frame in call.frames[-2:]),
            beside=sum(call.sink_columns) > 0,
            traced=call.traced,
            queries=facts.queries,
            packed=call.document is not None,
        )

    def _pattern(self, call: AttentionCall) -> MaskPattern | None:
        """The pattern of a call; most layers are given the same mask, and it is read once."""
        facts = call.facts
        real = self.real.get((facts.batch, facts.keys - sum(call.sink_columns)))
        if call.logits is not None:
            return pattern(call, real)
        place = (facts.kind, facts.batch, facts.queries, facts.keys, call.causal, call.window)
        if self.last is None or self.last[0] is not call.mask or self.last[1] != place:
            self.last = call.mask, place, pattern(call, real)
        return self.last[2]

    def keep(self, name: str, call: AttentionCall, seen: CallReading | None) -> None:
        if seen is not None:
            seen.over, seen.softmaxes = call.over, call.softmaxes
            self.layers.setdefault((name, call.facts.kind), []).append(seen)

    def findings(self) -> list[Finding]:
        """The faults of all layers, each once for a layer."""
        found: dict[tuple[Place, str], Finding] = {}
        for place, readings in self.layers.items():
            for reading in readings:
                for fault, value, (what, todo) in self._faults(place, reading):
                    found.setdefault((place, fault), fault_finding(fault, place, value, what, todo))
        for place, fault, (what, todo) in self._differing():
            found.setdefault((place, fault), fault_finding(fault, place, None, what, todo))
        return list(found.values())

    def results(self, findings: list[Finding]) -> list[CheckResult]:
        """Every check that costs no pass, with how many layers it judged."""
        failed = {ATTENTION_FAULTS[str(one.fault)].check for one in findings if one.name == "attention"}
        failed |= {"scale"} if any(one.name == "scale" and one.level != "note" for one in findings) else set()
        results = []
        for name, check in CHECKS.items():
            if not check.deep:
                judged = sum(any(_judges(name, one) for one in readings) for readings in self.layers.values())
                state = "failed" if name in failed else "passed" if judged else "skipped"
                results.append(CheckResult(name=name, state=state, deep=False, layers=judged, says=_says(name, state)))
        return results

    @property
    def packed(self) -> bool:
        """Whether a call was packed."""
        return any(one.packed for readings in self.layers.values() for one in readings)

    @property
    def is_causal(self) -> dict[str, bool]:
        """By layer of self-attention, in the order they ran: whether its rows see no key after their own."""
        known = {
            name: [one.pattern for one in readings if one.pattern is not None]
            for (name, kind), readings in self.layers.items()
            if kind == "self"
        }
        return {name: all(one.causal for one in patterns) for name, patterns in known.items() if patterns}

    @property
    def causal_lengths(self) -> set[int]:
        """How many queries the causal layers have."""
        readings = [one for some in self.layers.values() for one in some if one.pattern is not None]
        return {one.queries for one in readings if one.pattern is not None and one.pattern.causal}

    @property
    def prefix(self) -> int:
        """How many first keys a mask lets rows see although they come later: those of a prefix LM; 0: none."""
        patterns = [one.pattern for readings in self.layers.values() for one in readings if one.pattern is not None]
        return max((one.prefix for one in patterns), default=0)

    @property
    def reads_both_ways(self) -> bool:
        """Whether some layers read from the left and others from the right."""
        patterns = [one.pattern for readings in self.layers.values() for one in readings if one.pattern is not None]
        left = any(one.past and not one.future for one in patterns)
        return left and any(one.future and not one.past for one in patterns)

    @property
    def say_causal(self) -> bool:
        """Whether all attention modules say that they are causal."""
        said = [one.causal for (_, kind), readings in self.layers.items() if kind == "self" for one in readings]
        return bool(said) and all(said)

    def _faults(self, place: Place, one: CallReading) -> Iterator[tuple[str, float | None, tuple[str, str]]]:
        traced = one.traced
        if one.over != "keys":
            sums = None if traced is None else traced.across
            if sums is None or not _are_one(sums):  # slot attention divides by the sum of each row afterwards
                yield f"over_{one.over}", None if sums is None else sums[1], sentences.over(one.over, sums)
            return
        if one.softmaxes > 1:
            yield "softmax_twice", float(one.softmaxes), sentences.twice()
        if one.dropout > 0:
            yield "dropout_in_eval", one.dropout, sentences.dropout(one.dropout)
        if traced is not None:
            yield from _of_weights(one, traced)
        weak = one.weak or (None if traced is None else traced.weak)
        if weak is not None and weak.weight > FLOAT32:
            yield "weak_mask", weak.weight, sentences.weak(weak.how, weak.weight)
        elif one.pattern is not None:
            yield from self._of_mask(place, one, one.pattern)
        for cut in () if traced is None else traced.cuts:
            if not cut.right:
                yield "heads_mixed", None, sentences.mixed(cut.head, cut.row, cut.token, cut.turned)
                return
        merged = None if traced is None else traced.merged
        if merged is not None and not merged.right:
            yield "heads_joined", None, sentences.joined(merged.row, merged.token)

    def _of_mask(
        self, place: Place, one: CallReading, seen: MaskPattern
    ) -> Iterator[tuple[str, float | None, tuple[str, str]]]:
        decoder = is_decoder(self.model)
        if seen.future and not seen.past and not self._reads_backward(one):
            yield ("transposed_mask" if seen.own else "inverted_mask"), None, sentences.inverted(seen.own)
        elif seen.shifted and says(one.modules, AHEAD) is None:
            yield "shifted_mask", 1.0, sentences.shifted()
        elif (
            decoder is not None and seen.future and not seen.prefix and one.causal is not False and self._is_outer(one)
        ):
            yield "missing_mask", None, sentences.missing(decoder)
        if seen.padding_seen:
            if seen.words_hidden:
                yield "padding_inverted", None, sentences.padding_inverted()
            else:
                yield "padding_visible", None, sentences.padding_visible()
        if seen.heads_differ and not any(map(is_published, one.modules)) and says(one.modules, DIFFERS) is None:
            yield "heads_differ", None, sentences.heads_differ()

    def _is_outer(self, one: CallReading) -> bool:
        """Whether a layer belongs to the decoder that the model declares, not to an image or sound encoder inside it."""
        config = getattr(one.modules[-1], "config", None)
        whole = getattr(self.model, "config", None)
        return config is None or whole is None or getattr(config, "model_type", 0) == getattr(whole, "model_type", 1)

    def _reads_backward(self, one: CallReading) -> bool:
        """Whether a model reads from the right on purpose: it says so, or other layers read from the left."""
        return says((*one.modules, self.model), BACKWARD) is not None or self.reads_both_ways

    def _differing(self) -> Iterator[tuple[Place, str, tuple[str, str]]]:
        """Layers that see the future among similar ones that do not, or the other way round; the fewer are named."""
        groups: dict[tuple[str, str], dict[Place, CallReading]] = {}
        for place, readings in self.layers.items():
            first = next((one for one in readings if one.pattern is not None), None)
            if first is not None and first.causal is None:
                groups.setdefault((NUMBER.sub("#", place[0]), place[1]), {})[place] = first
        for group in groups.values():
            some = list(group.values())
            if len(some) < 2 or any(is_published(one.modules[-1]) for one in some):
                continue
            if any(says(one.modules, DIFFERS) is not None for one in some):
                continue
            seeing = [place for place, one in group.items() if one.pattern is not None and one.pattern.future]
            hiding = [place for place in group if place not in seeing]
            fewer, rest = (seeing, hiding) if len(seeing) <= len(hiding) else (hiding, seeing)
            for place in fewer:
                yield place, "masks_differ", sentences.differ(len(rest), fewer is seeing)


def fault_finding(fault: str, place: Place, value: float | None, what: str, todo: str) -> Finding:
    """A finding about a layer's attention."""
    known = ATTENTION_FAULTS[fault]
    return Finding("attention", known.level, *place, None, value, None, known.source, what, todo, fault)


def _of_weights(one: CallReading, traced: Traced) -> Iterator[tuple[str, float | None, tuple[str, str]]]:
    sums = traced.sums
    if sums is None or close(*sums, WEIGHTS_CLOSE) or one.beside:
        return
    if "dropped" in traced.changes:
        if not one.dropout:
            yield "dropout_in_eval", None, sentences.dropout(None)
    elif "gated" in traced.changes:
        return
    elif "masked" in traced.changes:
        yield "masked_after_softmax", sums[0], sentences.masked_after(sums)
    elif "divided" in traced.changes:
        yield "uneven_rows", sums[0], sentences.uneven(sums)


def _are_one(sums: tuple[float, float]) -> bool:
    return close(*sums, WEIGHTS_CLOSE) and close(sums[0], 1.0, WEIGHTS_CLOSE)


def _judges(name: str, one: CallReading) -> bool:
    """Whether a reading shows enough for a check to pass."""
    traced = one.traced
    if name in ("mask_direction", "mask_agreement"):
        return one.pattern is not None
    if name == "mask_padding":
        return one.pattern is not None and one.pattern.judged_padding
    if name == "row_sums":
        return traced is not None and (traced.scores is None or traced.sums is not None or traced.across is not None)
    if name == "head_layout":
        return traced is not None and (bool(traced.cuts) or traced.merged is not None)
    return True


def _says(name: str, state: str) -> str:
    if state == "skipped":
        return _SKIPPED.get(name, "no layer shows it")
    return CHECKS[name].passes


_SKIPPED = {
    "mask_padding": "the batch has no padding",
    "head_layout": "q and v could not be followed back to a projection; --deep tries it",
    "mask_direction": "no self-attention of five tokens or more was seen",
    "mask_agreement": "no self-attention of five tokens or more was seen",
}
