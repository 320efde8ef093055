"""The assertions: a fault that one pass or one experiment shows becomes an AssertionError."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ..errors import InputError, checked_options
from ..health import Finding
from ..scale import rule as named_rule
from ..scan.audit.audit import Audit
from ..scan.checks.examiner import AttentionChecks
from ..scan.experiments.packed import NEEDS as PACKED
from ..scan.experiments.run import experiments, prepared
from ..scan.experiments.subject import CannotRun
from ..scan.unchanged import call, evaluating
from ..watch.examine import NoAttentionCall, examine


@checked_options
def assert_causal(model: nn.Module, batch: Any) -> None:
    """No output, and no output of an attention layer, depends on tokens that come after its own.

    The second half of the tokens is changed; rows before it must not move. A bidirectional model fails.

    Args:
        model: any module.
        batch: its arguments: a dict of keywords, a tuple of positions, or a tensor. The tokens are ``input_ids``,
            ``decoder_input_ids``, or the first integers (B, L) or numbers (B, L, D).

    Example:
        >>> class Causal(torch.nn.Module):
        ...     def forward(self, x):
        ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        >>> attemper.testing.assert_causal(Causal(), torch.randn(2, 9, 16))
    """
    _experiment(
        "assert_causal", "future", model, batch, ("inverted_mask", "transposed_mask", "shifted_mask", "weak_mask")
    )


@checked_options
def assert_ignores_padding(model: nn.Module, batch: Any) -> None:
    """Outputs of real tokens do not depend on the padding: neither on its tokens, nor on its length or side.

    Tokens are added that the mask marks as padding. On the left they are tried where all tokens are real, with ``position_ids``
    that begin at the first real token if the model takes them.

    Args:
        model: any module.
        batch: as in :func:`assert_causal`, with a mask (B, L) among its parts: ``attention_mask``, or a name with "mask", "pad"
            or "keep" in it. A model that takes ``attention_mask`` may be called without one.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> batch = {"src": torch.randn(2, 9, 16), "src_key_padding_mask": torch.zeros(2, 9, dtype=torch.bool)}
        >>> attemper.testing.assert_ignores_padding(layer, batch)
    """
    _experiment("assert_ignores_padding", "padding", model, batch, ("padding_visible", "padding_inverted"))


@checked_options
def assert_cache_matches(model: nn.Module, batch: Any) -> None:
    """Step by step with the KV cache, the outputs are those of the whole text at once.

    The model takes the cache as ``past_key_values``, ``cache``, ``kv_cache`` or ``past``, None at first, and returns it under
    that name or as the second part of a tuple. ``use_cache=True`` is passed if the model takes it.

    Args:
        model: any module.
        batch: as in :func:`assert_causal`, without padding.
    """
    _experiment("assert_cache_matches", "cache", model, batch)


@checked_options
def assert_items_independent(model: nn.Module, batch: Any) -> None:
    """No item of a batch depends on another one: alone, or with one more item, the first item's rows stay the same.

    Args:
        model: any module that takes batches of any size.
        batch: as in :func:`assert_causal`.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> attemper.testing.assert_items_independent(model, torch.randn(2, 9, 16))
    """
    _experiment("assert_items_independent", "batch", model, batch, ("over_batch",))


@checked_options
def assert_repeatable(model: nn.Module, batch: Any) -> None:
    """In evaluation mode a second call on the same batch, with another seed, returns the same numbers.

    It fails if random numbers are drawn in evaluation mode (by torch, NumPy or Python), and if the model keeps something from one
    call to the next, such as a cache that is never reset.

    Args:
        model: any module.
        batch: as in :func:`assert_causal`.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> attemper.testing.assert_repeatable(model, torch.randn(2, 9, 16))
    """
    caller = "assert_repeatable"
    checks, sizes = _seen(caller, model, batch)
    _raise_first(caller, [finding for finding in checks.findings() if finding.fault == "dropout_in_eval"])
    try:
        with evaluating(model):
            trial = prepared(model, batch, checks, sizes)
    except CannotRun as error:
        raise InputError(
            f"{caller}(): {type(model).__name__} could not be tested: {error}. Pass {error.needs}."
        ) from None
    if trial.unsteady is not None and not trial.rough:
        why = str(trial.unsteady)
        raise AssertionError(f"{caller}(): {why[0].upper()}{why[1:]}. Give {trial.unsteady.needs}.")


@checked_options
def assert_packed_matches(model: nn.Module, batch: Any) -> None:
    """Documents packed into one row have the outputs that each has alone.

    Args:
        model: any module.
        batch: a dict with one row of tokens (1, L), and where the documents begin: ``position_ids`` (1, L) that restart at 0,
            ``cu_seqlens`` (any name that begins so), or ``document_ids`` (1, L). A mask (…, L, L) is cut into blocks.
    """
    _experiment("assert_packed_matches", "packed", model, batch)


@checked_options
def assert_heads_keep_positions(model: nn.Module, batch: Any) -> None:
    """Row i of every head's q, k and v belongs to token i: heads were not cut, or joined, across positions.

    Args:
        model: any module.
        batch: as in :func:`assert_causal`.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> attemper.testing.assert_heads_keep_positions(model, torch.randn(2, 9, 16))
    """
    caller = "assert_heads_keep_positions"
    checks = _read(caller, model, batch)[0]
    _raise_first(caller, [finding for finding in checks.findings() if finding.fault in ("heads_mixed", "heads_joined")])
    known = [
        reading.traced for readings in checks.layers.values() for reading in readings if reading.traced is not None
    ]
    if not any(traced.cuts or traced.merged for traced in known):
        _experiment(caller, "position", model, batch)


@checked_options
def assert_scale(model: nn.Module, batch: Any, rule: str | float = "sqrt_dk") -> None:
    """Every layer multiplies q·k by the number of a rule, and nothing multiplies it a second time.

    Args:
        model: any module.
        batch: as in :func:`assert_causal`.
        rule: a name of ``attemper.RULES``, or the number itself.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> attemper.testing.assert_scale(layer, torch.randn(2, 9, 16), rule="sqrt_dk")
    """
    caller = "assert_scale"
    if isinstance(rule, str):
        named_rule(rule)
    audit = _read(caller, model, batch)[1]
    for layer in audit.layers():
        where = layer.layer or type(model).__name__
        if layer.applied is None:
            raise InputError(f"{caller}(): the scale of {where} could not be measured: {layer.message}")
        matches = layer.rule == rule if isinstance(rule, str) else abs(layer.applied / rule - 1) < RELATIVE
        if not matches:
            asked = f"rule {rule!r}" if isinstance(rule, str) else f"{rule:.4g}"
            message = f"{where} does not apply {asked}. {layer.message} {layer.advice}".rstrip()
            raise AssertionError(f"{caller}(): {message}")


RELATIVE = 5e-3
"""As in the audit: more than bfloat16 moves a measured scale, less than the distance between any two rules."""


NEXT = {
    "future": "Give a batch of 3 tokens or more: ids (B, L) or numbers (B, L, D), to a model that returns a row for each.",
    "padding": "Give a batch with a mask (B, L), named attention_mask, or with 'mask', 'pad' or 'keep' in its name.",
    "cache": "The forward must take the cache as past_key_values, kv_cache, cache or past, and return it; give 4 tokens or more.",
    "batch": "Give a batch (batch, length) or (batch, length, width) to a model that takes batches of any size.",
    "packed": f"Pass {PACKED}.",
    "position": "An attention module must take its tokens as (batch, length, width); give 3 tokens or more.",
}
"""By experiment: the advice if it cannot run."""


def _read(caller: str, model: nn.Module, batch: Any) -> tuple[AttentionChecks, Audit, set[tuple[int, int]]]:
    """One pass: the checks, the scales, and (batch, queries) of the self-attention."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{caller}(): `model` must be a torch.nn.Module; got {type(model).__name__}. Pass the model that you call."
        )
    checks, audit = AttentionChecks(model), Audit()
    checks.begin(batch)
    watching = examine(model, [audit, checks], caller=caller)
    with evaluating(model), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"watch\(\): ")
        with watching:
            call(model, batch)
    sizes = {(info.batch, info.queries) for (_, kind), info in watching.record.info.items() if kind == "self"}
    return checks, audit, sizes


