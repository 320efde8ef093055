"""Again: calls like earlier ones in a light pass on a GPU, which are counted by the rows of their signs alone.

Python takes longer than a kernel there, so that each question counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..._torch_private import _current_graph_task_id
from ...errors import AttemperError
from ..call import Facts, UnfoldedRows
from ..routes.padding import leave_none_out
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
    observer = alone(attachment, facts, query, current)
    if observer is None:
        return False
    try:
        rows = rows_again(query, key, causal, scale, observer)
    except (AttemperError, RuntimeError) as error:
        attachment.unmeasured(tuple(running.frames), str(error).removesuffix("."))
        return True
    if rows is not None:
        count_rows(facts, query, key, rows, observer, current)
    return rows is not None


def alone(attachment: Attachment, facts: Facts, query: Tensor, current: Pass) -> Watch | None:
    """The only watch of a light pass, if it needs nothing but the rows of a call without a mask, all of which count."""
    if len(attachment.observers) != 1 or current.left_out or current.light is None or facts.kind == "cross":
        return None
    observer = attachment.observers[0]
    more = observer.examiners or observer.wants_gradients or observer.given_rows is not None
    more = more or observer._ranks is None or observer._ranks.many
    if more or id(running.frames[-1].module) not in observer.names:
        return None
    return None if _current_graph_task_id() != -1 or is_captured(query) else observer


def count_rows(facts: Facts, query: Tensor, key: Tensor, rows: UnfoldedRows, observer: Watch, current: Pass) -> None:
    """Count a call for the watch that `alone` returned."""
    frames, module = running.frames, running.frames[-1].module
    leave_none_out(current, facts, query, key)
    if current.begun_light is not None:
        current.begun_light.counted(module)
    for frame in frames:
        frame.accounted = True
    observer._sums.add(observer.names[id(module)], facts, rows)
