"""The assertions: what one pass shows, or one experiment, raised as an AssertionError."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from ..errors import InputError, checked_options
from ..health import Finding
from ..scale import rule as named_rule
from ..scan.audit.audit import Audit
from ..scan.checks.examiner import AttentionChecks
from ..scan.experiments.run import experiments
from ..scan.input.batch import call
from ..scan.run import evaluating
from ..watch.examine import NoAttentionCall, examine


@checked_options
def assert_causal(model: nn.Module, batch: Any) -> None:
    """No output, and no output of an attention layer, depends on tokens that come after its own.

    The second half of the tokens is changed; rows before it must not move. A bidirectional model fails.

    Args:
        model: any module.
        batch: what it is called with: a dict of keywords, a tuple of positions, or a tensor. The tokens are ``input_ids``,
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
    """Real tokens do not depend on padding: not on the tokens there, on how much there is, or on which side it is.

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
    _raise_first(caller, [one for one in checks.findings() if one.fault in ("heads_mixed", "heads_joined")])
    known = [one.traced for readings in checks.layers.values() for one in readings if one.traced is not None]
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
            raise InputError(f"{caller}(): the scale of {where} could not be measured: {layer.says}")
        matches = layer.rule == rule if isinstance(rule, str) else abs(layer.applied / rule - 1) < RELATIVE
        if not matches:
            asked = f"rule {rule!r}" if isinstance(rule, str) else f"{rule:.4g}"
            says = f"{where} does not apply {asked}. {layer.says} {layer.todo}".rstrip()
            raise AssertionError(f"{caller}(): {says}")


RELATIVE = 5e-3
"""As in the audit: more than bfloat16 rounds a regression, less than between any two rules."""


NEXT = {
    "future": "Give a batch of 3 tokens or more: ids (B, L) or numbers (B, L, D), to a model that returns a row for each.",
    "padding": "Give a batch with a mask (B, L), named attention_mask, or with 'mask', 'pad' or 'keep' in its name.",
    "cache": "The forward must take the cache as past_key_values, kv_cache, cache or past, and return it; give 4 tokens or more.",
    "position": "An attention module must take its tokens as (batch, length, width); give 3 tokens or more.",
}
"""By experiment: what it needs."""


def _read(caller: str, model: nn.Module, batch: Any) -> tuple[AttentionChecks, Audit, set[tuple[int, int]]]:
    """What one pass shows: the checks, the scales, and (batch, queries) of the self-attention."""
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
    sizes = {(facts.batch, facts.queries) for (_, kind), facts in watching.record.facts.items() if kind == "self"}
    return checks, audit, sizes


def _experiment(caller: str, name: str, model: nn.Module, batch: Any, also: tuple[str, ...] = ()) -> None:
    """Make one experiment, and raise what it found; what was read of the ops is raised first, as it says more."""
    try:
        checks, _, sizes = _read(caller, model, batch)
    except NoAttentionCall:
        checks, sizes = AttentionChecks(model), set()  # the outputs show it too
    found = checks.findings()
    _raise_first(caller, [one for one in found if one.fault in (*also, "dropout_in_eval")])
    with evaluating(model):
        results, findings, _ = experiments(model, batch, checks, sizes, only=(name,), strict=True)
    _raise_first(caller, findings)
    (result,) = results
    if result.state == "skipped":
        raise InputError(f"{caller}(): {type(model).__name__} could not be tested: {result.says}. {NEXT[name]}")


def _raise_first(caller: str, found: list[Finding]) -> None:
    if found:
        where = f"{found[0].layer}: " if found[0].layer else ""
        raise AssertionError(f"{caller}(): {where}{found[0].says} {found[0].todo}")