def _experiment(caller: str, name: str, model: nn.Module, batch: Any, also: tuple[str, ...] = ()) -> None:
    """Run one experiment and raise its finding; a finding from the ops comes first, because it says more."""
    checks, sizes = _seen(caller, model, batch)
    new_findings = checks.findings()
    _raise_first(caller, [finding for finding in new_findings if finding.fault in (*also, "dropout_in_eval")])
    with evaluating(model):
        results, findings, _ = experiments(model, batch, checks, sizes, only=(name,), strict=True)
    _raise_first(caller, findings)
    (result,) = results
    if result.state == "skipped":
        then = NEXT[name] if result.needs is None else f"Pass {result.needs}."
        raise InputError(f"{caller}(): {type(model).__name__} could not be tested: {result.message}. {then}")


def _seen(caller: str, model: nn.Module, batch: Any) -> tuple[AttentionChecks, set[tuple[int, int]]]:
    """The checks of one pass; empty for a model without attention calls, whose faults only its outputs can show."""
    try:
        checks, _, sizes = _read(caller, model, batch)
    except NoAttentionCall:
        return AttentionChecks(model), set()
    return checks, sizes


def _raise_first(caller: str, findings: list[Finding]) -> None:
    if findings:
        where = f"{findings[0].layer}: " if findings[0].layer else ""
        raise AssertionError(f"{caller}(): {where}{findings[0].message} {findings[0].advice}")
