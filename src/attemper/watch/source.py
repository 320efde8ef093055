"""Source: where a watch has its attention calls from: modules that run, attemper's kernels in their place, or tallies."""

from __future__ import annotations

from typing import Protocol


class Collected(Protocol):
    """The calls of a step, on their way from a device."""

    @property
    def is_done(self) -> bool: ...

    def take_over(self) -> None:
        """Wait for them, and put them into the sums of the observer."""


class Source:
    """Where calls come from, which are put into the sums of its observer. What a source need not do at a point, it leaves out."""

    refuses_rows = ""  # what to say of rows that a user marks, if it cannot take them

    def open(self) -> None:
        """The watch opens."""

    def start(self) -> None:
        """Count calls from here on: from zero or, after a pause, beside those before it."""

    def pause(self) -> None:
        """Count no calls until `start`."""

    def stop(self) -> None:
        """Count no calls until `start`, and forget those of this step, which is not measured."""
        self.pause()

    def collect(self, goes_on: bool) -> Collected | None:
        """A step ends; `goes_on` if no error ended it. None: all its calls are in the sums."""
        return None

    def forget(self) -> None:
        """Begin the step anew; the sums are empty."""

    def close(self) -> None:
        """The watch closes."""
