"""Peaks: the largest score of each head in one step of a record, before a softcap, equal on all ranks."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor, distributed, nn
from torch.distributed import ProcessGroup

from ..errors import InputError
from ..watch import Record
from ..watch.examine import DataRanks, Entry, device_of
from .table import parameters_of

CAP_REACHED = 0.99
CAPPED = (
    "its logits have reached their softcap of {cap:g}, so that the scores before it are not known; lower the learning rate, or "
    "add QK-norm with attemper.add_qk_norm()"
)
SHIFTED = (
    "the largest logit of every head is exactly 0: the model subtracts the largest of each row before its softmax, in ops that "
    "the watch does not follow, so that the record does not show how large the scores are"
)
NOT_FINITE = (
    "its largest logit is {peak}: the scores overflowed, which no factor undoes; go back to an earlier checkpoint"
)
BIASED = (
    "numbers may be added to its scores, which no factor of q and k scales, and the record does not show the largest score "
    "without them"
)
DIFFERENT = (
    "qk_clip(): ranks were called with different arguments: another step, tau, alpha, shared, or other layers. Nothing was "
    "changed on any rank. Pass the same on every rank, and `group` if ranks hold different layers or heads."
)
LOCAL = (
    "qk_clip(): the heads of {layer!r} in this record are those of one rank, or parts of them: ranks exchange tensors around its "
    "attention, or each runs some of its heads (record.info[layer, kind].local). Head 0 of the record need not be head 0 of the "
    "weights, so nothing was changed. If each rank has plain weights of its own heads, pass `group` with the ranks that hold the "
    "same heads. Otherwise leave the clip out, and bound the logits with attemper.add_qk_norm() before the training."
)


class LocalHeads(InputError):
    """A record whose heads are those of one rank; the same on every rank."""


@dataclass(frozen=True)
class LayerPeaks:
    """One layer: the largest score of each of its heads, and heads that have none, with the reason."""

    layer: str
    kind: str
    heads: tuple[int, ...]
    scores: Tensor  # (H,), float64, on the host
    reasons: dict[int, str]
    calls: int | None = None  # how many heads its calls had, if that is known
    local: bool = False  # whether these heads are those of one rank


def check_record(record: object, step: object) -> int:
    """The step to read: the last one if none is given."""
    if not isinstance(record, Record):
        raise InputError(
            f"qk_clip(): `record` must be the record of a watch; got {type(record).__name__}. Pass watch.record."
        )
    steps = record.steps
    if not steps:
        raise InputError(
            "qk_clip(): the record holds no step. End one first: call watch.step() after the optimizer's step, or give "
            "watch() the optimizer."
        )
    if step is None:
        return steps[-1]
    if isinstance(step, bool) or not isinstance(step, int):
        raise InputError(
            f"qk_clip(): `step` must be the number of a step; got {step!r}. Leave it out for the last one."
        )
    return step


def peaks_of(record: Record, step: int) -> list[LayerPeaks]:
    """The largest scores of a step, from its peaks."""
    entries = record.filter(steps=step).entries
    if not entries:
        steps = record.steps
        held = f"{len(steps)} steps, {steps[0]} … {steps[-1]}" if len(steps) > 1 else f"step {steps[0]} alone"
        raise InputError(f"qk_clip(): the record has no step {step}; it has {held}. Leave `step` out for the last one.")
    peaks, parts = [], Counter((entry.layer, entry.kind) for entry in entries)
    for entry in entries:
        if "peak" not in entry.summary.columns:
            raise InputError(
                f"qk_clip(): the record holds no `peak`, only {', '.join(entry.summary.signs)}. Watch with signs='all', or "
                "add 'peak' to signs=."
            )
        scores, reasons = entry.summary.largest_scores.double().clone(), {}
        info = record.info.get((entry.layer, entry.kind))
        if info is not None and info.biased and entry.summary.score_peaks is None:
            peaks.append(_unknown(entry, BIASED))
            continue
        if info is not None and info.softcap is not None:
            cap = float(info.softcap)
            full = scores >= CAP_REACHED * cap
            for index in full.nonzero().flatten().tolist():
                reasons[entry.heads[index]] = CAPPED.format(cap=cap)
            scores = (cap * (scores / cap).atanh()).masked_fill(full, -math.inf)
        if bool((scores == 0).all()):
            reasons = dict.fromkeys(entry.heads, SHIFTED)
        # a layer that computes some heads at a time has an entry for each of its calls
        whole = info is not None and parts[entry.layer, entry.kind] == 1
        known = (info.heads if info is not None and whole else None, info is not None and info.local)
        peaks.append(LayerPeaks(entry.layer, entry.kind, entry.heads, scores, reasons, *known))
    return peaks


def _unknown(entry: Entry, reason: str) -> LayerPeaks:
    """A layer whose largest scores the record does not show."""
    scores = torch.full((len(entry.heads),), -math.inf, dtype=torch.float64, device="cpu")
    return LayerPeaks(entry.layer, entry.kind, entry.heads, scores, dict.fromkeys(entry.heads, reason))


def group_of(model: nn.Module, group: object) -> list[ProcessGroup]:
    """The groups of ranks that hold the same heads: that of DistributedDataParallel, of sharded parameters, or all ranks."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    if group is not None:
        if not isinstance(group, ProcessGroup):
            raise InputError(
                f"qk_clip(): `group` must be a process group; got {type(group).__name__}. Leave it out for all ranks that "
                "hold the model."
            )
        return [group]
    wrapped = [part for part in model.modules() if isinstance(part, nn.parallel.DistributedDataParallel)]
    if wrapped:
        return [wrapped[0].process_group]
    for parameter in parameters_of(model).values():
        data = DataRanks.of_shards(parameter)
        if data is not None:
            return data.groups
    world = distributed.group.WORLD
    return [] if world is None else [world]


