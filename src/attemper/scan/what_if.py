"""What if: the same model on the same inputs, with the scale replaced while it runs.

A first run records the ops that compute each layer's scores. In the next run those ops, and nothing else, use another scale. The
weights of the model are not touched. A layer whose ops cannot be altered keeps its scale, and a note says so. It is an error if
none can be altered, or if the model takes another path the second time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import InputError, nearest
from ..scale import RULES
from ..watch.examine import (
    Alteration,
    AttentionCall,
    CallInfo,
    Examiner,
    OpPlace,
    altered,
    examine,
    running,
    split_number,
)
from .document import SIGNS, Json, WhatIf

MOSTLY = 0.5
"""A head counts as saturated if more than this share of its rows are; heads.py says which rows count."""

NOT_ONE_NUMBER = {
    "log_n": "its scale grows with the keys that each row sees",
    "learned": "its scale is learned per head, and this model was not trained with it; it starts at 'sqrt_dk'",
    "qk_norm": "it normalises q and k before the product",
    "softcap": "it bounds the logits after the scale; its scale is that of 'sqrt_dk'",
}
TIMES = re.compile(r"[x×](.+)")


@dataclass(frozen=True)
class RecordedCall:
    """One attention call of a run: its layer, and the ops that computed its scores."""

    layer: str
    kind: str
    info: CallInfo
    places: tuple[OpPlace, ...]


class CallRecorder(Examiner):
    """The examiner that records the calls, in order."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def keep(self, name: str, call: AttentionCall, result: object) -> None:
        self.calls.append(RecordedCall(name, call.info.kind, call.info, call.places))


def what_if(
    model: nn.Module,
    run: Callable[[], object],
    rules: Sequence[str],
    applied: Mapping[tuple[str, str], float | None] | None = None,
    progress: Callable[[str], object] | None = None,
    keep: Callable[[WhatIf], object] | None = None,
    examiners: Sequence[Examiner] = (),
    note: Callable[[str], object] = lambda sentence: None,
) -> list[WhatIf]:
    """Run a model once as it is and once for each rule, with its scale replaced by the rule's, and measure its heads.

    Gradients are off, and each run draws the same random numbers. Another open watch measures these runs too. ``run`` calls the
    model on the same inputs each time; ``progress`` is called with each rule before its run, ``keep`` with each result at once,
    so that Ctrl-C loses none. ``examiners`` examine the calls of every run, including the first, unaltered one. ``note`` is
    called with a sentence for each layer that keeps its scale.

    Args:
        rules: names of rules whose scale is one number (``"none"``, ``"dk"``, ``"sqrt_dmodel"``, …), numbers (``"0.5"``: that
            scale in every layer), or factors (``"x2"``: twice the scale that each layer has).
        applied: the whole scale that each (layer, kind) applies now, as the audit measures it; None: not known. For a layer that
            is not in it, the argument of the call is used, which does not include factors on q and k.
    """
    wanted = [_wanted(rule) for rule in rules]
    if running.frames:
        raise InputError(
            "scan: --what-if runs the model itself, so it cannot be used inside a model's forward. Call scan() outside of it."
        )
    applied = applied or {}
    with _same_each_time(model) as reseed:
        reseed()
        alteration = Alteration()
        heads, first = _measure(model, run, alteration, examiners, note)
        reached = _reachable(first, alteration, note)
        results = []
        for rule, scale in zip(rules, wanted, strict=True):
            if progress is not None:
                progress(rule)
            reseed()
            second = Alteration(_ratios(rule, reached, scale, applied, note))
            heads, calls = _measure(model, run, second, examiners, note)
            _check_same_path(rule, first, alteration, calls, second)
            results.append(summed_up(rule, heads))
            if keep is not None:
                keep(results[-1])
    return results


Wanted = Callable[[CallInfo, int, Callable[[], float]], float]
"""From the info of a call, the number of its layer and its present scale to the factor that makes it the rule's scale."""


def check_rules(rules: Sequence[str]) -> None:
    """Raise for a rule that cannot be tried, before anything runs."""
    for rule in rules:
        _wanted(rule)


def _wanted(rule: str) -> Wanted:
    """The factor that a rule needs, or an error that says why it cannot be tried."""
    known = RULES.get(rule)
    if known is None:
        times = TIMES.fullmatch(rule)
        number = _number(rule if times is None else times[1])
        if number is None:
            offered = [name for name in RULES if name not in NOT_ONE_NUMBER]
            raise InputError(
                f"scan: --what-if takes names of rules, scales like 0.5 and factors like x2, separated by commas; got {rule!r}. "
                f"{nearest(rule, offered)}"
            )
        if times is not None:
            return lambda info, layer, now: number
        return lambda info, layer, now: number / now()
    if rule in NOT_ONE_NUMBER:
        raise InputError(
            f"scan: --what-if cannot try the rule {rule!r}, which is not a single number: {NOT_ONE_NUMBER[rule]}. "
            f"Use one of {', '.join(repr(name) for name in RULES if name not in NOT_ONE_NUMBER)}."
        )
    return lambda info, layer, now: known.scale(head_dim=info.head_dim, heads=info.heads, layer=layer) / now()


def _number(word: str) -> float | None:
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) and number > 0 else None


