"""end_with(): a worker process ends when its caller is gone. Imports nothing else, because it runs before torch is imported."""

from __future__ import annotations

import os
import threading
import time

LOOK = 0.5  # seconds after which a worker looks again whether its caller is there


def end_with(caller: int) -> None:
    """A worker of a pool whose caller was killed would go on with its work, which nobody waits for, and hold the terminal."""

    def look() -> None:
        while os.getppid() == caller:
            time.sleep(LOOK)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
