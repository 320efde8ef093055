"""moments: exact means of tr J, ‖J‖_F², |Jx|² and the entropy of softmax over n independent logits sx, x normal, for any n and s.

A weight is p = eˣ/Z, and 1/Z^k = ∫ t^(k−1) e^(−tZ) dt / Γ(k) turns the sum Z in the denominator into a product over keys, whose
mean is a power of one key's. With φ_k = E (t eˣ)^k e^(−t eˣ) and u = ln t,

    E Σp^k = n/Γ(k) ∫ φ_k φ_0^(n−1) du,      E Σ_{i≠j} p_i² p_j² = n(n−1)/6 ∫ φ_2² φ_0^(n−2) du.

|Jx|² = Σ p_i² (x_i − Σ p_j x_j)² is a sum of such products too, with up to three keys, and factors x inside φ. The top weight is
that of one key while all others lie below it: φ_0 is then a mean over what lies below.

All integrands are analytic and die out on both sides; there the plain sum over a grid converges exponentially.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

STEP = 0.3  # of u and of x: leaves an error below 1e-8
REACH = 9.0  # standard deviations of the logits: what lies beyond weighs 1e-18
WIDEST = 64.0  # the largest s for which the grid is laid out: far beyond freezing, where the frozen limit is good
FINE = 0.15  # a step of x where a sum ends in the middle, so that its error is a power of the step
TALLEST = 7.0  # standard deviations: the largest of n logits lies within, 1 in 10¹² of them beyond
SECANTS = 5  # steps to a spread: in the log-odds of the top weight it is nearly a straight line
LENGTHS = 12  # of q, over which the mean is taken


class Moments(NamedTuple):
    """Means over draws of the logits: tr J = 1 − Σp², ‖J‖_F², |Jx|² with x the logits at a std of 1, and the entropy in nats."""

    trace: float
    square: float
    along: float
    entropy: float


@functools.cache
def of_logits(s: float, n: int) -> Moments | None:
    """The moments of softmax over n logits N(0, s²); None where s is too large for the grid."""
    if s > WIDEST:
        return None
    step = min(STEP, max(0.2 * s, 0.01))
    half = math.ceil(REACH * s / step)
    x = step * torch.arange(-half, half + 1, dtype=torch.float64, device="cpu")
    weight = torch.exp(-(x / s).square() / 2)
    weight = weight / weight.sum()
    lowest = -REACH * s - math.log(n) - 40  # u: there t Z is nothing; at the other end φ_0 is
    v = torch.arange(
        lowest - REACH * s - step, REACH * s + 8 + REACH * s, step, dtype=torch.float64, device="cpu"
    )  # u + x
    alive = -torch.exp(v.clamp(max=50.0))

    @functools.cache
    def phi(power: float, factors: int = 0) -> Tensor:
        """E (t eˣ)^power (x/s)^factors e^(−t eˣ), for every u."""
        values, kernel = torch.exp(power * v.clamp(max=50.0) + alive), weight * (x / s) ** factors
        product = torch.fft.rfft(values) * torch.fft.rfft(kernel, len(v)).conj()
        return torch.fft.irfft(product, len(v))[: len(v) - len(x) + 1]

    none = phi(0).clamp(min=1e-300).log()
    one_out, two_out = torch.exp((n - 1) * none), torch.exp((n - 2) * none)

    def sums(power: float) -> float:
        return n / math.gamma(power) * step * float((phi(power) * one_out).sum())

    def of_pairs(first: Tensor, other: Tensor) -> float:
        return n * (n - 1) * step * float((first * other * two_out).sum())

    def squares(power: float) -> float:
        """E Σ p^power (x/s)²."""
        return n / math.gamma(power) * step * float((phi(power, 2) * one_out).sum())

    pairs = of_pairs(phi(2), phi(2)) / 6
    mixed = squares(3) + of_pairs(phi(2, 1), phi(1, 1)) / 2  # E Σ p_i² x_i Σ p_j x_j
    triples = n * (n - 1) * (n - 2) * step * float((phi(2) * phi(1, 1).square() * torch.exp((n - 3) * none)).sum())
    centre = squares(4) + (of_pairs(phi(2), phi(2, 2)) + 2 * of_pairs(phi(3, 1), phi(1, 1)) + triples) / 6
    p2 = sums(2)
    small = 1e-4
    entropy = (sums(1 - small) - sums(1 + small)) / (2 * small)  # −Σ p ln p is −d/dk Σp^k at k = 1
    return Moments(1 - p2, p2 - 2 * sums(3) + sums(4) + pairs, squares(2) - 2 * mixed + centre, entropy)


@functools.cache
def top_weight(s: float, n: int) -> float:
    """The mean of the largest weight of softmax over n logits N(0, s²)."""
    step = min(FINE, s / 12)
    half = math.ceil(TALLEST * s / step)
    x = step * torch.arange(-half, half + 1, dtype=torch.float64, device="cpu")
    u = torch.arange(-TALLEST * s - 20, TALLEST * s + 5, 2 * FINE, dtype=torch.float64, device="cpu")
    total = 0.0
    for part in u.split(max(1, 1_000_000 // len(x))):
        rate = torch.exp((part[:, None] + x).clamp(max=50.0))  # t eˣ
        density = torch.exp(-(x / s).square() / 2 - rate) * (step / s / math.sqrt(2 * math.pi))
        # what lies below x: the trapezoidal sum up to x, and the first correction of Euler and Maclaurin
        below = density.cumsum(1) - density / 2 + density * (x / s**2 + rate) * (step / 12)
        total += float((rate * density * torch.exp((n - 1) * below.clamp(min=1e-300).log())).sum())
    return n * 2 * FINE * total


def spread_at(n: int, level: float) -> float:
    """The logit std at which the mean top weight is ``level``."""
    here, there = math.log(math.sqrt(2 * math.log(n))), math.log(2 * math.sqrt(2 * math.log(n)))
    for _ in range(SECANTS):
        above, below = (log_odds(top_weight(math.exp(at), n)) - log_odds(level) for at in (there, here))
        if above == below:
            break
        here, there = there, there - above * (there - here) / (above - below)
    return math.exp(there)


def log_odds(share: float) -> float:
    """ln(p/(1 − p)); beside the logarithm of the spread the top weight's is nearly a straight line."""
    return math.log(share / (1 - share))


