"""children: run cases in a process of their own, so that one that crashes or hangs fails alone."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def answers(
    script: str, limit: int, group: str, names: Sequence[str], **environment: str
) -> Iterator[tuple[Any | None, str]]:
    """What `script --run GROUP NAME …` prints, a line of JSON for each name. None, and why, where the process ended before its
    time or took more than ``limit`` seconds; nothing comes after that."""
    command = [sys.executable, "-W", "ignore", script, "--limit", str(limit), "--run", group, *names]
    own = {**os.environ, **ENVIRONMENT, **environment}
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        # without a buffer, in which an answer would wait that select does not see
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, bufsize=0, env=own) as child,
    ):
        assert child.stdout is not None
        for number in range(len(names)):
            # the alarm of a process waits for its interpreter, and its first case for the imports
            ready = select.select([child.stdout], [], [], limit + (60 if number else 300))[0]
            line = child.stdout.readline() if ready else b""
            if not line:
                child.kill()
                said.seek(0)
                why = "no answer in time" if not ready else (said.read().strip().splitlines() or ["in silence"])[-1]
                yield None, f"its process ended ({child.wait()}): {why}"
                return
            yield json.loads(line), ""
