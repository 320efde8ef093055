"""Server-sent events, and the training runs that the page starts.

A stream ends when its reader leaves, when a newer one takes its place, or when the server stops; an abandoned one costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
import traceback
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from . import limits
from .guard import Denied, Receive, Scope, Send
from .work import Desk

FAILURE = "The server failed while it read this. Its terminal shows why; reload the page to go on."
BEAT = 15.0  # seconds after which a stream without news shows that it is alive
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


def event(name: str, document: Mapping[str, Any], number: int | None = None) -> bytes:
    """One event; JSON has no line ends, so a line holds it."""
    words = json.dumps(document, ensure_ascii=False, allow_nan=False)
    return (f"id: {number}\n" if number is not None else "").encode() + f"event: {name}\ndata: {words}\n\n".encode()


class Streams:
    """The open streams; one more than ``limits.STREAMS`` ends the oldest."""

    def __init__(self) -> None:
        self._open: OrderedDict[object, asyncio.Event] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def entered(self) -> Any:
        """A flag that says when this stream must end."""
        key, ended = object(), asyncio.Event()
        self._open[key] = ended
        while len(self._open) > limits.STREAMS:
            self._open.popitem(last=False)[1].set()
        try:
            yield ended
        finally:
            self._open.pop(key, None)

    def end(self) -> None:
        """End all of them."""
        for ended in self._open.values():
            ended.set()


class EventStream:
    """An ASGI answer that sends what ``events`` gives, with a comment now and then so that a dead connection shows."""

    def __init__(self, streams: Streams, events: Callable[[], AsyncIterator[bytes]]) -> None:
        self._streams, self._events = streams, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._streams.entered() as ended:
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_HEADERS})
            watchers = [asyncio.create_task(ended.wait()), asyncio.create_task(_left(receive))]
            sending = asyncio.create_task(self._send(send))
            try:
                await asyncio.wait([*watchers, sending], return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*watchers, sending):
                    task.cancel()
                await asyncio.gather(*watchers, sending, return_exceptions=True)
            with contextlib.suppress(OSError):
                await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send) -> None:
        news: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=64)

        async def gather() -> None:
            try:
                async with contextlib.aclosing(self._events()) as events:  # type: ignore[type-var]
                    async for one in events:
                        await news.put(one)
            except Exception:  # a reader that is told nothing would wait for ever
                traceback.print_exc(file=sys.stderr)
                await news.put(event("failed", {"error": FAILURE}))
            await news.put(None)

        gathering = asyncio.create_task(gather())
        try:
            await send({"type": "http.response.body", "body": b"retry: 3000\n\n", "more_body": True})
            while True:
                try:
                    async with asyncio.timeout(BEAT):
                        one = await news.get()
                except TimeoutError:
                    one = b": alive\n\n"
                if one is None:
                    return
                await send({"type": "http.response.body", "body": one, "more_body": True})
        finally:
            gathering.cancel()
            await asyncio.gather(gathering, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PageRun:
    """One training run: its rows so far, and whether it goes on."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.id = secrets.token_hex(8)
        self.settings = settings
        self.events: list[tuple[str, dict[str, Any]]] = [("waiting", {"settings": settings})]
        self.over = False
        self.changed = asyncio.Condition()
        self.task: asyncio.Task[None] | None = None

    async def add(self, name: str, document: dict[str, Any], over: bool = False) -> None:
        async with self.changed:
            self.events.append((name, document))
            self.over = self.over or over
            self.changed.notify_all()

    async def follow(self) -> AsyncIterator[bytes]:
        """All events from the first one, until the run is over."""
        sent = 0
        while True:
            async with self.changed:
                while len(self.events) <= sent and not self.over:
                    await self.changed.wait()
            for name, document in self.events[sent:]:
                sent += 1
                yield event(name, document, sent)
            if self.over and sent == len(self.events):
                return


class PageRuns:
    """The last runs. One trains at a time; another one waits in the worker, after it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
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
        if run.over or run.task is None:
            return
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        if not run.over:
            await run.add("cancelled", {}, over=True)

    async def _train(self, run: PageRun) -> None:
        try:
            async with contextlib.aclosing(self._desk.stream("run", limited=False, **run.settings)) as frames:
                async for frame in frames:
                    await run.add("row", frame.document())
            await run.add("ended", {}, over=True)
        except Denied as denied:
            await run.add("failed", {"error": denied.says}, over=True)

    async def close(self) -> None:
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