@functools.cache
def of_dot_products(d: int, n: int, scale: float) -> Moments | None:
    """The moments for logits scale·q·k of unit normal q and k: given q they are N(0, (scale |q|)²), and |q|² is χ² of d."""
    lengths, share = _lengths(d)
    moments = [of_logits(scale * length, n) for length in lengths.tolist()]
    known = [moment for moment in moments if moment is not None]
    if len(known) < len(moments):
        return None
    return Moments(
        *(float(share @ torch.tensor(part, dtype=torch.float64, device="cpu")) for part in zip(*known, strict=True))
    )


@functools.cache
def top_weight_of_dot_products(d: int, n: int, scale: float) -> float:
    """The mean of the largest weight for such logits."""
    lengths, share = _lengths(d)
    weights = [top_weight(scale * length, n) for length in lengths.tolist()]
    return float(share @ torch.tensor(weights, dtype=torch.float64, device="cpu"))


def _lengths(d: int) -> tuple[Tensor, Tensor]:
    """Lengths of q over which a mean is taken, and the share of each."""
    spread = 6 * math.sqrt(0.5)  # six standard deviations of |q|
    # at small d the density is cut off at 0
    count = LENGTHS if d > 32 else 2 * LENGTHS if d > 8 else 8 * LENGTHS
    edges = torch.linspace(
        max(0.0, math.sqrt(d) - spread), math.sqrt(d) + spread, count + 1, dtype=torch.float64, device="cpu"
    )
    lengths = (edges[1:] + edges[:-1]) / 2
    log_density = (d - 1) * lengths.log() - lengths.square() / 2
    return lengths, torch.softmax(log_density, 0)
