"""The process that computes for the page: the model's heads and flow, and training runs. WorkerClient asks it.

A computation in the server's own process could not be stopped when it takes too long or when Ctrl-C comes. The worker does one
computation at a time, and a training run one row at a time, so other requests come between two rows. A computation that exceeds
its time limit ends the worker; the next one starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from attemper.errors import AttemperError, InputError, MissingExtra
from attemper.extension.files import json_text
from attemper.extension.tools import out_of_memory

from . import limits
from .guard import Denied

CACHED_TEXTS = 4
OK = 200
RETRY = "Try again in a moment."
WORKER_ENDED = f"The computing process ended. {RETRY}"
OF_MODEL = ("first", "heads", "logits", "flow")
Answer = tuple[int, bytes]
"""A status of HTTP, and the result; for every status but OK a sentence that says what went wrong."""


class Computing:
    """What the worker can do. It loads the model when the model is first needed, and keeps it."""

    def __init__(self, model: str | None) -> None:
        self._name = model
        self._model: Any = None
        self._heads: OrderedDict[str, Any] = OrderedDict()
        self._rows: Iterator[dict[str, Any]] | None = None

    def load(self) -> bytes:
        if self._model is None:
            from attemper.extension.inputs import load

            self._model = load(self._name)
        return b""

    def first(self) -> bytes:
        """Read the sentence that the page begins with, before it is asked for."""
        from ..data.embedded import TEXTS

        self._read(TEXTS[0])
        return b""

    def heads(self, text: str) -> bytes:
        """The document of a text's heads, as JSON."""
        return json_text(self._read(text).document()).encode()

    def logits(self, text: str, layer: int, head: int) -> bytes:
        """The logits of one head, as float32."""
        return bytes(self._read(text).logits(layer, head).astype("<f4", copy=False).tobytes())

    def flow(self, text: str, layer: int, head: int) -> bytes:
        """Every step of one head on a text, as JSON."""
        from ..data.flow import read_flow

        return json_text(read_flow(self._model, text, layer, head)).encode()

    def begin_run(self, **settings: Any) -> bytes:
        """Begin a training run in place of the one before."""
        from ..data.training import training_rows

        self._rows = training_rows(**settings)
        return b""

    def next_row(self) -> bytes:
        """The next row of the run, as JSON; empty when the run is over."""
        if self._rows is None:  # this worker was started in place of the one that trained
            raise InputError(WORKER_ENDED)
        row = next(self._rows, None)
        return b"" if row is None else json_text(row).encode()

    def _read(self, text: str) -> Any:
        from ..data.heads import read_heads

        if text not in self._heads:
            self._heads[text] = read_heads(self._model, text)
            while len(self._heads) > CACHED_TEXTS:
                self._heads.popitem(last=False)
        return self._heads[text]


