"""timing: an interleaved timer. Every round runs each candidate once, so that a slow moment of the machine slows all of them.

Speeds are compared round by round: the ratio of two candidates is the median of the ratios within each round, with a
bootstrap interval. Medians of two separate runs would also compare what the machine did in between.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

RESAMPLES = 1000
FEWEST_ROUNDS = 3
FINE = time.get_clock_info("thread_time").resolution <= 1e-6
"""Whether the clock of a thread's processor time is fine enough; on Windows it advances every 16 ms."""


@dataclass(frozen=True)
class Spread:
    """A median with the range around it."""

    median: float
    low: float
    high: float

    def to_dict(self, digits: int = 4) -> dict[str, float]:
        return {name: round(getattr(self, name), digits) for name in ("median", "low", "high")}

    def columns(self, name: str) -> dict[str, float]:
        """The columns of a row: ``name`` is the median, ``{name}_low`` and ``{name}_high`` its interval."""
        return {name: self.median, f"{name}_low": self.low, f"{name}_high": self.high}


@dataclass(frozen=True)
class Times:
    """Seconds per candidate; the n-th entries of all candidates belong to the same round."""

    seconds: Mapping[str, Sequence[float]]

    @property
    def rounds(self) -> int:
        return min(len(times) for times in self.seconds.values())

    def spread(self, name: str) -> Spread:
        """The median and the quartiles of one candidate, in seconds."""
        times = self.seconds[name]
        if len(times) < 2:
            return Spread(times[0], times[0], times[0])
        low, median, high = statistics.quantiles(times, n=4, method="inclusive")
        return Spread(median, low, high)

    def milliseconds(self, *names: str) -> dict[str, float]:
        """The median of each of these candidates, as the column ``{name}_ms``."""
        return {f"{name}_ms": self.spread(name).median * 1e3 for name in names}

    def speed(self, name: str, than: str) -> Spread:
        """How many times faster `name` is than another candidate (above 1: faster); 95 % bootstrap interval."""
        ratios = [other / own for own, other in zip(self.seconds[name], self.seconds[than], strict=True)]
        return median_interval(ratios)

    def above(self, name: str, than: str) -> Spread:
        """How many seconds more `name` takes than another candidate; 95 % bootstrap interval."""
        return median_interval([own - other for own, other in zip(self.seconds[name], self.seconds[than], strict=True)])


def median_interval(values: Sequence[float]) -> Spread:
    """The median and its 95 % bootstrap interval; the same values always give the same interval."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return Spread(statistics.median(values), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    budget: float = 60.0,
    device: str = "cpu",
    host: bool = False,
) -> Times:
    """Time the candidates against one another.

    Args:
        candidates: name → a call to time. What it returns is dropped outside the timed span.
        rounds: how often each is timed. The order changes from round to round (see :func:`interleaved`).
        warmup: untimed calls of each before the first round. The first is always made, more only within a quarter of the budget.
        budget: seconds after which no new round starts; the first three rounds always run.
        device: ``"cuda"`` times with events on the device, others with the wall clock.
        host: time what the host takes. On a CPU that is the processor time of this thread, which other processes do not lengthen;
            with ``"cuda"`` the wall clock until a call returns, on a device that was idle before.
    """
    if torch.device(device).type == "cuda":
        clock = _on_host if host else _on_device
    else:
        clock = _on_thread if host and FINE else _on_wall
    names = list(candidates)
    started = time.perf_counter()
    for number in range(warmup):
        if number and time.perf_counter() - started > budget / 4:
            break
        for name in names:
            candidates[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.perf_counter() - started > budget:
            break
        for name in interleaved(names, number):
            seconds[name].append(clock(candidates[name]))
    return Times(seconds)


def interleaved(names: Sequence[str], number: int) -> list[str]:
    """The order of one round. Over 2n rounds each of n candidates follows each other equally often (a Williams square).

    A candidate leaves caches and freed memory to the next one, a large candidate most of all: if the order only rotated, each
    candidate would always follow the same one.
    """
    count = len(names)
    ends = [place for pair in zip(range(count), reversed(range(count)), strict=True) for place in pair][:count]
    order = [names[(place + number) % count] for place in ends]
    return order[::-1] if number // count % 2 else order


def _on_wall(call: Callable[[], object]) -> float:
    return _elapsed(call, time.perf_counter)


def _on_thread(call: Callable[[], object]) -> float:
    return _elapsed(call, time.thread_time)


def _elapsed(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    result = call()
    elapsed = clock() - start
    del result  # freeing the result is not timed
    return elapsed


def _on_host(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()  # the candidate before must have ended
    return _on_wall(call)


def _on_device(call: Callable[[], object]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()  # the candidate before must have ended
    start.record()
    result = call()
    stop.record()
    stop.synchronize()
    del result
    return float(start.elapsed_time(stop)) / 1e3
