"""The thresholds and their sources. A threshold without a published source is marked as attemper's own."""

from __future__ import annotations

from typing import NamedTuple

LEVELS = ("healthy", "ok", "note", "warn", "error", "critical", "diverging")
"""From harmless to diverged. ``ok`` is the verdict if no finding is above ``healthy``."""


class Kind(NamedTuple):
    """A kind of finding: its heading, its noun in a count of notes, and what one head, and several, are said to do."""

    title: str
    counted: str = ""
    one: str = ""
    several: str = ""


KINDS = {
    "weights": Kind("randomly initialised weights"),
    "nan": Kind("NaN or infinity"),
    "attention": Kind("attention"),
    "scale": Kind("scale", "unusual scale"),
    "peak": Kind("large logits", "high logit", "has logits up to {}", "have logits up to {}"),
    "overflow": Kind(
        "scores coarse or near overflow",
        "coarse score",
        "has scores too coarse for its dtype",
        "have scores too coarse for their dtype",
    ),
    "collapsed": Kind("collapsed", "collapsed head", "has collapsed", "have collapsed"),
    "saturated": Kind("saturated", "saturated head", "is saturated", "are saturated"),
    "flat": Kind("flat", "flat head", "is flat", "are flat"),
    "dead": Kind("the same for every text", "text-blind head", "ignores the text", "ignore the text"),
    "sink": Kind("attention sink"),
    "positional": Kind("attends to a neighbouring token"),
}
"""By the name of the finding. A fault has a title of its own. Of two findings with the same level, the earlier comes first."""
NAMES = tuple(KINDS)


class Threshold(NamedTuple):
    """A number, the level of what exceeds it, its source, and for logits why it matters and what to do."""

    value: float
    level: str
    source: str
    why: str = ""
    advice: str = ""


OURS = "attemper's own, no published number"
STUDY = "docs/training.md, warning"  # 52 failing and 25 healthy runs of a small language model
CHECKPOINTS = "docs/checkpoints.md"  # published models that work
ULP = "half a unit in the last place of the largest logit, through exp"

PEAK = (
    Threshold(
        1e4,
        "diverging",
        "Wortsman et al. 2023, arXiv 2309.14322: every run with logits above 1e4 diverged",
        "every run of Wortsman et al. with logits this large diverged",
        "Go back to a checkpoint from before the logits grew; add QK-norm or QK-Clip; lower the learning rate.",
    ),
    Threshold(
        1e3,
        "critical",
        "Kimi K2, arXiv 2507.20534: the loss spikes with logits above 1000; "
        f"{CHECKPOINTS}: the largest logit of twelve published models is 382",
        "at this size the loss of other models spiked",
        "Stop, go back to an earlier checkpoint, and add QK-norm or QK-Clip before training on.",
    ),
    Threshold(
        100,
        "error",
        "Kimi K2, arXiv 2507.20534: QK-Clip acts at 100; Swin v2 holds its scale under 100; "
        f"{STUDY}: 0 of 25 healthy runs passed it",
        "logits that large keep growing while training, until the loss spikes",
        "Clip this head (QK-Clip multiplies its W_q and W_k by √(100/peak)), or add QK-norm; lower the learning rate.",
    ),
    Threshold(
        50,
        "warn",
        f"Gemma 2 caps its logits at 50; {STUDY}: 52 of 52 failing and 6 of 25 healthy runs passed it",
        "its attention is nearly one-hot, and half-precision scores are too coarse for it",
        "While training: lower the learning rate or add QK-norm. Compute scores in float32.",
    ),
    Threshold(
        30,
        "note",
        "Grok-1 caps its logits at 30; Kimi K2, arXiv 2507.20534: a clip at 30 cost nothing",
        "sharp, but harmless in float32",
        "Nothing to do; watch it while the model trains.",
    ),
)
"""The levels of the largest logit of a model that trains, the highest first. One that is no longer trained has "warn" and "error"
only in saturated heads, and a note in others."""

OVERFLOW = (
    Threshold(1 / 2, "critical", "IEEE 754: a float16 ends at 65504, and what is larger is stored as infinity"),
    Threshold(1 / 8, "warn", OURS),
)
ROUNDING = (Threshold(0.5, "error", ULP), Threshold(0.25, "warn", ULP), Threshold(0.1, "note", ULP))
STORED = {"float16": (65504.0, 11), "bfloat16": (3.39e38, 8)}
"""The largest number and the bits of precision of the dtypes in which stored scores lose digits."""

COLLAPSED = Threshold(
    0.05,
    "note",
    f"{OURS}; near-zero entropy before divergence: ViT-22B, arXiv 2302.05442; {STUDY}: 7 of 25 healthy runs passed it; "
    f"{CHECKPOINTS}: no head of twelve published models",
)
SATURATED = Threshold(
    0.5,
    "note",
    f"{OURS}; {STUDY}: 9 of 25 healthy runs passed it; {CHECKPOINTS}: no head of twelve published models",
)
FLAT = Threshold(0.99, "note", f"{OURS}; why flat attention stops learning: Noci et al. 2022, arXiv 2206.03126")
FORMED = Threshold(
    0.9,
    "healthy",
    f"{OURS}: of 48 heads of small language models six were above 0.99 again after they had left it, and none that had been "
    "below 0.9",
)
"""Training begins with flat heads: they are a warning where another head of the model has an evenness below this."""
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
    "flat, half of a layer": ("evenness of another head of the model, as training begins flat, below", (FORMED,)),
    "dead": ("total variation between the weights for different texts, below", (DEAD,)),
    "sink": ("mean weight on a first or special token, above", (SINK,)),
    "positional": ("mean weight on the token itself, or on one up to two places away, above", (POSITIONAL,)),
}
"""For the documentation: finding → what is compared, and its thresholds."""