def agree(layers: list[LayerPeaks], groups: list[ProcessGroup], *arguments: object) -> list[LayerPeaks]:
    """The largest scores over all ranks. Ranks that were called differently get an error, all of them."""
    groups = [group for group in groups if group.size() > 1]
    if not groups:
        return layers
    words = repr([(layer.layer, layer.kind, layer.heads) for layer in layers]) + repr(arguments)
    digest = int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big")
    device = device_of(groups[0])
    local = any(layer.local for layer in layers)
    ends = torch.tensor([digest, -digest, local], dtype=torch.int64, device=device)
    # a head that one rank cannot read is read by none
    scores = torch.cat([layer.scores for layer in layers])
    missing = torch.cat(
        [torch.tensor([head in layer.reasons for head in layer.heads], device="cpu") for layer in layers]
    )
    largest = scores.masked_fill(scores.isnan(), math.inf).to(device)
    flags = missing.to(device, torch.int64)
    for group in groups:
        distributed.all_reduce(ends, distributed.ReduceOp.MAX, group)
    if int(ends[0]) != -int(ends[1]):
        raise InputError(DIFFERENT)
    for group in groups:
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group)
        distributed.all_reduce(flags, distributed.ReduceOp.MAX, group)
    return _divided(layers, largest.cpu(), flags.cpu().bool(), bool(ends[2]))


def _divided(layers: list[LayerPeaks], scores: Tensor, missing: Tensor, local: bool) -> list[LayerPeaks]:
    divided, start = [], 0
    for layer in layers:
        end = start + len(layer.heads)
        reasons = dict(layer.reasons)
        for index in missing[start:end].nonzero().flatten().tolist():
            reasons.setdefault(layer.heads[index], "another rank cannot tell its scores")
        part = scores[start:end].masked_fill(missing[start:end], -math.inf)
        divided.append(replace(layer, scores=part, reasons=reasons, local=layer.local or local))
        start = end
    return divided
