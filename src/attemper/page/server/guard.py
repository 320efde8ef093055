"""Guard: the outermost layer of the server. It denies every request that it does not recognise, so no route can forget a check.

A page of another site can send requests to a port of this machine, and a name that it owns can be made to point here (DNS
rebinding). So a request must name our address and port as its Host, must not come from another origin, and must carry the token
of this run: once in the address that `attemper serve` prints, then as a cookie that no other site's request carries. Names and
tokens are compared whole. Every answer, of whatever status, carries the same security headers.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from . import limits

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

METHODS = ("GET", "POST", "DELETE")
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), usb=()",
    "cache-control": "no-store",
}
OPEN_IT = "Open the address that `attemper serve` printed, by typing it or pasting it into the browser."


class Denied(Exception):
    """A request that goes no further: its status, and a sentence."""

    def __init__(self, status: int, says: str) -> None:
        super().__init__(says)
        self.status, self.says = status, says


class Guard:
    """Wraps an ASGI application.

    Args:
        app: what is guarded.
        hosts: the names, with their port, under which the server answers.
        token: the secret of this run.
        cookie: the name of the cookie that carries it.
    """

    def __init__(self, app: App, hosts: Iterable[str], token: str, cookie: str) -> None:
        self.app, self.hosts, self.token, self.cookie = app, frozenset(hosts), token, cookie
        self._tickets: set[str] = set()

    def ticket(self) -> str:
        """What opens the page once in place of the token: a browser's command line can be read by the users of this machine."""
        found = secrets.token_urlsafe(32)
        self._tickets.add(found)
        return found

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise ValueError("the server speaks HTTP alone")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def protected(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = _secured(message.get("headers", ()))
            await send(message)

        try:
            headers = _read(scope)
            self._check_origin(scope, headers)
            if scope["path"] == "/" and scope["query_string"]:
                await self._enter(scope, headers, protected)
                return
            self._check_token(headers)
            _check_request(scope, headers)
            body = await _body(receive, headers)
            await self.app(scope, _replayed(body, receive), protected)
        except Denied as denied:
            if not begun:
                await answer(protected, denied.status, denied.says)
        except Exception:
            traceback.print_exc(file=sys.stderr)  # for who runs the server; the browser learns nothing of it
            if begun:
                raise
            await answer(protected, 500, "The server failed. Its terminal shows why; reload the page to go on.")

    def _check_origin(self, scope: Scope, headers: dict[str, list[str]]) -> None:
        hosts = headers.get("host", [])
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            raise Denied(421, f"This server does not answer under that name. {OPEN_IT}")
        origins = headers.get("origin", [])
        if origins and origins != [f"http://{hosts[0]}"]:
            raise Denied(403, "Requests from other sites are refused.")
        allowed = ("same-origin", "none") if scope["path"] == "/" else ("same-origin",)
        if any(site not in allowed for site in headers.get("sec-fetch-site", [])):
            raise Denied(403, f"Requests from other sites are refused. {OPEN_IT}")
        if scope["method"] not in METHODS:
            raise Denied(405, "Only GET, POST and DELETE are known here.")

    async def _enter(self, scope: Scope, headers: dict[str, list[str]], send: Send) -> None:
        """The token in the address becomes a cookie, and the address loses it."""
        if scope["method"] != "GET":
            raise Denied(405, "The page is read by GET.")
        name, _, given = scope["query_string"].decode("latin-1").partition("=")
        if name != "token" or not (self._is_token(given) or given in self._tickets):
            raise Denied(403, f"The token in this address is not that of this run. {OPEN_IT}")
        self._tickets.discard(given)
        cookie = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
        location = [(b"location", b"/"), (b"set-cookie", cookie.encode()), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 303, "headers": location})
        await send({"type": "http.response.body", "body": b""})

    def _check_token(self, headers: dict[str, list[str]]) -> None:
        bearers = [value[7:] for value in headers.get("authorization", []) if value[:7].lower() == "bearer "]
        pairs = [pair.strip().partition("=") for value in headers.get("cookie", []) for pair in value.split(";")]
        cookies = [value for name, _, value in pairs if name == self.cookie]
        if not any(self._is_token(given) for given in (*bearers, *cookies)):
            raise Denied(403, f"This request carries no token of this run. {OPEN_IT}")

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def _read(scope: Scope) -> dict[str, list[str]]:
    size = (
        len(scope["path"])
        + len(scope["query_string"])
        + sum(len(name) + len(value) for name, value in scope["headers"])
    )
    if size > limits.HEAD:
        raise Denied(431, f"Address and headers may have {limits.HEAD // 1024} KB at most.")
    found: dict[str, list[str]] = {}
    for name, value in scope["headers"]:
        found.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
    return found


def _check_request(scope: Scope, headers: dict[str, list[str]]) -> None:
    """What holds for every route: no queries, JSON bodies, a length that is a length."""
    if scope["query_string"]:
        raise Denied(400, "Addresses take no query here.")
    kinds = [kind.partition(";")[0].strip().lower() for kind in headers.get("content-type", [])]
    if scope["method"] == "POST" and kinds != ["application/json"]:
        raise Denied(415, "The body must be JSON: send Content-Type: application/json.")
    for length in headers.get("content-length", []):
        if not length.isdecimal() or int(length[:20]) > limits.BODY:
            raise Denied(413, f"A request's body may have {limits.BODY // 1024} KB at most.")


async def _body(receive: Receive, headers: dict[str, list[str]]) -> bytes:
    """The whole body, which must arrive in time and within its limit, whatever length was announced."""
    if "content-length" not in headers and "transfer-encoding" not in headers:
        return b""
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.ARRIVAL):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Denied(400, "The connection was closed before the body was complete.")
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limits.BODY:
                    raise Denied(413, f"A request's body may have {limits.BODY // 1024} KB at most.")
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise Denied(408, f"The body must arrive within {limits.ARRIVAL:.0f} seconds.") from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """For the application: the body at once, then whatever comes, which is the end of the connection."""
    told = False

    async def again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _secured(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The answer's own headers, without those that the guard decides on, and with the guard's."""
    ours = {name.encode() for name in HEADERS}
    kept = [
        (name, value)
        for name, value in headers
        if name.lower() not in ours and name.lower() != b"server" and not name.lower().startswith(b"access-control-")
    ]
    return kept + [(name.encode(), value.encode()) for name, value in HEADERS.items()]


def refusal(says: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
    """A refusal as JSON: its headers, and its content."""
    content = json.dumps({"error": says}, ensure_ascii=False).encode()
    kind = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    return _secured([*kind, (b"connection", b"close")]), content


async def answer(send: Send, status: int, says: str) -> None:
    """Send a refusal."""
    headers, content = refusal(says)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
