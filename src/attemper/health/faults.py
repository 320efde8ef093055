"""The faults of attention apart from its scale, the check that finds each, its level and source; and the checks themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple


class AttentionFault(NamedTuple):
    """What can be wrong with an attention: the check that finds it, its level, the source, and its name in a heading."""

    check: str
    level: str
    source: str
    title: str


class Check(NamedTuple):
    """A question about a model's attention: what passes, and whether it takes forward passes of its own (``deep``)."""

    passes: str
    deep: bool = False


@dataclass(kw_only=True)
class CheckResult:
    """One question about a model's attention, and its answer."""

    name: str
    state: Annotated[str, {"enum": ["passed", "failed", "skipped"]}]
    deep: Annotated[bool, {"description": "whether it is an experiment with forward passes of its own"}]
    layers: Annotated[int | None, {"minimum": 0, "description": "how many layers it judged; null: the whole model"}]
    says: Annotated[str, {"description": "what passed, with what was assumed; or why it was skipped"}]


_EQUATION = "Vaswani et al. 2017, eq. 1: the softmax runs over the keys of a query, once"
_MASK = "Vaswani et al. 2017, §3.2.3: what a position may not see is −∞ before the softmax"
_EXPERIMENT = "an experiment on the model itself, in float64 if it can be run so"

ATTENTION_FAULTS = {
    "over_queries": AttentionFault("softmax_axis", "act", _EQUATION, "softmax over the queries"),
    "over_heads": AttentionFault("softmax_axis", "act", _EQUATION, "softmax over the heads"),
    "over_batch": AttentionFault("softmax_axis", "act", _EQUATION, "softmax over the batch"),
    "softmax_twice": AttentionFault("softmax_once", "act", _EQUATION, "softmax applied twice"),
    "masked_after_softmax": AttentionFault("row_sums", "act", _MASK, "masked after the softmax"),
    "uneven_rows": AttentionFault("row_sums", "warn", _EQUATION, "rows of weights that do not add up to one number"),
    "dropout_in_eval": AttentionFault(
        "dropout", "act", "Srivastava et al. 2014: dropout is for training alone", "dropout in evaluation mode"
    ),
    "weak_mask": AttentionFault("mask_strength", "act", _MASK, "a mask too weak to hide"),
    "inverted_mask": AttentionFault("mask_direction", "act", _MASK, "an inverted causal mask"),
    "transposed_mask": AttentionFault("mask_direction", "act", _MASK, "a transposed causal mask"),
    "shifted_mask": AttentionFault("mask_direction", "act", _MASK, "a causal mask shifted by one"),
    "missing_mask": AttentionFault("mask_direction", "act", _MASK, "no causal mask in a decoder"),
    "padding_inverted": AttentionFault("mask_padding", "act", _MASK, "an inverted padding mask"),
    "padding_visible": AttentionFault("mask_padding", "act", _MASK, "padding is attended to"),
    "masks_differ": AttentionFault("mask_agreement", "act", "the model's other layers", "a layer with another mask"),
    "heads_differ": AttentionFault("mask_agreement", "warn", "the layer's other heads", "heads with different masks"),
    "heads_mixed": AttentionFault(
        "head_layout",
        "act",
        "Vaswani et al. 2017, §3.2.2: every head projects each position",
        "heads that mix positions",
    ),
    "heads_joined": AttentionFault(
        "head_layout", "act", "Vaswani et al. 2017, §3.2.2: heads are concatenated", "heads joined across positions"
    ),
    "future_leak": AttentionFault("future", "act", _EXPERIMENT, "a leak of the future"),
    "padding_leak": AttentionFault("padding", "act", _EXPERIMENT, "padding changes the result"),
    "batch_leak": AttentionFault("batch", "act", _EXPERIMENT, "items of a batch change one another"),
    "position_leak": AttentionFault("position", "act", _EXPERIMENT, "heads that mix positions"),
    "cache_differs": AttentionFault("cache", "act", _EXPERIMENT, "the KV cache changes the result"),
    "long_breaks": AttentionFault("long", "warn", _EXPERIMENT, "longer inputs break it"),
    "order_ignored": AttentionFault("permutation", "warn", _EXPERIMENT, "the order of the tokens is ignored"),
    "dtype_changes": AttentionFault("dtype", "note", _EXPERIMENT, "bfloat16 changes what it attends to"),
}
"""By name."""

CHECKS = {
    "scale": Check("the scale is no fault"),
    "softmax_axis": Check("the softmax runs over the keys"),
    "softmax_once": Check("it runs once"),
    "row_sums": Check("the weights of every row add up to one number"),
    "dropout": Check("no weight is dropped in evaluation mode"),
    "mask_strength": Check("hidden keys get no weight"),
    "mask_direction": Check("no mask is inverted, transposed, shifted or missing"),
    "mask_padding": Check("padding is hidden, and words are not"),
    "mask_agreement": Check("similar layers, and the heads of a layer, have the same mask"),
    "head_layout": Check("row i of every head belongs to token i"),
    "future": Check("a token changes no output before it", deep=True),
    "padding": Check("padding changes no real token", deep=True),
    "batch": Check("items of a batch do not change one another", deep=True),
    "position": Check("a token changes its own row of every head, and no other", deep=True),
    "cache": Check("the KV cache gives the same result", deep=True),
    "long": Check("longer inputs run, and keep what came before", deep=True),
    "permutation": Check("the order of the tokens matters", deep=True),
    "dtype": Check("bfloat16 attends to the same keys", deep=True),
}
"""All checks of a scan, in their order; the deep ones run on request."""
