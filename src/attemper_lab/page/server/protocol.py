"""TimedProtocol: uvicorn's HTTP/1.1 with a time limit for the head of a request.

uvicorn closes idle connections, but it has no time limit for a head that has begun: a client that sends one byte by byte would
hold a connection for ever. Requests that uvicorn refuses before the guard sees them get the guard's headers all the same.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from . import limits
from .guard import refusal


class TimedProtocol(H11Protocol):
    """Closes a connection whose next request has not arrived within ``limits.ARRIVAL`` seconds."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > limits.CONNECTIONS:
            self._refuse(503, "Too many connections are open. Try again in a moment.")
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "This is not HTTP/1.1 as the server reads it.")

    def _refuse(self, status: int, says: str) -> None:
        answer = refusal(status, says)
        head = h11.Response(status_code=status, headers=answer.raw_headers)
        try:
            for part in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(part) or b"")
        except h11.LocalProtocolError:
            pass  # an answer is under way
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Start the timer when the server waits for a head; more bytes of the head do not restart it."""
        awaited = self.cycle is None or self.cycle.response_complete
        if not awaited and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif awaited and self._deadline is None:
            self._deadline = self.loop.call_later(limits.ARRIVAL, self._late)

    def _late(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
