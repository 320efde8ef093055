"""Measures attemper_lab.maths.gradients.CROSSINGS and their standard errors: `python -m research.crossings`."""

from __future__ import annotations

import math
import statistics

from attemper_lab.maths.gradients import UNITS, estimate, lengths

SEEDS = 96
STEP = 1.1  # in d_k, over which the slope at a crossing is taken


def refined(n: int, unit: str, seeds: int) -> tuple[float, float]:
    """The crossing from many sets of draws, and its standard error: from the crossing of one set by the slope at it."""

    def ratio(d: float, seed: int) -> float:
        bare, scaled = (float(lengths(d, n, scale, seed)[unit].median()) for scale in (1.0, 1 / math.sqrt(d)))
        return math.log(bare / scaled)

    at, steps = estimate(n, unit), min(seeds, 8)
    found = [ratio(at, seed) for seed in range(seeds)]
    slope = statistics.fmean(ratio(STEP * at, seed) - found[seed] for seed in range(steps)) / math.log(STEP)
    error = statistics.stdev(found) / math.sqrt(seeds)
    return at * math.exp(-statistics.fmean(found) / slope), at * error / abs(slope)


if __name__ == "__main__":
    for n in (128, 1024):
        for unit in UNITS:
            crossed, error = refined(n, unit, SEEDS)
            print(f"({n}, {unit!r}): {crossed:.1f} ± {error:.1g}", flush=True)
