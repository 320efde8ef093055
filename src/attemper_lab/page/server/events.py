"""Server-sent events, and the training runs that the page starts.

A stream ends when its reader leaves, when a newer one takes its place, or when the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import traceback
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from . import limits
from .guard import Denied
from .worker import WorkerClient

FAILURE = "The server failed while it read this. Its terminal shows why; reload the page to go on."
BEAT = 15.0  # seconds without an event after which a comment shows whether the connection is alive


def event(name: str, document: Mapping[str, Any]) -> bytes:
    """One event. JSON has no line ends, so it fits on the one line that an event's data has."""
    return f"event: {name}\ndata: {json.dumps(document, ensure_ascii=False, allow_nan=False)}\n\n".encode()


class Streams:
    """The open streams; one more than ``limits.STREAMS`` ends the oldest."""

    def __init__(self) -> None:
        self._open: list[asyncio.Timeout] = []

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """A place among the open streams; the body of the ``with`` ends when a newer stream takes the place."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as place:
                self._open.append(place)
                self._end_all_but(limits.STREAMS)
                try:
                    yield
                finally:
                    if place in self._open:
                        self._open.remove(place)

    def end(self) -> None:
        """End all of them."""
        self._end_all_but(0)

    def _end_all_but(self, newest: int) -> None:
        while len(self._open) > newest:
            self._open.pop(0).reschedule(0)


class EventStream(StreamingResponse):
    """An answer that sends events, and a comment now and then."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], streams: Streams) -> None:
        self._sent = _with_beats(events)
        super().__init__(self._sent)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._streams.entered(), contextlib.aclosing(self._sent):
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": b""})  # another stream took its place


async def _with_beats(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    while True:
        following = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait([following], timeout=BEAT))[0]:
                yield b": alive\n\n"
            one = following.result()
        except Exception:  # a reader that is told nothing would wait for ever
            traceback.print_exc(file=sys.stderr)
            yield event("failed", {"error": FAILURE})
            return
        finally:
            following.cancel()
        if one is None:
            return
        yield one


class PageRun:
    """One training run: its events so far, and whether it is over."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.id = secrets.token_hex(8)
        self.settings = settings
        self.events: list[tuple[str, dict[str, Any]]] = [("waiting", {"settings": settings})]
        self.over = False
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def add(self, name: str, document: dict[str, Any], over: bool = False) -> None:
        self.events.append((name, document))
        self.over = over
        self.changed.set()  # for those who wait now; the next event has a flag of its own
        self.changed = asyncio.Event()

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """All events from the first one, until the run is over."""
        sent = 0
        while not self.over or sent < len(self.events):
            changed = self.changed
            for name, document in self.events[sent:]:
                sent += 1
                yield event(name, document)
            if not self.over:
                await changed.wait()


class PageRuns:
    """The last runs; one trains at a time."""

    def __init__(self, worker: WorkerClient) -> None:
        self._worker = worker
        self._runs: OrderedDict[str, PageRun] = OrderedDict()

    def begin(self, settings: dict[str, Any]) -> PageRun:
        if any(not run.over for run in self._runs.values()):
            raise Denied(409, "A run is under way, and one trains at a time. Cancel it, or wait until it ends.")
        run = PageRun(settings)
        self._runs[run.id] = run
        while len(self._runs) > limits.RUNS:
            self._runs.popitem(last=False)
        run.task = asyncio.create_task(self._train(run))
        return run

    def find(self, name: str) -> PageRun:
        if name not in self._runs:
            raise Denied(404, "There is no such run. Start one.")
        return self._runs[name]

    async def cancel(self, name: str) -> None:
        run = self.find(name)
        if run.task is not None:
            run.task.cancel()
            await asyncio.gather(run.task, return_exceptions=True)
        if not run.over:
            run.add("cancelled", {}, over=True)

    async def _train(self, run: PageRun) -> None:
        try:
            async with contextlib.aclosing(self._worker.run(run.settings)) as rows:
                async for row in rows:
                    run.add("row", row)
            run.add("ended", {}, over=True)
        except Denied as denied:
            run.add("failed", {"error": denied.says}, over=True)

    async def close(self) -> None:
        for name in self._runs:
            await self.cancel(name)
