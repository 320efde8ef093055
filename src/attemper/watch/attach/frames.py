"""Stack: what Python's own stack tells: whether a forward is still running, and whether torch.compile called it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import FrameType

from ..._torch_private import DYNAMO_MODULE, DYNAMO_WRAPPER


class Site:
    """Where a forward was called. A KeyboardInterrupt or a SystemExit ends it with no hook being told."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.frame = sys._getframe(2)  # torch's, which calls the hook that asks, and the forward

    def is_running(self) -> bool:
        return any(frame is self.frame for frame in _frames(sys._current_frames().get(self.thread)))


def in_compiled() -> bool:
    """Whether a function that torch.compile made is calling. While somebody listens it runs what it was made from."""
    return any(
        frame.f_code.co_name == DYNAMO_WRAPPER and frame.f_globals.get("__name__") == DYNAMO_MODULE
        for frame in _frames(sys._getframe(1))
    )


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
