"""end_with(): a worker process ends when its caller is gone. Imports nothing else, because it runs before torch is imported."""

from __future__ import annotations

import os
import threading
import time

POLL_SECONDS = 0.5


def end_with(caller: int) -> None:
    """End this process when its caller is gone: otherwise it would go on computing for nobody, and hold the terminal."""

    def look() -> None:
        while os.getppid() == caller:
            time.sleep(POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()
