"""The thresholds, and who set each. A number without a published source says that it is ours."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("healthy", "ok", "note", "warn", "act", "critical", "diverging")
"""From nothing to worry about to lost. ``ok`` is a verdict's word for no finding above ``healthy``."""

KINDS = ("nan", "scale", "peak", "overflow", "collapsed", "saturated", "flat", "dead", "sink", "positional")
"""What a finding can be about; of two with the same level the earlier is told first."""


@dataclass(frozen=True)
class Threshold:
    """A number, the level past it, and who says so."""

    value: float
    level: str
    source: str


OURS = "attemper, no published number"

PEAK = (
    Threshold(1e4, "diverging", "Wortsman et al. 2023, 2309.14322: every run with logits above 1e4 diverged"),
    Threshold(
        1e3, "critical", "Kimi K2, 2507.20534: loss spikes above 1000; Wortsman et al. 2023, fig. 10: loss decays there"
    ),
    Threshold(100, "act", "Kimi K2, 2507.20534: QK-Clip acts at 100; Swin v2 caps its scale at 100"),
    Threshold(50, "warn", "Gemma 2 caps its logits at 50"),
    Threshold(30, "note", "Grok-1 caps its logits at 30; Kimi K2, 2507.20534: a clip at 30 cost nothing"),
)
"""The ladder of the largest logit, the steepest rung first."""

SATURATED = Threshold(0.5, "note", f"{OURS}: over half of its rows with 8 keys or more put 0.99 on one")
FLAT = Threshold(0.99, "note", f"{OURS}: entropy over 0.99 of its maximum; Noci et al. 2022 on why flat stops learning")
COLLAPSED = Threshold(
    0.05, "note", f"{OURS}: entropy under 0.05 of its maximum without sinks; ViT-22B, 2302.05442, app. B"
)
SINK = Threshold(0.3, "healthy", "Gu et al. 2024, 2410.10781: a mean weight above 0.3 on one key is a sink")
POSITIONAL = Threshold(
    0.5, "healthy", "Clark et al. 2019, 1906.04341, §3.1: BERT has heads for the token before and after"
)
DEAD = Threshold(0.02, "note", f"{OURS}: total variation between texts, on the positions they share")
CROWD = Threshold(0.5, "warn", f"{OURS}: half of the heads of a layer or more")
"""One sharp or flat head is a specialist. When half of a layer is so, the layer has lost the choice between keys."""

OVERFLOW = (
    Threshold(1 / 2, "critical", "IEEE 754: a float16 ends at 65504, and what is larger is stored as infinity"),
    Threshold(1 / 8, "warn", f"{OURS}: an eighth of the largest number of the dtype"),
)
ROUNDING = (
    Threshold(0.5, "act", "half a unit in the last place of the largest logit, through exp"),
    Threshold(0.25, "warn", "half a unit in the last place of the largest logit, through exp"),
    Threshold(0.1, "note", "half a unit in the last place of the largest logit, through exp"),
)
STORED = {"float16": (65504.0, 11), "bfloat16": (3.39e38, 8)}
"""Largest number and bits of precision of the dtypes in which stored scores can hurt."""

FAULTS = {
    "sqrt_dmodel": Threshold(0, "warn", "Vaswani et al. 2017, §3.2.1: √d_k, the width of one head"),
    "twice": Threshold(0, "act", "Vaswani et al. 2017, §3.2.1: one factor 1/√d_k"),
    "after_softmax": Threshold(0, "act", "Vaswani et al. 2017, eq. 1: the scale stands inside the softmax"),
    "ignored": Threshold(0, "act", "the model's own configuration"),
    "uncontrolled": Threshold(
        0, "act", "Giorlandino & Goldt 2025, 2505.24333: softmax freezes at a logit std of √(2 ln n)"
    ),
}
FEW_KEYS = 4  # fewer share a row's weight evenly by chance
