"""The process that computes for the page: the model's heads and flow, and training runs. Started by work.py, ends with it.

`python -m attemper.page.server.worker [MODEL]` reads a request per line from stdin: ``{"job": 1, "do": "heads", "text": …}`` or
``{"cancel": 1}``. It answers on stdout: a line ``{"job", "kind", "bytes"}``, then that many bytes. Requests are done in order; a
run goes on when nothing else waits.
"""

from __future__ import annotations

import json
import os
import queue
import re
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from ..._files import json_text
from ...errors import AttemperError, MissingExtra, out_of_memory

BEGUN, ENDED, FAILED = "begun", "ended", "failed"  # kinds of answers; a result is "json", "floats" or "event"
KEPT = 4  # texts whose heads are kept
Result = tuple[str, bytes]  # the kind of an answer, and its content


class Computing:
    """What the worker can do; the model is loaded when it is first needed, and kept."""

    def __init__(self, model: str | None) -> None:
        self._name = model
        self._model: Any = None
        self._heads: OrderedDict[str, Any] = OrderedDict()

    def load(self) -> None:
        """Load the model, where it is not here yet."""
        if self._model is None:
            from ...scan.input.model import load

            self._model = load(self._name)

    def heads(self, text: str) -> Result:
        """The document of a text's heads."""
        return "json", json_text(self._read(text).document()).encode()

    def logits(self, text: str, layer: int, head: int) -> Result:
        """The logits of one head, as float32."""
        return "floats", self._read(text).logits(layer, head).astype("<f4", copy=False).tobytes()

    def flow(self, text: str, layer: int, head: int) -> Result:
        """Every step of one head on a text."""
        from ..data.flow import read_flow

        return "json", json_text(read_flow(self._model, text, layer, head)).encode()

    def run(self, **settings: Any) -> Iterator[Result]:
        """A training run: an event for each row."""
        from ..data.training import training_rows

        for row in training_rows(**settings):
            yield "event", json_text(row).encode()

    def _read(self, text: str) -> Any:
        from ..data.heads import read_heads

        if text not in self._heads:
            self._heads[text] = read_heads(self._model, text)
            while len(self._heads) > KEPT:
                self._heads.popitem(last=False)
        return self._heads[text]


QUOTED_PATH = re.compile(
    r"""(?P<quote>['"])(?:(?!(?P=quote)).)*[/\\](?P<name>(?:(?!(?P=quote))[^/\\])+)[/\\]?(?P=quote)"""
)


def without_folders(says: str) -> str:
    """A sentence in which quoted paths are names alone: a browser learns nothing of the disk."""
    return QUOTED_PATH.sub(r"\g<quote>\g<name>\g<quote>", says)


class Worker:
    """Takes requests from a queue that a thread fills, and answers them one at a time."""

    def __init__(self, computing: Computing, answers: BinaryIO) -> None:
        self._computing, self._answers = computing, answers
        self._asked: queue.Queue[dict[str, Any]] = queue.Queue()
        self._cancelled: set[int] = set()
        self._runs: OrderedDict[int, Iterator[Result]] = OrderedDict()

    def listen(self, requests: BinaryIO) -> None:
        """In a thread: sort what is asked. The end of the requests is the end of the process, at once."""
        for line in requests:
            asked = json.loads(line)
            if "cancel" in asked:
                self._cancelled.add(asked["cancel"])
            self._asked.put(asked)
        os._exit(0)

    def work(self) -> None:
        while True:
            try:
                asked = self._asked.get(block=not self._runs)
            except queue.Empty:
                self._advance()
                continue
            if "cancel" in asked:
                self._cancelled.discard(asked["cancel"])
                self._runs.pop(asked["cancel"], None)
            elif asked["job"] not in self._cancelled:
                self._do(asked.pop("job"), asked.pop("do"), asked)

    def _do(self, job: int, what: str, arguments: dict[str, Any]) -> None:
        if what == "run":
            self._answer(job, BEGUN, b"")
            self._runs[job] = self._computing.run(**arguments)
            return
        compute: Callable[..., Result] = getattr(self._computing, what)

        def whole() -> None:
            self._computing.load()  # its time is not the computation's
            self._answer(job, BEGUN, b"")
            self._answer(job, *compute(**arguments))

        self._attempt(job, whole, last=True)

    def _advance(self) -> None:
        """The next row of the run that began first."""
        job, rows = next(iter(self._runs.items()))

        def step() -> None:
            row = next(rows, None)
            if row is None:
                self._answer(job, ENDED, b"")
                del self._runs[job]
            else:
                self._answer(job, *row)

        self._attempt(job, step)

    def _attempt(self, job: int, action: Callable[[], None], last: bool = False) -> None:
        """Errors that a user can do something about become their sentence; the others are for the terminal."""
        try:
            action()
            if last:
                self._answer(job, ENDED, b"")
            return
        except AttemperError as error:
            status, says = 501 if isinstance(error, MissingExtra) else 422, without_folders(str(error))
        except Exception as error:
            if out_of_memory(error):
                status, says = 507, "There is not enough memory for this. Use a shorter text."
            else:
                traceback.print_exc(file=sys.stderr)
                status, says = 500, "The computation failed. The terminal of the server shows why."
        self._runs.pop(job, None)
        self._answer(job, FAILED, json.dumps({"status": status, "says": says}).encode())

    def _answer(self, job: int, kind: str, content: bytes) -> None:
        head = {"job": job, "kind": kind, "bytes": len(content)}
        self._answers.write(json.dumps(head).encode() + b"\n" + content)
        self._answers.flush()


def main(arguments: list[str]) -> None:
    """Answer on what was stdout; what others print goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    worker = Worker(Computing(arguments[0] if arguments else None), answers)
    threading.Thread(target=worker.listen, args=(sys.stdin.buffer,), daemon=True).start()
    worker.work()


if __name__ == "__main__":
    main(sys.argv[1:])