def _measure(
    model: nn.Module,
    run: Callable[[], object],
    alteration: Alteration,
    examiners: Sequence[Examiner],
    note: Callable[[str], object],
) -> tuple[list[dict[str, Any]], list[RecordedCall]]:
    """One run: a row for each head, and the calls."""
    recorder = CallRecorder()
    watching = examine(model, [recorder, *examiners], by_call=True)
    with altered(alteration), watching:
        run()
    if watching.unmeasured:
        note(
            f"what if: a part of the attention keeps its scale, because it could not be measured: {watching.record.notes[0]}"
        )
    return watching.record.to_dicts(), recorder.calls


def _reachable(
    calls: Sequence[RecordedCall], alteration: Alteration, note: Callable[[str], object]
) -> list[RecordedCall]:
    """The calls whose scale is an argument or a factor that can be replaced; an error if there is none."""
    calls_to_alter = [
        call for call in calls if call.places and all(alteration.found[place].can_be_altered for place in call.places)
    ]
    left = {call.layer: call.info.implementation or call.info.route for call in calls if call not in calls_to_alter}
    if not calls_to_alter:
        layer, how = next(iter(left.items()), ("the model", "a kernel"))
        raise InputError(
            f"scan: --what-if: the scale of {layer!r} cannot be replaced while it runs, because {how!r} does not show "
            "the op that applies it. Load the model with attn_implementation='sdpa' or 'eager', without replace=True."
        )
    for layer, how in left.items():
        note(f"what if: {layer} keeps its scale, because {how!r} does not show the op that applies it.")
    return calls_to_alter


def _ratios(
    rule: str,
    calls: Sequence[RecordedCall],
    wanted: Wanted,
    applied: Mapping[tuple[str, str], float | None],
    note: Callable[[str], object],
) -> dict[OpPlace, float]:
    numbers = layer_numbers([call.layer for call in calls])
    ratios: dict[OpPlace, float] = {}
    unknown: InputError | None = None
    for call in calls:
        try:
            ratio = wanted(call.info, numbers[call.layer], partial(_present_scale, call, applied))
        except InputError as error:
            unknown = error
            note(
                f"what if the scale were {rule}: {call.layer} keeps its own, which is not known. A factor like x2 replaces it."
            )
            continue
        for place in call.places:
            if ratios.setdefault(place, ratio) != ratio:
                raise InputError(
                    f"scan: --what-if: {call.layer!r} shares a product with another layer that needs another scale. "
                    "Ask for one factor for all, like x2."
                )
    if unknown is not None and not ratios:
        raise unknown
    return ratios


def _present_scale(call: RecordedCall, applied: Mapping[tuple[str, str], float | None]) -> float:
    """The whole scale that the layer of a call applies."""
    scale = applied.get((call.layer, call.kind), call.info.scale)
    if not scale:
        raise InputError(
            f"scan: --what-if: the scale that {call.layer!r} applies is not known, so it cannot be replaced. "
            "Ask for a factor like x2."
        )
    return scale


def layer_numbers(layers: Sequence[str]) -> dict[str, int]:
    """Each layer's number in its stack, from 0: a stack is the layers whose names differ only in their numbers."""
    stacks: dict[str, dict[str, int]] = {}
    for layer in layers:
        stack = stacks.setdefault(re.sub(r"\d+", "#", split_number(layer)[0]), {})
        stack.setdefault(layer, len(stack))
    return {layer: number for stack in stacks.values() for layer, number in stack.items()}


def _check_same_path(
    rule: str, first: Sequence[RecordedCall], before: Alteration, second: Sequence[RecordedCall], after: Alteration
) -> None:
    """Raise unless the altered run computed every score in the same op as the first, with the scale of the rule."""
    for call, altered_call in zip(first, second, strict=False):
        same = (call.layer, call.kind, call.places) == (altered_call.layer, altered_call.kind, altered_call.places)
        if not same or any(before.found[place] != after.found.get(place) for place in call.places):
            break
        if call.info.scale is not None and altered_call.info.scale is not None:
            expected = call.info.scale * (after.ratios.get(call.places[0], 1.0) if call.places else 1.0)
            if not math.isclose(altered_call.info.scale, expected, rel_tol=1e-6):
                break
    else:
        if len(first) == len(second):
            return
        call = max(first, second, key=len)[min(len(first), len(second))]
    raise InputError(
        f"scan: --what-if: with the rule {rule!r} the model took another path through {call.layer!r}, so its scale was "
        "not replaced there, and there is no result. Call it with the same inputs, in eval(), with a cache that starts empty."
    )


@contextmanager
def _same_each_time(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Turn off gradients and the fast path that hides the scale; yields a function that resets the random numbers."""
    fast = torch.backends.mha.get_fastpath_enabled()
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
        states = [(device, torch.cuda.get_rng_state(device)) for device in devices]
        state = torch.get_rng_state()

        def reseed() -> None:
            torch.set_rng_state(state)
            for device, numbers in states:
                torch.cuda.set_rng_state(numbers, device)

        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield reseed
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def summed_up(rule: str, heads: Sequence[Mapping[str, Any]]) -> WhatIf:
    """The signs of heads, of a run or of a document, with the numbers over all of them."""
    rows: list[Json] = [{name: row[name] for name in SIGNS} for row in heads]
    return WhatIf(
        rule=rule,
        heads=rows,
        saturated_heads=sum((row["saturated"] or 0.0) > MOSTLY for row in rows),
        effective_keys=_mean(rows, "effective_keys"),
        peak=max((row["peak"] for row in rows if row["peak"] is not None), default=math.nan),
        logit_std=math.sqrt(_mean(rows, "variance")),
    )


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    numbers = [row[name] for row in rows if row[name] is not None and not math.isnan(row[name])]
    return sum(numbers) / len(numbers) if numbers else math.nan
