"""cache: the text step by step with the KV cache, against the whole text at once."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .subject import CannotRun, NamedBatch
from .trial import Answer, Moved, Trial, bound, distance, named, share

STEPS = 2
NAMES = ("past_key_values", "past_key_value", "kv_cache", "cache", "past", "layer_past")
TODO = (
    "Give a step the position of its token (not 0), keys of all tokens so far, and a mask over all of them; is_causal=True hides "
    "all cached keys but the first from a single query, as it aligns the first query with the first key."
)


def cache(trial: Trial) -> Answer:
    """Whether the KV cache gives the result of the whole text."""
    subject = trial.subject
    subject.needs_tokens()
    name = _parameter(subject)
    trial.after("future")
    length = subject.length
    if length < STEPS + 2:
        raise CannotRun(f"a text of {length} tokens is too short")
    if not bool(subject.real.all()) or subject.sequence_first:
        raise CannotRun("the batch has padding")
    ends = [0, length - STEPS, *range(length - STEPS + 1, length + 1)]
    found = _differences(trial, name, ends, placed=False)
    if _worst(trial, found) is not None and subject.takes("position_ids") and "position_ids" not in subject.arguments:
        ends = [0, length - 1, length]  # one step, as passes are limited
        found = _differences(trial, name, ends, placed=True)  # it may not count positions by the cache
    if not found:
        raise CannotRun("nothing that the model returns has one row per token")
    worst = _worst(trial, found)
    if worst is None:
        return Answer(f"{STEPS} steps with the KV cache gave what the whole text gives")
    says = (
        f"The KV cache changes the result: at token {worst.row}, {named(worst.layer)} differs by {share(worst.by)} from that of "
        "the whole text at once."
    )
    return trial.fault("cache_differs", worst, says, TODO)


def _worst(trial: Trial, found: dict[str, tuple[float, int]]) -> Moved | None:
    """The first layer that differs by more than rounding, and at which token."""
    for layer in [*trial.order, ""]:
        by, token = found.get(layer, (0.0, 0))
        if by > bound(trial.floor, layer):
            return Moved(layer, by, token)
    return None


def _differences(trial: Trial, name: str, ends: list[int], placed: bool) -> dict[str, tuple[float, int]]:
    """By layer: how far the last row of a step differs most from the whole text's, and at which token."""
    subject, rows = trial.subject, trial.lengths[trial.subject.length]
    found: dict[str, tuple[float, int]] = {}
    kept_cache: Any = None
    for start, stop in itertools.pairwise(ends):
        last = torch.tensor([stop - start - 1], device="cpu")
        batch = _step(subject, name, start, stop, kept_cache)
        if placed:
            batch["position_ids"] = torch.arange(start, stop, device=subject.value.device).expand(subject.items, -1)
        got, output = trial.outputs(batch, {stop - start: last})
        kept_cache = _cache_of(output, name)
        if kept_cache is None:
            raise CannotRun("the model returns no cache")
        places = (rows == stop - 1).nonzero().flatten()
        for layer, part in got.items():
            whole = trial.base.get(layer)
            if whole is None or not len(places) or whole.shape[1] != len(rows):
                continue
            old = whole[:, places]
            if old.shape == part.shape:
                by, _ = distance(part, old)
                if by >= found.get(layer, (0.0, 0))[0]:
                    found[layer] = by, stop - 1
    return found


def _parameter(subject: NamedBatch) -> str:
    if subject.tokens != "input_ids" and any(one.startswith("decoder_") for one in subject.arguments):
        raise CannotRun("the cache of a decoder with an encoder is not tried")
    names = inspect.signature(subject.model.forward).parameters
    found = next((name for name in NAMES if name in names), None)
    if found is None:
        raise CannotRun("the model takes no KV cache")
    config = getattr(subject.model, "config", None)
    if config is not None and getattr(config, "is_decoder", True) is False and not getattr(config, "use_cache", False):
        raise CannotRun("the model is no decoder")
    return found


def _step(subject: NamedBatch, name: str, start: int, stop: int, kept: Any) -> dict[str, Any]:
    """The arguments for the tokens from ``start`` to ``stop``, after those that the cache holds."""
    arguments: dict[str, Any] = {}
    for other, value in subject.arguments.items():
        if other == subject.tokens or (other == "token_type_ids" and isinstance(value, Tensor)):
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


def _cache_of(output: Any, name: str) -> Any:
    """The cache that a model returned: by its name, or the second part of a tuple."""
    for one in (name, "past_key_values"):
        found = output.get(one) if isinstance(output, Mapping) else getattr(output, one, None)
        if found is not None:
            return found
    return output[1] if isinstance(output, tuple) and len(output) == 2 and not isinstance(output, Mapping) else None
