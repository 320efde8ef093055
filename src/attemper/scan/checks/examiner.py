"""The examiner of the checks: it reads every attention call and finds the faults of all layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._display import plural
from ...health import Finding
from ...health.faults import ATTENTION_FAULTS, CHECKS, CheckResult
from ...health.finding import fault_finding
from ...vitals import Vitals
from ...watch.examine import AttentionCall, Traced, WeakMask
from ..audit.judge import WEIGHTS_CLOSE, close
from .declared import (
    AHEAD,
    BACKWARD,
    DIFFERS,
    is_causal_module,
    is_decoder,
    is_published,
    matching_setting,
    real_tokens,
    window_of,
)
from .masks import SHORTEST, MaskPattern, is_cross_causal, pattern, weak_argument
from .numbers import all_zero

NUMBER = re.compile(r"\d+")
FLOAT32 = torch.finfo(torch.float32).eps
"""A smaller weight cannot change a sum of 1; a mask that hides a key leaves it none."""
SHORT = ("mask_direction", "mask_agreement")
Place = tuple[str, str]
FaultRead = tuple[str, float | None, dict[str, Any]]
"""A fault, its number, and the words that fill in its message."""
TURNED = (
    "Key {row} of head {head} holds numbers of token {token}: the keys were reshaped to (head dim, length), not transposed, so "
    "every key mixes positions."
)
TURNED_ADVICE = "Write q @ k.transpose(-2, -1): a reshape or a view to the same shape moves numbers to other tokens."

TOGETHER = (
    "The softmax runs over the heads and the keys together: heads compete with one another. The weights of a row add up to "
    "between {low} and {high} in each head instead of 1."
)


@dataclass
class CallReading:
    """What was read of one call."""

    pattern: MaskPattern | None
    weak: WeakMask | None
    dropout: float
    causal: bool | None  # as an attribute of the module says
    modules: tuple[nn.Module, ...]
    beside: bool
    traced: Traced | None
    queries: int
    width: int = 1  # of a head
    together: int = 1  # how many times as many columns as queries, if one product made them all
    packed: bool = False  # whether it is one document of a packed call
    over: str = "keys"
    axes: tuple[int, int | None, int] | None = (
        None  # of a softmax over others: its dimension, that of the keys, of how many
    )
    softmaxes: int = 1
    empty: int = 0  # rows that see no key
    all_zero: bool = False  # whether every score is 0
    cross_causal: bool = False


@dataclass
class AttentionChecks:
    """Examiner: call ``begin`` before each pass, read ``findings()`` and ``results()`` after the last."""

    model: nn.Module
    traces: bool = True
    declared: Mapping[str, bool] = field(default_factory=dict)  # by the user: what is meant
    by_module: bool = True  # for experiments, which run the modules
    layers: dict[Place, list[CallReading]] = field(default_factory=dict)
    real: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    last: tuple[Tensor | None, tuple[Any, ...], MaskPattern | None] | None = None  # the mask that was read last

    def begin(self, batch: Any) -> None:
        """Set the batch of the next pass."""
        self.last = None
        self.real = real_tokens(self.model, batch)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> CallReading:
        info = call.info
        return CallReading(
            pattern=self._pattern(call),
            weak=weak_argument(call, vitals),
            dropout=info.dropout,
            causal=is_causal_module(call),
            modules=tuple(frame.module for frame in call.frames[-2:]),
            beside=sum(call.sink_columns) > 0,
            traced=call.traced,
            queries=info.queries,
            width=info.head_dim,
            together=_together(call),
            packed=call.document is not None,
            empty=int((vitals.visible == 0).any(1).sum()),
            all_zero=_all_zero(vitals),
            cross_causal=is_cross_causal(call),
        )

    def _pattern(self, call: AttentionCall) -> MaskPattern | None:
        """The pattern of a call; most layers are given the same mask, and it is read once."""
        info = call.info
        real = self.real.get((info.batch, info.keys - sum(call.sink_columns)))
        if call.logits is not None:
            return pattern(call, real)
        place = (info.kind, info.batch, info.queries, info.keys, call.causal, call.window)
        if self.last is None or self.last[0] is not call.mask or self.last[1] != place:
            self.last = call.mask, place, pattern(call, real)
        return self.last[2]

    def keep(self, name: str, call: AttentionCall, seen: CallReading | None) -> None:
        if seen is not None:
            seen.over, seen.axes, seen.softmaxes = call.over, call.axes, call.softmaxes
            self.layers.setdefault((name, call.info.kind), []).append(seen)

    def findings(self) -> list[Finding]:
        """The faults of all layers, each once for a layer."""
        findings: dict[tuple[Place, str], Finding] = {}
        for place, readings in self.layers.items():
            for reading in readings:
                for fault, value, words in self._faults(reading):
                    findings.setdefault((place, fault), fault_finding(fault, place, value, **words))
        modules = dict(self.model.named_modules())
        for place in self.layers:
            if place[0] in modules and all_zero(modules[place[0]]):
                findings.pop((place, "zero_scores"), None)
                findings[place, "zero_weights"] = fault_finding("zero_weights", place, 0.0)
        for place, words in self._differing():
            findings.setdefault((place, "masks_differ"), fault_finding("masks_differ", place, None, **words))
        return list(findings.values())

    def results(self, findings: list[Finding]) -> list[CheckResult]:
        """Every check that costs no pass, with how many layers it judged."""
        failed = {ATTENTION_FAULTS[str(finding.fault)].check for finding in findings if finding.name == "attention"}
        failed |= {"numbers"} if any(finding.name == "nan" for finding in findings) else set()
        failed |= (
            {"scale"} if any(finding.name == "scale" and finding.level != "note" for finding in findings) else set()
        )
        results = []
        for name, check in CHECKS.items():
            if not check.deep:
                judged = sum(any(_judges(name, reading) for reading in readings) for readings in self.layers.values())
                state = "failed" if name in failed else "passed" if judged else "skipped"
                needs = "5 tokens or more" if state == "skipped" and name in SHORT and self._is_short else None
                results.append(
                    CheckResult(
                        name=name, state=state, deep=False, layers=judged, message=_message(name, state), needs=needs
                    )
                )
        return results

    @property
    def _is_short(self) -> bool:
        """Whether all self-attention is of fewer tokens than show a pattern."""
        lengths = [
            reading.queries for (_, kind), readings in self.layers.items() if kind == "self" for reading in readings
        ]
        return bool(lengths) and max(lengths) < SHORTEST

    @property
    def empty_rows(self) -> dict[str, int]:
        """By layer: how many rows of a call see no key."""
        return {name: max(reading.empty for reading in readings) for (name, _), readings in self.layers.items()}

    @property
    def _patterns(self) -> list[MaskPattern]:
        return [
            reading.pattern for readings in self.layers.values() for reading in readings if reading.pattern is not None
        ]

    @property
    def packed(self) -> bool:
        """Whether a call was packed."""
        return any(reading.packed for readings in self.layers.values() for reading in readings)

    @property
    def heads_followed(self) -> bool:
        """Whether the ops of every layer of self-attention show that its heads keep their positions."""
        some = [reading.traced for (_, kind), readings in self.layers.items() if kind == "self" for reading in readings]
        return bool(some) and all(
            traced is not None and len(traced.cuts) >= len("qkv") and all(cut.right for cut in traced.cuts)
            for traced in some
        )

    @property
    def is_causal(self) -> dict[str, bool]:
        """By layer of self-attention, in the order they ran: whether its rows see no key after their own."""
        known = {
            name: [reading.pattern for reading in readings if reading.pattern is not None]
            for (name, kind), readings in self.layers.items()
            if kind == "self"
        }
        return {name: all(reading.causal for reading in patterns) for name, patterns in known.items() if patterns}

    @property
    def causal_lengths(self) -> set[int]:
        """How many queries the causal layers have."""
        readings = [reading for some in self.layers.values() for reading in some if reading.pattern is not None]
        return {reading.queries for reading in readings if reading.pattern is not None and reading.pattern.causal}

    @property
    def prefix(self) -> int:
        """The length of the prefix that every row sees, as in a prefix LM; 0: none."""
        return max((pattern.prefix for pattern in self._patterns), default=0)

    @property
    def reads_both_ways(self) -> bool:
        """Whether some layers read from the left and others from the right."""
        left = any(pattern.past and not pattern.future for pattern in self._patterns)
        return left and any(pattern.future and not pattern.past for pattern in self._patterns)

    @property
    def reads_backward(self) -> bool:
        """Whether every layer reads from the right."""
        return bool(self._patterns) and all(pattern.future and not pattern.past for pattern in self._patterns)

    @property
    def decoder(self) -> str | None:
        """What declares the model to be a decoder: the user, its class or its config; None: nothing does."""
        if "causal" in self.declared:
            return "declared={'causal': True}" if self.declared["causal"] else None
        found = is_decoder(self.model)
        by_name = found is not None and not found.startswith("config.") and is_published(self.model)
        said = [one.causal for (_, kind), readings in self.layers.items() if kind == "self" for one in readings]
        # XLNet and CPM-Ant have such names too, and attention modules that do not say that they are causal
        return None if by_name and not any(said) else found

    @property
    def declare_causal(self) -> bool:
        """Whether the user, or all attention modules, say that they are causal."""
        if "causal" in self.declared:
            return self.declared["causal"]
        said = [reading.causal for (_, kind), readings in self.layers.items() if kind == "self" for reading in readings]
        return bool(said) and all(said)

    @property
    def declare_bidirectional(self) -> bool:
        """Whether the user, or all attention modules, say that they are not causal."""
        if "causal" in self.declared:
            return not self.declared["causal"]
        said = [reading.causal for (_, kind), readings in self.layers.items() if kind == "self" for reading in readings]
        return bool(said) and all(reading is False for reading in said)

    def _faults(self, reading: CallReading) -> Iterator[FaultRead]:
        traced = reading.traced
        if reading.over != "keys":
            sums = None if traced is None else traced.across
            if sums is None or not _are_one(sums):  # slot attention divides by the sum of each row afterwards
                reach = (
                    ""
                    if sums is None
                    else " The weights of a row add up to between {} and {} instead of 1.".format(*map(_short, sums))
                )
                yield f"over_{reading.over}", None if sums is None else sums[1], {"sums": reach, **_axes(reading.axes)}
            return
        if reading.softmaxes > 1:
            yield "softmax_twice", float(reading.softmaxes), {}
        if reading.dropout > 0:
            yield "dropout_in_eval", reading.dropout, {"rate": f" (dropout_p={reading.dropout:g})"}
        if traced is not None:
            yield from _of_weights(reading, traced)
        if reading.all_zero:
            yield "zero_scores", 0.0, {}
        weak = reading.weak or (None if traced is None else traced.weak)
        if weak is not None and weak.weight > FLOAT32:
            yield "weak_mask", weak.weight, {"mask": weak.how, "weight": _short(weak.weight)}
        elif reading.pattern is not None:
            yield from self._of_mask(reading, reading.pattern)
        if reading.cross_causal:
            yield "crossed_causal", None, {}
        for cut in () if traced is None else traced.cuts:
            if not cut.right:
                words = {"row": cut.row, "head": cut.head, "token": cut.token}
                turned = {"message": TURNED.format(**words), "advice": TURNED_ADVICE} if cut.turned else {}
                yield "heads_mixed", None, words | turned
                return
        merged = None if traced is None else traced.merged
        if merged is not None and not merged.right:
            yield "heads_joined", None, {"row": merged.row, "token": merged.token}

    def _of_mask(self, reading: CallReading, seen: MaskPattern) -> Iterator[FaultRead]:
        decoder = self.decoder
        if seen.future and not seen.past and not self._reads_backward(reading):
            yield ("transposed_mask" if seen.own else "inverted_mask"), float(seen.count), {"example": seen.example}
        elif seen.shifted and matching_setting(reading.modules, AHEAD) is None:
            yield "shifted_mask", 1.0, {"example": seen.example}
        elif (
            decoder is not None
            and seen.future
            and not seen.prefix
            and reading.causal is not False
            and self._is_outer(reading)
        ):
            yield "missing_mask", float(seen.count), {"declared_by": decoder, "example": seen.example}
        elif seen.causal and seen.past and self._is_bidirectional(reading):
            yield (
                "causal_unasked",
                None,
                {"declared_by": type(self.model).__name__, "row": 0, "key": reading.queries - 1},
            )
        window = window_of(reading.modules)
        if (
            window is not None and seen.causal and seen.far == reading.queries - 1 > 2 * window[1]
        ):  # of an image it is a side
            words = {"declared_by": window[0], "window": window[1], "distance": seen.far}
            yield "window_ignored", float(seen.far), words | {"example": f"row {seen.far} sees key 0"}
        if seen.padding_seen:
            fault = "padding_inverted" if seen.words_hidden else "padding_visible"
            yield (
                fault,
                float(seen.padded_keys),
                {"example": seen.padded, "count": plural(seen.padded_keys, "padded key")},
            )
        if (
            seen.heads_differ
            and not any(map(is_published, reading.modules))
            and matching_setting(reading.modules, DIFFERS) is None
        ):
            yield "heads_differ", None, {"example": seen.heads_example}

    def _is_bidirectional(self, reading: CallReading) -> bool:
        """Whether its class, or the attention module, says that a model's rows see later tokens."""
        if is_published(self.model) or matching_setting((*reading.modules, self.model), DIFFERS) is not None:
            return False
        return "MaskedLM" in type(self.model).__name__  # a module's causal = False may mean that the mask is given

    def _is_outer(self, reading: CallReading) -> bool:
        """Whether a layer belongs to the decoder that the model declares, not to an image or sound encoder inside it."""
        config = getattr(reading.modules[-1], "config", None)
        whole = getattr(self.model, "config", None)
        return config is None or whole is None or getattr(config, "model_type", 0) == getattr(whole, "model_type", 1)

    def _reads_backward(self, reading: CallReading) -> bool:
        """Whether a model declares that it reads from the right, or has other layers that read from the left."""
        return matching_setting((*reading.modules, self.model), BACKWARD) is not None or self.reads_both_ways

    def _differing(self) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Layers that see the future among similar layers that do not, or the other way round: the smaller group."""
        groups: dict[tuple[str, str], dict[Place, CallReading]] = {}
        for place, readings in self.layers.items():
            first = next((reading for reading in readings if reading.pattern is not None), None)
            if first is not None and first.causal is None:
                groups.setdefault((NUMBER.sub("#", place[0]), place[1]), {})[place] = first
        for group in groups.values():
            some = list(group.values())
            if len(some) < 2 or any(is_published(reading.modules[-1]) for reading in some):
                continue
            if any(matching_setting(reading.modules, DIFFERS) is not None for reading in some):
                continue
            seeing = [
                place for place, reading in group.items() if reading.pattern is not None and reading.pattern.future
            ]
            hiding = [place for place in group if place not in seeing]
            fewer, rest = (seeing, hiding) if len(seeing) <= len(hiding) else (hiding, seeing)
            sees = next(group[place].pattern for place in seeing or hiding)
            example = f" ({sees.example})" if sees is not None and sees.example else ""
            if fewer is seeing:
                does, do, of_rest = (
                    f"sees keys after its own position{example}",
                    "does not" if len(rest) == 1 else "do not",
                    "",
                )
            else:
                does, do, of_rest = (
                    "hides keys after its own position",
                    "sees them" if len(rest) == 1 else "see them",
                    example,
                )
            for place in fewer:
                yield place, {"does": does, "others": f"{plural(len(rest), 'similar layer')} {do}{of_rest}"}


def _of_weights(reading: CallReading, traced: Traced) -> Iterator[FaultRead]:
    sums = traced.sums
    if sums is None or close(*sums, WEIGHTS_CLOSE) or reading.beside:
        return
    if "dropped" in traced.changes:
        if not reading.dropout:
            yield "dropout_in_eval", None, {"rate": ""}
    elif "gated" in traced.changes:
        return
    elif "added" in traced.changes:
        yield "added_after_softmax", sums[1], {"low": _short(sums[0]), "high": _short(sums[1])}
    elif not traced.changes and reading.together > 1 and sums[0] < 1 / reading.together < sums[1]:
        yield "over_heads", sums[1], {"message": TOGETHER.format(low=_short(sums[0]), high=_short(sums[1]))}
    elif {"masked", "divided"} & set(traced.changes):
        fault = "masked_after_softmax" if "masked" in traced.changes else "uneven_rows"
        yield fault, sums[0], {"low": _short(sums[0]), "high": _short(sums[1])}


def _together(call: AttentionCall) -> int:
    """Of scores (B, Lq, H · Lk) from one product: H, if Lk is Lq; otherwise 1."""
    info = call.info
    whole = info.heads == 1 and info.kind == "self" and not call.products and not any(call.sink_columns)
    return info.keys // info.queries if whole and info.keys % info.queries == 0 else 1


def _all_zero(vitals: Vitals) -> bool:
    """Whether every score that a row compares with others is 0."""
    several = vitals.visible > 1
    return bool(several.any()) and not bool(((vitals.mean != 0) | (vitals.variance != 0))[several].any())


def _axes(axes: tuple[int, int | None, int] | None) -> dict[str, Any]:
    """What to write in place of a softmax over the wrong dimension, if the scores are not (batch, heads, queries, keys)."""
    if axes is None or axes[1] is None or axes[1] == axes[2] - 1:
        return {}
    dim, keys, count = axes
    return {
        "advice": f"These scores have their keys in dimension {keys} of {count}, and the softmax runs over dimension {dim}: "
        f"write softmax(dim={keys}), or permute the scores to (batch, heads, queries, keys) and write softmax(dim=-1)."
    }


def _short(number: float) -> str:
    return f"{number:.3g}"


def _are_one(sums: tuple[float, float]) -> bool:
    return close(*sums, WEIGHTS_CLOSE) and close(sums[0], 1.0, WEIGHTS_CLOSE)


def _judges(name: str, reading: CallReading) -> bool:
    """Whether a reading shows enough for a check to pass."""
    traced = reading.traced
    if name in ("mask_direction", "mask_agreement"):
        return reading.pattern is not None
    if name == "mask_padding":
        return reading.pattern is not None and reading.pattern.judged_padding
    if name == "row_sums":
        return traced is not None and (traced.scores is None or traced.sums is not None or traced.across is not None)
    if name == "head_layout":
        return traced is not None and (bool(traced.cuts) or traced.merged is not None)
    return True


def _message(name: str, state: str) -> str:
    if state == "skipped":
        return _SKIPPED.get(name, "no layer shows it")
    return CHECKS[name].passes


_SKIPPED = {
    "mask_padding": "the batch has no padding",
    "head_layout": "q and v could not be followed back to a projection; --deep tries it",
    "mask_direction": "no self-attention of five tokens or more was seen",
    "mask_agreement": "no self-attention of five tokens or more was seen",
}
