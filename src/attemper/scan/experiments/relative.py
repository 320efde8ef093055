"""relative: a text of one repeated token. Where q and k are rotated by their positions, their product depends on i − j alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._display import plural
from ...kernels.contract import HIDDEN_BIAS
from ...vitals import Vitals
from ...watch.examine import AttentionCall, Examiner, NoAttentionCall, examine, logits_of_keys
from ..checks.declared import is_published
from .subject import CannotRun
from .tiled import tiled
from .trial import Answer, Moved, Trial

MOST = 48  # rows and keys that are looked at
FEWEST = 6
CLOSE = 1e-3  # of a size: float32 tables of angles, in float64; a fault is of the size of 1
ROTARY = re.compile(r"rotary|rope|inv_freq|freqs_cis|cos_cached", re.IGNORECASE)


@dataclass
class Rows:
    """q, k and v of one call, (H, L, E) each, and its logits, (H, L, L), of the first rows and keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor


@dataclass
class OneToken(Examiner):
    """Examiner: keeps the first rows of the first call of every layer."""

    layers: dict[str, Rows] = field(default_factory=dict)

    def look(self, call: AttentionCall, vitals: Vitals, rows: Tensor | None) -> Tensor | None:
        info = call.info
        known = info.kind == "self" and info.queries == info.keys - sum(call.sink_columns) and call.over == "keys"
        if not known or not call.in_order or call.document is not None or info.batch != 1:
            return None
        keys = torch.arange(min(info.queries, MOST), device=call.query.device) + call.sink_columns[0]
        return logits_of_keys(call, 0, keys)[:, : len(keys)]

    def keep(self, name: str, call: AttentionCall, seen: Tensor | None) -> None:
        if seen is None or call.value is None or name in self.layers:
            return
        query, key = (call.query.mT, call.key) if call.flipped else (call.query, call.key)
        key = key.mT if call.product and not call.flipped else key
        q, k, v = (
            part.detach().double().reshape(-1, *part.shape[-2:])[:, :MOST].clone() for part in (query, key, call.value)
        )
        if {part.shape[1] for part in (q, k, v)} == {seen.shape[-1]} and len(q) % len(k) == 0:
            self.layers[name] = Rows(q, k, v, seen.detach().double())


