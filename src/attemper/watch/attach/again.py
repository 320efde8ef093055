"""Again: calls like earlier ones in a light pass on a GPU, which are counted by the rows of their signs alone.

The Python code around a launch takes longer than the kernel there, so as few checks as possible are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..._torch_private import _current_graph_task_id
from ...errors import AttemperError
from ..call import Facts, Summary
from ..routes.padding import count_all_rows
from .measuring import is_captured, rows_again
from .running import Pass, running

if TYPE_CHECKING:
    from ..session import Watch
    from .attachment import Attachment


def take_again(
    attachment: Attachment,
    facts: Facts,
    query: Tensor,
    key: Tensor,
    causal: bool | str,
    scale: float | None,
    current: Pass,
) -> bool:
    """`Attachment.take` for a call without a mask, by the launch of an earlier one; False if it needs more than that."""
    only = only_watch(attachment, facts, query, current)
    if only is None:
        return False
    try:
        rows = rows_again(query, key, causal, scale, only.observer)
    except (AttemperError, RuntimeError) as error:
        attachment.unmeasured(tuple(running.frames), str(error).removesuffix("."))
        return True
    if rows is not None:
        count_rows(facts, query, key, rows, only, current)
    return rows is not None


class OnlyWatch(NamedTuple):
    """The only watch of a light pass, and its name of the module that runs."""

    observer: Watch
    name: str


def only_watch(attachment: Attachment, facts: Facts, query: Tensor, current: Pass) -> OnlyWatch | None:
    """The watch, if there is one and it needs nothing but the rows of a call without a mask, all of which count."""
    observers = attachment.observers  # another thread may change it
    if len(observers) != 1 or current.left_out or current.light is None or facts.kind == "cross":
        return None
    observer = observers[0]
    name = observer.names.get(id(running.frames[-1].module))
    more = observer.examiners or observer.wants_gradients or observer.given_rows is not None
    more = more or observer._ranks is None or observer._ranks.many
    if name is None or more or not is_on_gpu(query) or _current_graph_task_id() != -1 or is_captured(query):
        return None
    return OnlyWatch(observer, name)


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda  # tests without a GPU replace this function


def count_rows(facts: Facts, query: Tensor, key: Tensor, rows: Summary, only: OnlyWatch, current: Pass) -> None:
    """Count a call of which there are only the rows of its signs."""
    count_all_rows(current, facts, query, key)
    if current.begun_light is not None:
        current.begun_light.counted(running.frames[-1].module)
    for frame in running.frames:
        frame.accounted = True
    only.observer._sums.add(only.name, facts, rows)
