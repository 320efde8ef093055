"""Passes: which calls of a model count in a step, since evaluation and generation run between those that train."""

from __future__ import annotations

from torch import nn

from .._torch_private import _current_graph_task_id
from ..kernels.contract import is_recording

KINDS = ("training", "all")
LEFT_OUT = (
    "passes without gradients, or in evaluation mode beside others in training mode, are left out of steps; "
    "passes='all' counts them."
)
ONLY_OTHERS = (
    "a step ended with none but passes without gradients, after others that had them: it has no rows. "
    "Use passes='all' to count every pass."
)
UNFINISHED = (
    "what ran after the last step is left out: it was in evaluation mode after steps in training mode, or the optimizer took no "
    "step after it. Use passes='all' to count every pass."
)


class Passes:
    """Takes a pass in or leaves it out, by how the model was when it began.

    In a step, a pass in training mode with gradients on goes before one in evaluation mode, and that before one without
    gradients. Once a pass had gradients, none without them counts: the watch is over a training. Where none has, all count.
    What is left when the watch ends is no step if the steps before it went before it in that order: see `rest`.
    Passes are compared where one's outermost module is the other's or holds it: a frozen part that is called by itself counts.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.begin()

    def begin(self) -> None:
        """A watch opens."""
        self.seen = self.counted = 0
        self.highest: dict[str, int] = {}  # the best grade of any step, by the module that was called
        self.end_step()

    def end_step(self) -> None:
        self.grades: dict[str, int] = {}  # of the passes of this step, by the module that was called
        self.left_out = False  # whether some of this step were

    def take(self, module: nn.Module, name: str) -> list[str] | None:
        """None where the pass that begins with this module does not count; else the modules whose passes before it do not."""
        self.seen += 1
        again = _current_graph_task_id() != -1  # a checkpoint, computed again in a backward
        worse: list[str] = []
        if self.kind != "all" and not again:
            grade = (1 + module.training) * is_recording()
            others = {other: found for other, found in self.grades.items() if _are_kin(name, other)}
            if any(grade < found for found in others.values()) or (not grade and self._highest(name)):
                self.left_out = True
                return None
            worse = [other for other, found in others.items() if found < grade]
            for other in worse:
                del self.grades[other]
            self.grades[name] = grade
            self.highest[name] = max(grade, self.highest.get(name, 0))
        self.counted += 1
        return worse

    def rest(self, after_optimizer: bool) -> list[str]:
        """The modules whose passes in the step under way are no step of training, where nothing more comes to end it.

        `after_optimizer`: steps end with an optimizer's, and one has ended.
        """
        return [name for name, grade in self.grades.items() if after_optimizer or grade < self._highest(name)]

    def _highest(self, name: str) -> int:
        return max((grade for other, grade in self.highest.items() if _are_kin(name, other)), default=0)


def _are_kin(name: str, other: str) -> bool:
    return is_in(name, other) or is_in(other, name)


def is_in(name: str, outer: str) -> bool:
    """Whether a module is another one or inside it; the model itself has no name."""
    return not outer or name == outer or name.startswith(f"{outer}.")