def relative(trial: Trial) -> Answer:
    """Whether the logits of one repeated token depend on i − j alone."""
    subject = trial.subject
    subject.needs_tokens()
    if subject.length < FEWEST:
        raise CannotRun(f"a text of {subject.length} tokens is too short")
    repeated = tiled(subject, 1)
    middle = repeated.value[:, repeated.length // 2 : repeated.length // 2 + 1]
    batch = repeated.with_tokens(middle.expand_as(repeated.value).contiguous())
    examiner = OneToken()
    try:
        with examine(trial.runner.judge, [examiner], caller="scan"):
            trial.runner(batch, {})
    except NoAttentionCall:
        raise CannotRun("no attention call was found") from None
    if not examiner.layers:
        raise CannotRun("no self-attention shows q, k and v of its tokens in order")
    same = {name: rows for name, rows in examiner.layers.items() if is_constant(rows.v)}
    if not same:
        return Answer("positions are added to the tokens, not to the logits", skipped=True)
    rotated = 0
    for name, rows in same.items():
        turned = [is_rotated(part) for part in (rows.q, rows.k)]
        rotated += any(turned)
        words = _of_rotation(rows, turned) if any(turned) else _of_bias(rows)
        if words is not None:
            fault, number, more = words
            return trial.fault(fault, Moved(name, number, 0), **more)
    if rotated:
        return Answer(
            f"{plural(rotated, 'layer')} rotate q and k, and one repeated token's logits depend on i − j alone"
        )
    by = _rotary(trial.runner.judge) or _turned(trial, same)
    if by is not None and not is_published(subject.model) and all(map(_without_positions, same.values())):
        return trial.fault("rotation_lost", Moved(next(iter(same)), 0.0, 0), by=by)
    return Answer("no layer rotates q and k", skipped=True)


def is_constant(part: Tensor) -> bool:
    """Whether all rows are the same, (H, L, E)."""
    size = part.square().mean().sqrt()
    return bool((part - part[:, :1]).abs().amax() <= CLOSE * size)


def is_rotated(part: Tensor) -> bool:
    """Whether every number of a row turns with its position: x[i + 1] + x[i − 1] = 2 cos θ · x[i], and some θ is not 0."""
    if is_constant(part) or is_constant(part / part.norm(dim=-1, keepdim=True).clamp(min=1e-300)):
        return False  # the second: its length alone depends on its position, as where logits grow with it
    middle, around = part[:, 1:-1], part[:, 2:] + part[:, :-2]
    twice = (middle * around).sum(1, keepdim=True) / middle.square().sum(1, keepdim=True).clamp(min=1e-300)
    size = part.square().mean((1, 2), keepdim=True).sqrt()
    return bool((around - twice * middle).abs().amax() <= CLOSE * size.amax()) and bool(
        (twice.abs() <= 2 + CLOSE).all()
    )


def _of_rotation(rows: Rows, turned: list[bool]) -> tuple[str, float, dict[str, Any]] | None:
    """What is wrong with q and k of which at least one is rotated."""
    if not all(turned):
        still = rows.k if turned[0] else rows.q
        if not is_constant(still):
            return None
        one, other = ("q", "k") if turned[0] else ("k", "q")
        return "rotated_alone", 1.0, {"one": one, "other": other}
    z = rows.q @ rows.k.repeat_interleave(len(rows.q) // len(rows.k), 0).mT
    apart, row, key = _off_diagonals(z)
    size = (rows.q.square().sum(-1).mean() * rows.k.square().sum(-1).mean()).sqrt()
    by = float(apart / size)
    if by <= CLOSE:
        return None
    stretched = [
        float(part.norm(dim=-1).diff(dim=-1).abs().amax() / part.norm(dim=-1).mean()) for part in (rows.q, rows.k)
    ]
    why = " The length of q or k changes from one position to the next, which a rotation cannot do."
    words = {"row": row, "key": key, "number": f"{100 * by:.2g} %", "why": why if max(stretched) > CLOSE else ""}
    return "rotated_apart", by, words


def _off_diagonals(z: Tensor) -> tuple[Tensor, int, int]:
    """The largest distance between two numbers of one diagonal, and where."""
    length = z.shape[-1]
    first = torch.stack([z.diagonal(offset, -2, -1)[..., 0] for offset in range(1 - length, length)], -1)
    i, j = torch.arange(length, device=z.device)[:, None], torch.arange(length, device=z.device)
    apart = (z - first[:, j - i + length - 1]).abs().amax(0)
    place = int(apart.flatten().argmax())
    return apart.amax(), place // length, place % length


def _of_bias(rows: Rows) -> tuple[str, float, dict[str, Any]] | None:
    """ALiBi whose numbers grow with the distance: a straight line in i − j, upwards."""
    z = rows.z
    if not (is_constant(rows.q) and is_constant(rows.k)):
        return None
    length = z.shape[-1]
    away = torch.arange(length, device=z.device)
    distance = (away[:, None] - away).double()
    own = z.diagonal(0, -2, -1).unsqueeze(-1)
    for side in (distance, -distance):
        seen = (z > HIDDEN_BIAS) & (side >= 0) & (own > HIDDEN_BIAS)
        added, steps = (z - own).where(seen, 0.0), side.where(seen, 0.0)
        if not bool((seen.sum(-1) >= FEWEST - 2).any()):
            continue
        slope = (added * steps).flatten(1).sum(-1) / steps.square().flatten(1).sum(-1)
        straight = ((added - slope[:, None, None] * steps).abs().flatten(1).amax(-1)) <= CLOSE * added.abs().flatten(
            1
        ).amax(-1)
        up = straight & (slope > CLOSE)
        if bool(up.any()):
            head = int(up.int().argmax())
            return "bias_grows", float(slope[head]), {"head": head, "slope": f"{float(slope[head]):.3g}"}
    return None


def _without_positions(rows: Rows) -> bool:
    return is_constant(rows.q) and is_constant(rows.k)


def _turned(trial: Trial, layers: Iterable[str]) -> str | None:
    """The layer whose q is multiplied by angles, as its ops show."""
    for name in layers:
        if any(one.traced is not None and one.traced.rotates for one in trial.checks.layers.get((name, "self"), [])):
            return name
    return None


def _rotary(model: nn.Module) -> str | None:
    """The name of a module, or of a tensor of one, that holds a rotation."""
    for path, module in model.named_modules():
        if ROTARY.search(type(module).__name__):
            return path or type(module).__name__
        for name, value in (*vars(module).items(), *module._buffers.items()):
            if isinstance(value, Tensor) and ROTARY.search(name):
                return f"{path}.{name}".lstrip(".")
    return None
