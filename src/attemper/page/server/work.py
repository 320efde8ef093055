"""Desk: heavy computations, one at a time, in a process that can be ended.

A computation in this process could not be stopped when it takes too long or when Ctrl-C comes. The worker reads and writes JSON
lines and bytes over its pipes. It computes in the order in which it was asked, and takes other requests between two rows of a
training run. A computation that exceeds its time limit ends the worker, and the next computation starts a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from . import limits
from .guard import Denied
from .worker import ENDED, FAILED

RETRY = "Try again in a moment."
ENDED_BEFORE = f"The computing process ended. {RETRY}"


class WorkerAnswer(NamedTuple):
    """One answer of the worker."""

    kind: str
    content: bytes

    def document(self) -> Any:
        return json.loads(self.content)


class Desk:
    """Asks the worker. ``model`` is what the command line named.

    Example:
        desk = Desk(None)
        answer = await desk.ask("heads", text="the dog sat")
    """

    def __init__(self, model: str | None) -> None:
        self._command = [sys.executable, "-m", "attemper.page.server.worker", *([model] if model else [])]
        self._process: asyncio.subprocess.Process | None = None
        self._readers: set[asyncio.Task[None]] = set()
        self._jobs: dict[int, asyncio.Queue[WorkerAnswer]] = {}
        self._with: dict[int, asyncio.subprocess.Process] = {}  # the process that does a job
        self._last = 0
        self._starting = asyncio.Lock()

    async def start(self) -> asyncio.subprocess.Process:
        """The worker; it is started if it does not run."""
        async with self._starting:
            if self._process is None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C goes to this process alone, which ends the worker
                    limit=limits.BODY * 4,
                )
                reader = asyncio.create_task(self._read(self._process))
                self._readers.add(reader)
                reader.add_done_callback(self._readers.discard)
            return self._process

    async def ask(self, what: str, **arguments: Any) -> WorkerAnswer:
        """One computation and its result."""
        async with contextlib.aclosing(self.stream(what, **arguments)) as answers:
            async for answer in answers:
                return answer
        raise Denied(500, "The computation ended without a result.")

    async def stream(self, what: str, limited: bool = True, **arguments: Any) -> AsyncGenerator[WorkerAnswer, None]:
        """A computation and its results as they come. Without `limited` it has no time limit, and can be cancelled."""
        if len(self._jobs) >= limits.WAITING:
            raise Denied(503, f"{len(self._jobs)} computations are waiting already; one is done at a time. {RETRY}")
        self._last += 1
        job, queue = self._last, asyncio.Queue[WorkerAnswer]()
        self._jobs[job] = queue
        done = False
        try:
            process = await self.start()
            self._with[job] = process
            await self._send(process, {"job": job, "do": what, **arguments})
            await self._next(
                queue, limits.PATIENCE, f"This computation waited {limits.PATIENCE:.0f} s for its turn. {RETRY}"
            )
            while True:
                answer = await self._result(queue, limited)
                if answer.kind == ENDED:
                    done = True
                    return
                yield answer
        finally:
            self._jobs.pop(job, None)
            self._with.pop(job, None)
            if not done and self._process is not None:
                with contextlib.suppress(Denied):
                    await self._send(self._process, {"cancel": job})

    async def _result(self, queue: asyncio.Queue[WorkerAnswer], limited: bool) -> WorkerAnswer:
        try:
            return await self._next(queue, limits.COMPUTING if limited else None, "")
        except TimeoutError:
            self.kill()
            words = f"The computation took more than {limits.COMPUTING:.0f} s and was stopped. Use a shorter text."
            raise Denied(504, words) from None

    async def _next(self, queue: asyncio.Queue[WorkerAnswer], wait: float | None, late: str) -> WorkerAnswer:
        try:
            async with asyncio.timeout(wait):
                answer = await queue.get()
        except TimeoutError:
            if late:
                raise Denied(503, late) from None
            raise
        if answer.kind == FAILED:
            failed = answer.document()
            raise Denied(int(failed["status"]), str(failed["says"]))
        return answer

    async def _send(self, process: asyncio.subprocess.Process, line: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(line).encode() + b"\n")
            await process.stdin.drain()
        except OSError:
            raise Denied(503, ENDED_BEFORE) from None

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Give each answer of the worker to the job that waits for it, until the worker ends."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                head = json.loads(line)
                content = await process.stdout.readexactly(head["bytes"])
                if head["job"] in self._jobs:
                    self._jobs[head["job"]].put_nowait(WorkerAnswer(head["kind"], content))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass  # it was ended
        if self._process is process:
            self._process = None
        for queue in [self._jobs[job] for job, owner in self._with.items() if owner is process]:
            queue.put_nowait(WorkerAnswer(FAILED, json.dumps({"status": 503, "says": ENDED_BEFORE}).encode()))
        await process.wait()

    def kill(self) -> None:
        """End the worker now, whatever it does; the next computation begins another."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def close(self) -> None:
        """End the worker and wait until it is gone."""
        self.kill()
        await asyncio.gather(*self._readers, return_exceptions=True)
