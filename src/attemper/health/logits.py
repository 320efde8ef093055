"""Findings about the size of logits: the levels of the peak, and scores that a model stores in half precision."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .finding import Finding, HeadRow, finding_of, number, past
from .thresholds import OVERFLOW, PEAK, ROUNDING, STORED, Threshold

PEAK_TODO = {
    "note": "Nothing to do; watch it while the model trains.",
    "warn": "While training: lower the learning rate or add QK-norm. Compute scores in float32.",
    "act": "Clip this head (QK-Clip multiplies its W_q and W_k by √(100/peak)), or add QK-norm; lower the learning rate.",
    "critical": "Stop, go back to an earlier checkpoint, and add QK-norm or QK-Clip before training on.",
    "diverging": "Go back to a checkpoint from before the logits grew; add QK-norm or QK-Clip; lower the learning rate.",
}

PEAK_WHY = {
    "note": "sharp, but harmless in float32",
    "warn": "its attention is nearly one-hot, and half-precision scores are too coarse for it",
    "act": "logits that large keep growing while training, until the loss spikes",
    "critical": "at this size the loss of other models spiked",
    "diverging": "every run of Wortsman et al. with logits this large diverged",
}
WIDEN = "Use torch's scaled_dot_product_attention, which keeps scores in float32, or compute q·kᵀ in float32."


def high(row: HeadRow, facts: HeadRow, names: set[str]) -> Finding | None:
    """The level of the largest logit; a note if something explains it."""
    score, mean, cap = number(row, "score_peak"), number(row, "mean"), number(facts, "softcap")
    peak = number(row, "peak") if score is None else score
    rung = past(PEAK, peak)
    if rung is None or peak is None:
        return None
    what = "logit" if score is None else "scale · q·k, without the numbers that are added to it,"
    says, why = f"The largest {what} is {peak:.4g}, above {rung.value:g}", None
    if facts.get("biased") and score is None:
        why = "it may hold numbers that are added to the scores, and the largest q·k without them is not known"
    elif cap is not None and peak <= cap:  # some kernels ignore a cap that is declared
        why = f"it stays below the cap of {cap:g}"
    elif rung.level == "warn" and "positional" in names:
        why = "this head attends to a neighbouring token and is sharp by design"
    elif rung.level in ("warn", "act") and mean is not None and peak - mean <= PEAK[-1].value:
        why = f"all its logits are large ({mean:.4g} on average), and softmax ignores a common shift"
    level = rung.level if why is None else "note"
    return finding_of(row, "peak", level, peak, rung, f"{says}: {why or PEAK_WHY[level]}.", PEAK_TODO[level])


def coarse(row: HeadRow, facts: HeadRow, names: set[str]) -> Finding | None:
    """Scores that a model stores in half precision: overflow and rounding. Fused kernels keep float32."""
    peak, dtype = number(row, "peak"), str(facts.get("dtype", ""))
    if facts.get("route") != "hand-written" or dtype not in STORED or peak is None or peak <= 0:
        return None
    most, bits = STORED[dtype]
    scale = facts.get("scale")
    factor = number(scale, "applied") if isinstance(scale, Mapping) else scale
    raw = peak / factor if factor and 0 < factor < 1 else peak  # the product is stored before it is scaled
    near = past(OVERFLOW, raw / most)
    if near is not None:
        says = f"Scores reach {raw:.4g}, and {dtype} ends at {most:g}: slightly larger scores become infinity, and then NaN."
        return finding_of(row, "overflow", near.level, raw, Threshold(near.value * most, "", near.source), says, WIDEN)
    moved = math.expm1(2.0 ** (math.floor(math.log2(peak)) - bits))
    rung = past(ROUNDING, moved)
    if rung is None:
        return None
    level = "note" if "positional" in names else rung.level
    says = f"Scores up to {peak:.4g} are stored in {dtype}, whose rounding alone moves a weight by {moved:.0%}."
    return finding_of(row, "overflow", level, moved, rung, says, WIDEN)
