"""Passes: which calls of a model count in a step; evaluation and generation run between those that train."""

from __future__ import annotations

import sys

from torch import nn

from .._torch_private import DRY_RUNS, PIPELINE_STAGE, _current_graph_task_id
from ..kernels.contract import is_recording
from .attach.running import python_frames

COUNTED = ("training", "all")
LEFT_OUT = (
    "passes without gradients, and passes in evaluation mode in a step that has others in training mode, are left out; "
    "passes='all' counts them."
)
ONLY_OTHERS = (
    "a step had only passes without gradients, after steps that had gradients: it has no rows. "
    "Use passes='all' to count every pass."
)
UNFINISHED = (
    "passes after the last step are left out: they ran in evaluation mode after steps in training mode, or no step of the "
    "optimizer followed. Use passes='all' to count every pass."
)

FAILED = (
    "a pass raised an error before it ended, and its step went on without it: the calls that it had made are left out. They are "
    "counted only if an error ends the block."
)


class Passes:
    """Decides whether a pass counts, by the mode of the model when it begins.

    Passes have three grades: in training mode with gradients, in evaluation mode with gradients, without gradients. In a step
    only the passes of its best grade count. Once a pass had gradients, none without them counts: the watch is over a training.
    If no pass has gradients, all count. Passes after the last step are no step if the steps had a better grade: see `unfinished`.
    Passes are compared if the outermost module of one is or contains that of the other: a frozen part called by itself counts.
    """

    def __init__(self, counted: str) -> None:
        self.all_count = counted == "all"
        self.begin()

    def begin(self) -> None:
        """Start from nothing: a watch opens."""
        self.begun = self.counted = 0
        self.highest: dict[str, int] = {}  # the best grade of any step, by the module that was called
        self.end_step()

    def end_step(self) -> None:
        self.grades: dict[str, int] = {}  # of the passes of this step, by the module that was called
        self.left_out = False  # whether some of this step were

    def take(self, module: nn.Module, name: str) -> list[str] | None:
        """None if the pass that begins with this module does not count; otherwise the modules whose earlier passes do not."""
        self.begun += 1
        again = _current_graph_task_id() != -1  # a checkpoint, computed again in a backward
        worse: list[str] = []
        if not self.all_count and not again:
            compared = self._compare(name, (1 + module.training) * is_recording())
            if compared is None:
                return None
            worse = compared
        self.counted += 1
        return worse

    def take_grades(self, name: str, calls: list[int]) -> list[int]:
        """The grades of a layer's calls in this step that count, from how many calls it had of each grade."""
        ran = [grade for grade, count in enumerate(calls) if count]
        self.begun = max(self.begun, sum(calls))
        found = ran if self.all_count else [grade for grade in reversed(ran) if self._compare(name, grade) is not None]
        self.counted = max(self.counted, sum(calls[grade] for grade in found))
        return found

    def _compare(self, name: str, grade: int) -> list[str] | None:
        """None if a pass of this grade does not count; otherwise the modules whose earlier passes do not."""
        # mostly all passes have one grade: then no names are compared, of which a step would have all pairs
        alike = {*self.grades.values()} <= {grade} and (grade or not any(self.highest.values()))
        others = {} if alike else {other: found for other, found in self.grades.items() if _are_nested(name, other)}
        if any(grade < found for found in others.values()) or (not alike and not grade and self._highest(name)):
            self.left_out = True
            return None
        worse = [other for other, found in others.items() if found < grade]
        for other in worse:
            del self.grades[other]
        self.grades[name] = grade
        self.highest[name] = max(grade, self.highest.get(name, 0))
        return worse

    def unfinished(self, after_optimizer: bool) -> list[str]:
        """The modules whose passes in the current step are no step of training, if the watch ends now.

        `after_optimizer`: an optimizer ends the steps, and has ended one.
        """
        return [name for name, grade in self.grades.items() if after_optimizer or grade < self._highest(name)]

    def _highest(self, name: str) -> int:
        return max((grade for other, grade in self.highest.items() if _are_nested(name, other)), default=0)


def is_dry() -> bool:
    """Whether torch's pipelining runs a stage to learn the shapes of its tensors: nothing is trained on what it computes."""
    if PIPELINE_STAGE not in sys.modules:
        return False
    frames = python_frames(sys._getframe(1))
    return any(
        frame.f_code.co_name in DRY_RUNS and frame.f_globals.get("__name__") == PIPELINE_STAGE for frame in frames
    )


def _are_nested(name: str, other: str) -> bool:
    return is_in(name, other) or is_in(other, name)


def is_in(name: str, outer: str) -> bool:
    """Whether a module is another one or inside it; the model itself has no name."""
    return not outer or name == outer or name.startswith(f"{outer}.")
