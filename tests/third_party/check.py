"""What is asked of every model: that a watch changes nothing, that its numbers are the logger's, that a clip has its effect."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import attemper
from attemper.errors import InputError
from attemper.watch.examine import NoAttentionCall
from close import in_float32
from third_party.logger import SIGNS, Head, Logger

SEED, SPREAD = 7, 0.2
EFFECT = 0.01  # a clipped head is as near to tau as this: what attemper calls the effect of a clip
Place = tuple[str, str]


@dataclass
class Model:
    """A model of a package: what builds it, and what its author says of its attention.

    `build` returns the module and the arguments that it is called with. `layers` is how many modules attend, `heads` how many
    each has, or a number for each pattern of names. `other` is a pattern of modules whose softmax is no attention.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Any]]
    layers: int
    heads: int | dict[str, int]
    other: str | None = None
    shifted: bool = False  # it subtracts the largest of each row before its softmax, which the record adds again
    cap: float | None = None  # logits are cap · tanh(logits / cap)
    reused: bool = False  # a layer runs several times, so that a clip changes what its later runs read


@dataclass
class Result:
    """What became of a model: failures are sentences, as are remarks, which fail nothing."""

    layers: int = 0
    heads: str = ""
    clipped: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def made(model: Model) -> tuple[nn.Module, Any]:
    """The module in training mode, its matrices at least as large as Xavier would make them: at 0.02, heads hardly differ."""
    seed(SEED)
    module, inputs = model.build()
    with torch.no_grad():
        for parameter in module.parameters():
            spread = parameter.std().item() if parameter.dim() > 1 and parameter.numel() > 1 else 0.0
            if SPREAD / 100 < spread < SPREAD:
                parameter.mul_(SPREAD / spread)
    return module.train(), inputs


def floats(output: Any) -> Iterator[Tensor]:
    """The tensors of whatever a model returns."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from floats(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from floats(value)
    elif hasattr(output, "__dict__") and not isinstance(output, nn.Module):
        yield from floats(vars(output))


def called(module: nn.Module, inputs: Any) -> Any:
    return module(**inputs) if isinstance(inputs, dict) else module(*inputs)


def passed(module: nn.Module, inputs: Any, backward: bool = True) -> list[Any]:
    """A pass: the bits of its outputs, of the gradients, of the buffers and of what random generators it left behind."""
    seed(SEED + 1)
    module.zero_grad()
    outputs = [one for one in floats(called(module, inputs)) if one.is_floating_point()]
    assert outputs, "no tensor in the output"
    if backward:
        sum(output.square().sum() for output in outputs if output.requires_grad).backward()
    found: list[Any] = [output.detach().clone() for output in outputs]
    found += [None if parameter.grad is None else parameter.grad.clone() for parameter in module.parameters()]
    found += [buffer.to_dense().clone() for buffer in module.buffers()]
    return [*found, torch.get_rng_state(), numpy.random.get_state()[1].tolist(), random.getstate()]


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5)) and torch.equal(one.isnan(), other.isnan())
        if isinstance(one, Tensor) and isinstance(other, Tensor)
        else type(one) is type(other) and one == other
        for one, other in zip(found, expected, strict=True)
    )


def examine(model: Model) -> Result:
    """All of it."""
    result = Result()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, inputs = made(model)
        plain = [passed(module, inputs) for _ in range(2)]
        module, inputs = made(model)
        if not same(passed(module, inputs), plain[0]):
            result.failures.append("gives other bits when it is built and run again, without a watch")
            return result
        record = _watch(model, plain, result)
        if record is None:
            return result
        logged = log(model)
        _compare(model, record, logged, result)
        _clip(model, record, logged, result)
    return result


def _watch(model: Model, plain: list[list[Any]], result: Result) -> attemper.Record | None:
    """Watch two passes in every mode; the record of the first mode."""
    records = []
    for options in ({}, {"full": True}, {"gradients": True}):
        module, inputs = made(model)
        shown = ", ".join(options) or "intercepted"
        try:
            with attemper.watch(module, passes="all", **options) as watch:
                for number in range(2):
                    found = passed(module, inputs)
                    if not same(found, plain[number]):
                        result.failures.append(f"watch ({shown}): pass {number} has other bits")
                    watch.step()
        except NoAttentionCall:
            result.remarks[:] = ["no attention call found, which is an error of the watch"]
        except Exception as error:
            result.failures.append(f"watch ({shown}): {type(error).__name__}: {_line(error)}")
            continue
        records.append(watch.record)
    if len(records) == 3:
        first, second = (record.to_dicts() for record in records[:2])
        if repr(first) != repr(second):
            result.failures.append("the records of intercepted and of full passes differ")
    result.failures += _evaluated(model)
    return records[0] if records else None


def _evaluated(model: Model) -> Iterator[str]:
    """A pass in evaluation mode without gradients, where torch takes its fast paths."""
    module, inputs = made(model)
    module.eval()
    with torch.no_grad():
        try:
            expected = passed(module, inputs, backward=False)
        except Exception:
            return  # it only trains
        again = passed(module, inputs, backward=False)
        found = []
        with suppress(NoAttentionCall), attemper.watch(module):
            found += [passed(module, inputs, backward=False) for _ in range(2)]
    if same(expected, again) and not all(same(one, expected) for one in found):
        yield "watch (evaluation): other bits"


def log(model: Model, change: Callable[[nn.Module], None] | None = None) -> list[tuple[tuple[str, ...], list[Head]]]:
    """The own logger's calls in the first pass, of the model or of what a change made of it."""
    logger = Logger(model.heads, model.other, model.shifted)
    with logger.installed():
        module, inputs = made(model)
        if change is not None:
            change(module)
        with logger.of(module) as calls, torch.no_grad():
            seed(SEED + 1)
            called(module, inputs)
    return [(call.modules, call.heads) for call in calls]


