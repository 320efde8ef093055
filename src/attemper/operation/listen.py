"""Listen: the listener that gets every attention call of this thread: a watch, in a pass without a dispatch mode."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..kernels.contract import Problem


class Listening(threading.local):
    """The listener of this thread, which gets each problem after it was computed."""

    listener: Callable[[Problem], None] | None = None


listening = Listening()