class WorkerClient:
    """Asks the worker, from the server's process.

    Example:
        worker = WorkerClient(None)
        document = await worker.ask("heads", text="the dog sat")
    """

    def __init__(self, model: str | None, computing: Callable[[str | None], Any] = Computing) -> None:
        self.computing = computing
        self._model = model
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._closed = False

    def start(self) -> Connection:
        """The pipe to the worker, which is started if it does not run."""
        if self._closed:
            raise Denied(503, WORKER_ENDED)
        if self._pipe is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, theirs = spawn.Pipe()
            self._process = spawn.Process(target=work, args=(theirs, self.computing, self._model), daemon=True)
            with _no_interrupts():
                self._process.start()
            theirs.close()  # so that the end of the worker is the end of the pipe
        return self._pipe

    async def ask(self, what: str, **arguments: Any) -> bytes:
        """A computation that must begin and end within its time limits."""
        if self._waiting >= limits.WAITING:
            raise Denied(503, f"{self._waiting} computations are waiting already; one is done at a time. {RETRY}")
        self._waiting += 1
        try:
            return await self._in_turn(what, arguments, limits.PATIENCE, limits.COMPUTING)
        finally:
            self._waiting -= 1

    async def prepare(self) -> None:
        """Read the page's first sentence before anybody asks for it; who asks after a failure is told why."""
        with contextlib.suppress(Denied):
            await self._in_turn("first", {}, limit=limits.COMPUTING)

    async def run(self, settings: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The rows of a training run as they come, without a time limit."""
        await self._in_turn("begin_run", settings)
        while row := await self._in_turn("next_row", {}):
            yield json.loads(row)

    async def _in_turn(
        self, what: str, arguments: dict[str, Any], patience: float | None = None, limit: float | None = None
    ) -> bytes:
        try:
            async with asyncio.timeout(patience):
                await self._turn.acquire()
        except TimeoutError:
            raise Denied(503, f"This computation waited {patience:.0f} s for its turn. {RETRY}") from None
        # the worker goes on when whoever asked leaves, so it is the task that gives the turn back
        computation = asyncio.create_task(self._compute(what, arguments, limit))
        computation.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(computation)

    async def _compute(self, what: str, arguments: dict[str, Any], limit: float | None) -> bytes:
        if what in OF_MODEL:
            await self._exchange("load", {})  # its time is not the computation's
        try:
            async with asyncio.timeout(limit):
                return await self._exchange(what, arguments)
        except TimeoutError:
            self.kill()
            raise Denied(
                504, f"The computation took more than {limit:.0f} s and was stopped. Use a shorter text."
            ) from None

    async def _exchange(self, what: str, arguments: dict[str, Any]) -> bytes:
        pipe = self.start()
        try:
            pipe.send((what, arguments))
            status, content = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            if pipe is self._pipe:
                self.kill()
            raise Denied(503, WORKER_ENDED) from None
        if status != OK:
            raise Denied(status, content.decode())
        return bytes(content)

    def kill(self) -> None:
        """End the worker now, whatever it does; the next computation starts another."""
        if self._process is not None:
            self._process.kill()
        self._process = self._pipe = None

    def close(self) -> None:
        """End the worker for good."""
        self._closed = True
        self.kill()


@contextlib.contextmanager
def _no_interrupts() -> Iterator[None]:
    """A process that is started here never sees Ctrl-C, which reaches every process of a terminal: the server ends its worker."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # starting it unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def work(pipe: Connection, computing: Callable[[str | None], Any], model: str | None) -> None:
    """In the worker: answer what comes through the pipe, until the server ends."""
    os.dup2(2, 1)  # what others print goes to stderr: stdout has the address alone
    threading.Thread(target=_end_with_server, daemon=True).start()
    computes = computing(model)
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, arguments = pipe.recv()
            pipe.send(answer(computes, what, arguments))


def _end_with_server() -> None:
    server = multiprocessing.parent_process()
    assert server is not None
    server.join()
    os._exit(0)


def answer(computing: Any, what: str, arguments: dict[str, Any]) -> Answer:
    """A computation's result. Errors that a user can do something about become their sentence; others go to the terminal."""
    try:
        return OK, getattr(computing, what)(**arguments)
    except AttemperError as error:
        return 501 if isinstance(error, MissingExtra) else 422, without_folders(str(error)).encode()
    except Exception as error:
        if out_of_memory(error):
            return 507, b"There is not enough memory for this. Use a shorter text."
        traceback.print_exc(file=sys.stderr)
        return 500, b"The computation failed. The terminal of the server shows why."


QUOTED_PATH = re.compile(
    r"""(?P<quote>['"])(?:(?!(?P=quote)).)*[/\\](?P<name>(?:(?!(?P=quote))[^/\\])+)[/\\]?(?P=quote)"""
)


def without_folders(sentence: str) -> str:
    """A sentence whose quoted paths are cut to their last name: a browser learns nothing of the disk."""
    return QUOTED_PATH.sub(r"\g<quote>\g<name>\g<quote>", sentence)