def by_layer(
    logged: list[tuple[tuple[str, ...], list[Head]]], layers: list[str]
) -> tuple[dict[str, list[Head]], list[tuple[str, ...]]]:
    """The calls of each layer of a record, added up; and the modules of calls that are in no layer."""
    found: dict[str, list[Head]] = {}
    left = []
    for modules, heads in logged:
        name = next((name for name in reversed(modules) if name in layers), None)
        if name is None:
            left.append(modules)
        elif name not in found:
            found[name] = [head.join(Head()) for head in heads]
        else:
            found[name] = [one.join(other) for one, other in zip(found[name], heads, strict=True)]
    return found, left


def _compare(model: Model, record: attemper.Record, logged: Any, result: Result) -> None:
    """Every call in a layer or named; each sign of each head."""
    rows = record.filter(steps=0).to_dicts()
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    counts = sorted({sum(one["layer"] == layer for one in rows if one["kind"] == kind) for layer, kind in places(rows)})
    result.layers, result.heads = len(layers), "–".join(dict.fromkeys(map(str, counts[:1] + counts[-1:])))
    if not layers and not logged:
        return  # neither finds any, and the watch says so
    expected, left = by_layer(logged, layers)
    named = [modules[-1] for modules in left if any(_named(name, record.notes) for name in modules)]
    silent = sorted({modules[-1] for modules in left} - set(named))
    if silent:
        result.failures.append(f"attends, and is neither seen nor named: {', '.join(silent[:3])}")
    if named:
        result.remarks.append(f"named, not measured: {len(set(named))} of {len(set(named)) + len(layers)} layers")
    if len(layers) + len(set(named)) != model.layers:
        result.failures.append(f"{len(layers)} layers and {len(set(named))} named for {model.layers}: {layers[:4]}")
    for name in layers:
        mine = [row for row in rows if row["layer"] == name]
        if name not in expected:
            result.failures.append(f"{name} is in the record, and attends nowhere")
        elif {row["head"] for row in mine} != set(range(len(expected[name]))):
            result.failures.append(f"{name}: {len({row['head'] for row in mine})} heads for {len(expected[name])}")
        else:
            for head, values in enumerate(expected[name]):
                several = [row for row in mine if row["head"] == head]
                result.failures += _wrong(f"{name} head {head}", several, values)


def _wrong(title: str, rows: list[dict[str, Any]], head: Head) -> Iterator[str]:
    """Signs of a head that are not the logger's. Self- and cross-attention of one module are added up."""
    count = sum(row["rows"] for row in rows)
    if count != head.rows:
        yield f"{title}: {count} rows for {head.rows}"
        return
    size = max(head.size, math.log(head.keys))
    scores = max(row.get("score_peak", row["peak"]) for row in rows)
    if head.biased and scores != in_float32(head.bare, head.keys * head.rows, size, head.size):
        yield f"{title}: score_peak {scores:.6g} for {head.bare:.6g}"
    for sign in SIGNS:
        parts = [row[sign] for row in rows]
        found = (
            max(parts) if sign == "peak" else sum(v * row["rows"] for v, row in zip(parts, rows, strict=True)) / count
        )
        term = 1.0 if sign == "sum_p2" else size * size if sign == "variance" else size
        if found != in_float32(head.sign(sign), head.keys * head.rows, term, head.size):
            yield f"{title}: {sign} {found:.6g} for {head.sign(sign):.6g}"


