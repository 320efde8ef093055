"""A running server for the tests: in a thread of this process, with a worker of its own or a stub."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from attemper_lab.page.server.serve import Bound, StoppableServer, bind, server
from page.stub_worker import Stub

PATIENCE = 60.0
"""Seconds for what comes at once: a machine may do other work. What never comes takes longer."""


class Running:
    """A server that answers: its address, its token, and how to ask it."""

    def __init__(self, bound: Bound, running: StoppableServer) -> None:
        self.bound, self.server = bound, running
        self.host, self.token = bound.hosts[0], bound.token
        self.port = int(self.host.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: Any = None, token: bool = True, timeout: float = PATIENCE, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content. `body` is sent as JSON, bytes as they are; `Host=None` leaves a header out."""
        sent: dict[str, str | None] = {"Host": self.host}
        if token:
            sent["Authorization"] = f"Bearer {self.token}"
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        if content is not None:
            sent |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in sent.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders()
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # a body that was refused before it was read
                if content is not None:
                    connection.send(content)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            try:
                return answer.status, found, answer.read()
            except (ConnectionResetError, http.client.IncompleteRead):  # closed with our body unread
                return answer.status, found, b""


@contextlib.contextmanager
def serving(stub: bool = True, **options: Any) -> Iterator[Running]:
    """A server in a thread; `stub`: computations are those of stub_worker.py, which needs no torch."""
    bound = bind()
    running = server(bound, **options)
    if stub:
        running.served.worker.computing = Stub
    thread = threading.Thread(target=running.run, kwargs={"sockets": [bound.socket]}, daemon=True)
    thread.start()
    until = time.monotonic() + PATIENCE
    while not running.started:
        assert time.monotonic() < until
        time.sleep(0.01)
    try:
        yield Running(bound, running)
    finally:
        running.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
