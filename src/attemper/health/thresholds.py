"""The thresholds and their sources. A threshold without a published source is marked as attemper's own."""

from __future__ import annotations

from typing import NamedTuple

LEVELS = ("healthy", "ok", "note", "warn", "act", "critical", "diverging")
"""From harmless to diverged. ``ok`` is the verdict if no finding is above ``healthy``."""

NAMES = (
    *("weights", "nan", "attention", "scale", "peak", "overflow"),
    *("collapsed", "saturated", "flat", "dead", "sink", "positional"),
)
"""The names of findings. Of two with the same level, the earlier comes first."""


class Threshold(NamedTuple):
    """A number, the level of what exceeds it, and its source."""

    value: float
    level: str
    source: str


OURS = "attemper's own, no published number"
STUDY = "docs/training.md, warning"  # 52 failing and 25 healthy runs of a small language model
ULP = "half a unit in the last place of the largest logit, through exp"

PEAK = (
    Threshold(1e4, "diverging", "Wortsman et al. 2023, arXiv 2309.14322: every run with logits above 1e4 diverged"),
    Threshold(1e3, "critical", "Kimi K2, arXiv 2507.20534: the loss spikes with logits above 1000"),
    Threshold(
        100,
        "act",
        "Kimi K2, arXiv 2507.20534: QK-Clip acts at 100; Swin v2 holds its scale under 100; "
        f"{STUDY}: 0 of 25 healthy runs passed it",
    ),
    Threshold(
        50, "warn", f"Gemma 2 caps its logits at 50; {STUDY}: 52 of 52 failing and 6 of 25 healthy runs passed it"
    ),
    Threshold(30, "note", "Grok-1 caps its logits at 30; Kimi K2, arXiv 2507.20534: a clip at 30 cost nothing"),
)
"""The levels of the largest logit, the highest first."""

OVERFLOW = (
    Threshold(1 / 2, "critical", "IEEE 754: a float16 ends at 65504, and what is larger is stored as infinity"),
    Threshold(1 / 8, "warn", OURS),
)
ROUNDING = (Threshold(0.5, "act", ULP), Threshold(0.25, "warn", ULP), Threshold(0.1, "note", ULP))
STORED = {"float16": (65504.0, 11), "bfloat16": (3.39e38, 8)}
"""Largest number and bits of precision of the dtypes in which stored scores can hurt."""

COLLAPSED = Threshold(
    0.05,
    "note",
    f"{OURS}; near-zero entropy before divergence: ViT-22B, arXiv 2302.05442; {STUDY}: 7 of 25 healthy runs passed it",
)
SATURATED = Threshold(0.5, "note", f"{OURS}; {STUDY}: 9 of 25 healthy runs passed it")
FLAT = Threshold(0.99, "note", f"{OURS}; why flat attention stops learning: Noci et al. 2022, arXiv 2206.03126")
DEAD = Threshold(0.02, "note", OURS)
SINK = Threshold(0.3, "healthy", "Gu et al. 2024, arXiv 2410.10781: a mean weight above 0.3 on one key")
POSITIONAL = Threshold(0.5, "healthy", f"{OURS}; such heads: Clark et al. 2019, arXiv 1906.04341, §3.1")
CROWD = Threshold(0.5, "warn", OURS)
"""One sharp or flat head may specialise. If half of a layer is sharp or flat, the layer no longer selects among keys."""
DRAWN = Threshold(0, "critical", OURS)
FEW_KEYS = 4  # with fewer keys, even weights may be chance

TABLE = {
    "weights": ("weights of embeddings and attention layers that are not in the files, above", (DRAWN,)),
    "peak": ("the largest logit, above", PEAK),
    "overflow": ("stored scores, as a share of the largest number of their dtype, above", OVERFLOW),
    "overflow, by rounding": ("how far rounding of stored scores moves a weight, above", ROUNDING),
    "collapsed": ("evenness without first and special tokens, below", (COLLAPSED,)),
    "saturated": ("share of rows with 0.99 of their weight on one of 8 keys or more, above", (SATURATED,)),
    "flat": ("evenness, above", (FLAT,)),
    "collapsed, saturated, flat": ("share of a layer's heads with this finding, from", (CROWD,)),
    "dead": ("total variation between the weights for different texts, below", (DEAD,)),
    "sink": ("mean weight on a first or special token, above", (SINK,)),
    "positional": ("mean weight on the token before, itself or after, above", (POSITIONAL,)),
}
"""For the documentation: finding → what is compared, and its thresholds."""


class Fault(NamedTuple):
    """What can be wrong with a scale: its level, the source, and its name in a heading: "scaled twice in layer 3"."""

    level: str
    source: str
    title: str


FAULTS = {
    "sqrt_dmodel": Fault(
        "warn", "Vaswani et al. 2017, §3.2.1: √d_k, the width of one head", "√d_model instead of √d_k"
    ),
    "twice": Fault("act", "Vaswani et al. 2017, §3.2.1: one factor of 1/√d_k", "scaled twice"),
    "after_softmax": Fault(
        "act", "Vaswani et al. 2017, eq. 1: the scale is inside the softmax", "scaled after the softmax"
    ),
    "ignored": Fault("act", "the model's own configuration", "a setting ignored"),
    "uncontrolled": Fault(
        "act",
        "Giorlandino & Goldt 2025, arXiv 2505.24333: softmax freezes at a logit std of √(2 ln n)",
        "no scale, and logits spread too far",
    ),
    "multiplied": Fault("act", "Vaswani et al. 2017, §3.2.1: divided by √d_k", "multiplied instead of divided"),
    "negative": Fault("warn", "Vaswani et al. 2017, eq. 1: the scale is positive", "a negative scale"),
    "shrunk": Fault(
        "note",
        "Vaswani et al. 2017, eq. 1: the scale is inside the softmax",
        "a mean over heads, or a scale after the softmax",
    ),
    "unscaled": Fault(
        "note", "Vaswani et al. 2017, §3.2.1: 1/√d_k keeps the variance of q·k at 1 whatever d_k", "no scale"
    ),
    "odd": Fault("note", "the model's other layers", "unlike the other layers"),
}
"""By name."""

TITLES = {
    "weights": "randomly initialised weights",
    "nan": "NaN or infinity",
    "attention": "attention",
    "scale": "scale",
    "peak": "large logits",
    "overflow": "scores coarse or near overflow",
    "collapsed": "collapsed",
    "saturated": "saturated",
    "flat": "flat",
    "dead": "the same for every text",
    "sink": "attention sink",
    "positional": "attends to a neighbouring token",
}
"""The heading of a finding, by its name; a fault has a title of its own."""