def places(rows: list[dict[str, Any]]) -> list[Place]:
    return list(dict.fromkeys((row["layer"], row["kind"]) for row in rows))


def _named(name: str, notes: list[str]) -> bool:
    return bool(name) and any(f"{name}:" in note or f"{name}," in note for note in notes)


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:160]


def _clip(model: Model, record: attemper.Record, logged: Any, result: Result) -> None:
    """Clip each layer by itself, to between its heads' peaks: what was clipped is at tau, what was not is what it was."""
    if not len(record):
        return
    module, inputs = made(model)
    seed(SEED + 1)
    try:
        found = attemper.projections(module, inputs if isinstance(inputs, dict) else tuple(inputs))
    except InputError as error:
        result.refused += len(record.filter(steps=0))
        result.remarks.append(_line(error))
        return
    except Exception as error:
        result.failures.append(f"projections: {type(error).__name__}: {_line(error)}")
        return
    rows = record.filter(steps=0)
    reasons = set()
    for name, kind in places(rows.to_dicts()):
        mine = rows.filter(layers=lambda layer, name=name: layer == name, kind=kind)
        peaks = {row["head"]: row.get("score_peak", row["peak"]) for row in mine.to_dicts()}
        low, high = min(peaks.values()), max(peaks.values())
        tau = (low + high) / 2 if len(peaks) > 1 and low > 0 else high / 2
        if not 0 < tau < high < math.inf:
            result.remarks.append(f"{name}: its peaks are {low:.3g} to {high:.3g}; nothing to clip")
            continue
        done: list[Any] = []

        def clip(module: nn.Module, mine: Any = mine, tau: float = tau, done: list[Any] = done) -> None:
            done.append(attemper.qk_clip(module, mine, tau, projections=found))

        try:
            after = log(model, clip)
        except Exception as error:
            result.failures.append(f"{name}: clip: {type(error).__name__}: {_line(error)}")
            continue
        reasons |= {skipped_head.reason for skipped_head in done[0].skipped}
        result.failures += _without_effect(model, name, kind, done[0], peaks, record.layers, logged, after, result)
    result.remarks += sorted(reasons)[:2]


def _without_effect(
    model: Model,
    name: str,
    kind: str,
    clip: attemper.Clip,
    peaks: dict[int, float],
    layers: list[str],
    logged: Any,
    after: Any,
    result: Result,
) -> Iterator[str]:
    """Heads that were said to be clipped, and were not; others that changed; those above tau of which nothing was said."""
    clipped = {one.head: one for one in clip.heads}
    whole = any(skipped_head.head is None for skipped_head in clip.skipped)
    refused = set(peaks) if whole else {skipped_head.head for skipped_head in clip.skipped}
    result.clipped += len(clipped)
    result.refused += len(refused - set(clipped))
    before, now = (by_layer(calls, layers)[0] for calls in (logged, after))
    if len(before.get(name, [])) != len(peaks):
        return  # that its heads are others was said
    for head, peak in peaks.items():
        if peak > clip.tau and head not in clipped and head not in refused:
            yield f"{name} ({kind}) head {head}: {peak:.4g} is above {clip.tau:.4g}, and the clip says nothing"
    for head, one in clipped.items():
        was, found = before[name][head], now[name][head]
        aim = one.factor * one.before
        aim = model.cap * math.tanh(aim / model.cap) if model.cap else aim
        near = abs(found.peak - aim) <= EFFECT * aim or (model.reused and found.peak < was.peak)
        if near:
            continue
        scores = was.scores(found, one.factor)  # what a bias was added to
        if abs(scores - one.before) > EFFECT * one.before:
            yield f"{name} ({kind}) head {head}: clipped to {aim:.4g}, and is at {found.peak:.4g}, before {was.peak:.4g}"
    earlier = layers[: layers.index(name)]
    for other in [*earlier, name]:
        for head, was in enumerate(before.get(other, [])):
            if (other == name and head in clipped) or model.reused:
                continue
            found = now[other][head]
            if found.peak != in_float32(was.peak, was.keys * was.rows, was.size):
                yield f"{other} head {head}: was not clipped, and fell from {was.peak:.4g} to {found.peak:.4g}"
