"""Desk: heavy computations, one at a time, in a process that can be ended.

A computation in this process could not be stopped when it takes too long or when Ctrl-C comes. The worker speaks JSON lines and
bytes over its pipes, computes in the order in which it was asked, and between two rows of a training run answers what waits. A
computation over its time costs the worker its life; the next one starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from . import limits
from .guard import Denied

BEGUN, ENDED, FAILED = "begun", "ended", "failed"  # kinds of frames; a result is "json", "floats" or "event"
RETRY = "Try again in a moment."


class Frame(NamedTuple):
    """One answer of the worker."""

    kind: str
    content: bytes

    def document(self) -> Any:
        return json.loads(self.content)


class Desk:
    """Asks the worker. ``model`` and ``record`` are what the command line named.

    Example:
        desk = Desk(None)
        frame = await desk.ask("heads", text="the dog sat")
    """

    def __init__(self, model: str | None, command: list[str] | None = None) -> None:
        self._command = command or [sys.executable, "-m", "attemper.page.server.worker", *([model] if model else [])]
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._jobs: dict[int, asyncio.Queue[Frame]] = {}
        self._last = 0
        self._starting = asyncio.Lock()

    async def start(self) -> asyncio.subprocess.Process:
        """The worker, begun if it is not there."""
        async with self._starting:
            if self._process is None or self._process.returncode is not None:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is this process's to hear
                    limit=limits.BODY * 4,
                )
                self._reader = asyncio.create_task(self._read(self._process))
            return self._process

    async def ask(self, what: str, **arguments: Any) -> Frame:
        """One computation and its result."""
        async with contextlib.aclosing(self.stream(what, **arguments)) as frames:
            async for frame in frames:
                return frame
        raise Denied(500, "The computation ended without a result.")

    async def stream(self, what: str, limited: bool = True, **arguments: Any) -> AsyncIterator[Frame]:
        """A computation and its results as they come. One that is not limited may take its time, and is cancelled instead."""
        if len(self._jobs) >= limits.WAITING:
            raise Denied(503, f"{len(self._jobs)} computations are waiting already; one is done at a time. {RETRY}")
        self._last += 1
        job, queue = self._last, asyncio.Queue[Frame]()
        self._jobs[job] = queue
        done = False
        try:
            process = await self.start()
            await self._send(process, {"job": job, "do": what, **arguments})
            await self._next(queue, limits.PATIENCE, f"This computation waited {limits.PATIENCE:.0f} s for its turn. {RETRY}")
            while True:
                frame = await self._result(queue, limited)
                if frame.kind == ENDED:
                    done = True
                    return
                yield frame
        finally:
            self._jobs.pop(job, None)
            if not done and self._process is not None and self._process.returncode is None:
                with contextlib.suppress(OSError):
                    await self._send(self._process, {"cancel": job})

    async def _result(self, queue: asyncio.Queue[Frame], limited: bool) -> Frame:
        try:
            return await self._next(queue, limits.COMPUTING if limited else None, "")
        except TimeoutError:
            self.kill()
            words = f"The computation took more than {limits.COMPUTING:.0f} s and was stopped. Use a shorter text."
            raise Denied(504, words) from None

    async def _next(self, queue: asyncio.Queue[Frame], wait: float | None, late: str) -> Frame:
        try:
            async with asyncio.timeout(wait):
                frame = await queue.get()
        except TimeoutError:
            if late:
                raise Denied(503, late) from None
            raise
        if frame.kind == FAILED:
            failed = frame.document()
            raise Denied(int(failed["status"]), str(failed["says"]))
        return frame

    async def _send(self, process: asyncio.subprocess.Process, line: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(line).encode() + b"\n")
        await process.stdin.drain()

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand out what the worker says, until it ends."""
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                head = json.loads(line)
                content = await process.stdout.readexactly(head["bytes"])
                if head["job"] in self._jobs:
                    self._jobs[head["job"]].put_nowait(Frame(head["kind"], content))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            pass  # it was ended
        await process.wait()
        gone = Frame(FAILED, json.dumps({"status": 503, "says": f"The computing process ended. {RETRY}"}).encode())
        for queue in list(self._jobs.values()):
            queue.put_nowait(gone)

    def kill(self) -> None:
        """End the worker now, whatever it does."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End the worker and wait until it is gone."""
        self.kill()
        if self._process is not None:
            await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
