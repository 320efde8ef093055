"""cache: run the text step by step with the KV cache, and compare with the whole text at once."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...watch.examine import examine
from .cached import Steps, why_it_differs
from .runner import LayerRows
from .subject import CannotRun, NamedBatch
from .trial import ERRORS, NO_ROWS, Answer, Moved, Trial, bound, distance, named

STEPS = 2
NAMES = ("past_key_values", "past_key_value", "kv_cache", "cache", "past", "layer_past")


def cache(trial: Trial) -> Answer:
    """Whether the KV cache gives the result of the whole text."""
    subject = trial.subject
    subject.needs_tokens()
    name = _parameter(trial)
    trial.after("future")
    length = subject.length
    if length < STEPS + 2:
        raise CannotRun(f"a text of {length} tokens is too short", f"{STEPS + 2} tokens or more")
    if subject.sequence_first:
        raise CannotRun("attention runs along the first dimension", "a batch (batch, length)")
    subject, base = trial.whole()
    ends = [0, length - STEPS, *range(length - STEPS + 1, length + 1)]
    with trial.runner.keeping_state():
        differences = _differences(trial, subject, base, name, ends, placed=False)
    if (
        _worst(trial, differences) is not None
        and subject.takes("position_ids")
        and "position_ids" not in subject.arguments
    ):
        ends = [0, length - 1, length]  # one step, as passes are limited
        with trial.runner.keeping_state():
            differences = _differences(
                trial, subject, base, name, ends, placed=True
            )  # it may not count positions by the cache
    if not differences:
        raise CannotRun(NO_ROWS, "a model that returns one row per token")
    worst = _worst(trial, differences)
    if worst is None:
        return Answer(f"{STEPS} steps with the KV cache gave what the whole text gives")
    return _why(trial, subject, name, ends, worst)


def _why(trial: Trial, subject: NamedBatch, name: str, ends: list[int], worst: Moved) -> Answer:
    """The fault, with the layer in which a step first differs, and how."""
    whole, steps = Steps(), Steps()
    placed = len(ends) < STEPS + 2
    try:
        with examine(trial.runner.judge, [whole], caller="scan"):
            trial.run(subject.batch, trial.lengths)
        with trial.runner.keeping_state(), examine(trial.runner.judge, [steps], caller="scan"):
            _differences(trial, subject, {}, name, ends, placed)
    except (CannotRun, *ERRORS):
        return trial.fault("cache_differs", worst, row=worst.row, why="")
    reason = why_it_differs(trial.order, whole.layers, steps.layers)
    if reason is None:
        return trial.fault("cache_differs", worst, row=worst.row, why="")
    layer, how, advice = reason
    why = f" {f'In {layer}, the' if layer else 'The'} step {how}."
    words = {"why": why, "layer": named(worst.layer), "advice": advice}
    return trial.fault("cache_differs", replace(worst, layer=layer), row=worst.row, **words)


def _worst(trial: Trial, differences: dict[str, tuple[float, int]]) -> Moved | None:
    """The first layer that differs by more than rounding, and at which token."""
    for layer in [*trial.order, ""]:
        by, token = differences.get(layer, (0.0, 0))
        if by > bound(trial.floor, layer):
            return Moved(layer, by, token)
    return None


def _differences(
    trial: Trial, subject: NamedBatch, base: LayerRows, name: str, ends: list[int], placed: bool
) -> dict[str, tuple[float, int]]:
    """By layer: how far the last row of a step differs most from the whole text's, and at which token."""
    rows = trial.lengths[subject.length]
    differences: dict[str, tuple[float, int]] = {}
    past: Any = None
    for start, stop in itertools.pairwise(ends):
        last = torch.tensor([stop - start - 1], device="cpu")
        batch = step(subject, name, start, stop, past)
        if placed:
            batch["position_ids"] = torch.arange(start, stop, device=subject.value.device).expand(subject.items, -1)
        got, output = trial.outputs(batch, {stop - start: last})
        past = cache_of(output, name)
        if past is None:
            needs = "a model that returns it, with use_cache=True" if trial.is_causal else None
            raise CannotRun("the model returns no cache", needs)
        places = (rows == stop - 1).nonzero().flatten()
        for layer, part in got.items():
            whole = base.get(layer)
            if whole is None or not len(places) or whole.shape[1] != len(rows):
                continue
            old = whole[:, places]
            if old.shape == part.shape:
                by, _ = distance(part, old)
                if by >= differences.get(layer, (0.0, 0))[0]:
                    differences[layer] = by, stop - 1
    return differences


def _parameter(trial: Trial) -> str:
    model = trial.subject.model
    names = inspect.signature(model.forward).parameters
    parameter = next((name for name in NAMES if name in names), None)
    if parameter is None:
        raise CannotRun("the model takes no KV cache")
    config = getattr(model, "config", None)
    uses = getattr(config, "use_cache", False) and any(trial.checks.is_causal.values())
    if config is not None and getattr(config, "is_decoder", True) is False and not uses:
        raise CannotRun("the model is no decoder")
    return parameter


def step(subject: NamedBatch, name: str, start: int, stop: int, kept: Any) -> dict[str, Any]:
    """The arguments for the tokens from ``start`` to ``stop``, after those that the cache holds."""
    arguments: dict[str, Any] = {}
    decoder = "decoder_" if subject.tokens.startswith("decoder_") else ""
    for other, value in subject.arguments.items():
        if not other.startswith(decoder) and other not in ("use_cache", name, "cache_position"):
            arguments[other] = value  # of the encoder
        elif other == subject.tokens or (other == "token_type_ids" and isinstance(value, Tensor)):
            arguments[other] = value[:, start:stop]
        elif other == "position_ids" and isinstance(value, Tensor):
            arguments[other] = value[..., start:stop]
        elif isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == subject.length:
            arguments[other] = value[:, :stop]
        elif other not in ("use_cache", name, "cache_position"):
            arguments[other] = value
    if subject.takes("use_cache"):
        arguments["use_cache"] = True
    arguments[name] = kept
    return arguments


def cache_of(output: Any, name: str) -> Any:
    """The cache that a model returned: by its name, or the second part of a tuple."""
    for key in (name, "past_key_values"):
        cache = output.get(key) if isinstance(output, Mapping) else getattr(output, key, None)
        if cache is not None:
            return cache
    return output[1] if isinstance(output, tuple) and len(output) == 2 and not isinstance(output, Mapping) else None
