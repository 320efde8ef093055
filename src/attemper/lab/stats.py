"""stats: estimates with their standard errors, from independent batches; no library but torch."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

NORMAL_95 = 1.96


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float

    def columns(self, name: str) -> dict[str, float]:
        """``name``, and the ends of its 95 % interval."""
        reach = NORMAL_95 * self.error
        return {name: self.mean, f"{name}_low": self.mean - reach, f"{name}_high": self.mean + reach}


def over_batches(values: Tensor) -> Estimate:
    """The mean of ``values``, (batches, …), and its error from how the batches differ: within one they may be dependent."""
    batches = values.double().flatten(1).mean(1) if values.dim() > 1 else values.double()
    count = len(batches)
    error = float(batches.std() / math.sqrt(count)) if count > 1 else math.nan
    return Estimate(float(batches.mean()), error)


def reach(row_low: float, row_high: float, errors: float = 4.0) -> float:
    """``errors`` standard errors, from the ends of a 95 % interval: 4 are missed by chance once in 16,000."""
    return errors * (row_high - row_low) / (2 * NORMAL_95)
