"""theory: closed forms for softmax over n independent logits N(0, s²), and for q·k.

Softmax over random logits is Derrida's random energy model (1981). With m = √(2 ln n)/s it is frozen where m < 1: a few keys hold
all the weight, and the weights follow the Poisson-Dirichlet law with parameter m. The forms are limits of large n; how far a
finite n is from them is measured, not assumed (docs/numbers.md).
"""

from __future__ import annotations

import math

import torch

SCALES = {"none": "without a scale", "sqrt_dk": "with 1/√d_k", "dk": "with 1/d_k", "sqrt_dmodel": "with 1/√d_model"}
"""The rules as the label of a number names them."""
NEARLY_ONE_HOT = 0.9
"""A row, or the mean of a head, is called nearly one-hot from this top weight on."""


def critical_std(n: int) -> float:
    """The logit std at which softmax over n keys freezes, √(2 ln n)."""
    return math.sqrt(2 * math.log(n))


def frozen(s: float, n: int) -> float:
    """m = s_c/s; below 1 the softmax is frozen."""
    return critical_std(n) / s


def jacobian_trace(s: float, n: int) -> float | None:
    """E[1 − Σp²]: m when frozen, 1 − eˢ²/n where s < s_c/2; in between neither is accurate at the n of real models."""
    m = frozen(s, n)
    if m < 1:
        return m
    return 1 - math.exp(s * s) / n if m > 2 else None


def jacobian_square(m: float) -> float:
    """E‖J‖_F² = m(1−m)/3 when frozen; its peak is 1/12, at m = 1/2."""
    return m * (1 - m) / 3


def entropy(s: float, n: int) -> float:
    """In nats: ln n − s²/2 above freezing, ψ(1) − ψ(1−m) when frozen. Poor for m between 0.6 and 1."""
    m = frozen(s, n)
    if m > 1:
        return math.log(n) - s * s / 2
    ends = torch.digamma(torch.tensor([1.0, 1.0 - m], dtype=torch.float64, device="cpu"))
    return float(ends[0] - ends[1])


def two_key_slope(d: int) -> float:
    """E[p(1−p)] of two keys for large d, unscaled: 1/(2√(πd))."""
    return 1 / (2 * math.sqrt(math.pi * d))


def two_key_gap(d: int) -> float:
    """The median distance of two logits, unscaled: given q they differ by N(0, 2|q|²), and |q|² is χ² of d. About 0.954 √d."""
    lengths = torch.linspace(0, math.sqrt(d) + 8, 8001, dtype=torch.float64, device="cpu")[1:]
    share = torch.softmax((d - 1) * lengths.log() - lengths.square() / 2, 0)
    low, high = 0.0, 2 * math.sqrt(d)
    for _ in range(60):
        middle = (low + high) / 2
        below = float(share @ torch.erf(middle / (2 * lengths)))
        low, high = (middle, high) if below < 0.5 else (low, middle)
    return high


def two_key_median(d: int) -> float:
    """The median of p(1−p) of two keys, unscaled: the slope at the median distance, since it falls with the distance."""
    return 1 / (2 + 2 * math.cosh(two_key_gap(d)))


def kurtosis(d: int) -> float:
    """The kurtosis of q·k with normal entries: 3 + 6/d."""
    return 3 + 6 / d


def top_weight_cap(bound: float, n: int) -> float:
    """The largest weight that logits within ±bound can give one of n keys."""
    return 1 / (1 + (n - 1) * math.exp(-2 * bound))


def bound_for(top_weight: float, n: int) -> float:
    """The bound on logits at which a top weight becomes possible: the inverse of :func:`top_weight_cap`."""
    return math.log(top_weight * (n - 1) / (1 - top_weight)) / 2
