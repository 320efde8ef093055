"""Guard: the outermost layer of the server. It denies every request that it does not recognise, so no route can forget a check.

A page of another site can send requests to a port of this machine, and a name that it owns can be made to point here (DNS
rebinding). So a request must name our address and port as its Host, must not come from another origin, and must carry the token
of this run: once in the address that `attemper serve` prints, then as a cookie that no other site's request carries, and no other
port's server gets, since it belongs to a path that is secret too. Names and tokens are compared whole. Every answer, of whatever
status, carries the same security headers.
"""

from __future__ import annotations

import asyncio
import html
import secrets
import sys
import traceback
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import limits

METHODS = ("GET", "POST", "DELETE")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
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
ICON = '<link rel="icon" href="data:,">'  # without an icon, browsers ask for one
DARK = '<meta name="color-scheme" content="light dark">'
AGAIN = "This address has no token of this run: the server was started again, or this is another browser."
OPEN_IT = "Open the address that `attemper serve` printed, by typing it or pasting it into the browser."


class Denied(Exception):
    """A request is refused: the status, and a sentence that says why."""

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

    def __init__(self, app: ASGIApp, hosts: Iterable[str], token: str, cookie: str) -> None:
        self.app, self.hosts, self.token, self.cookie = app, frozenset(hosts), token, cookie
        # a browser sends the cookie to every port of 127.0.0.1, but only below this path, which nobody else knows
        self.home = f"/{secrets.token_urlsafe(16)}"
        self._tickets: set[str] = set()

    def ticket(self) -> str:
        """Opens the page once in place of the token, since the users of this machine can read a browser's command line."""
        ticket = secrets.token_urlsafe(32)
        self._tickets.add(ticket)
        return ticket

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
            headers = _headers(scope)
            if scope["path"].startswith(f"{self.home}/"):
                scope = {**scope, "path": scope["path"].removeprefix(self.home), "raw_path": b""}
            self._check_origin(scope, headers)
            if scope["path"] == "/" and scope["query_string"]:
                await self._enter(scope)(scope, receive, protected)
                return
            self._check_token(headers)
            _check_request(scope, headers)
            body = await _body(receive, headers)
            await self.app(scope, _replayed(body, receive), protected)
        except Denied as denied:
            if not begun:
                await refusal(denied.status, denied.says, as_page=_is_opened(scope))(scope, receive, protected)
        except Exception:
            traceback.print_exc(file=sys.stderr)  # for the terminal of the server alone
            if begun:
                raise
            failure = refusal(500, "The server failed. Its terminal shows why; reload the page to go on.")
            await failure(scope, receive, protected)

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            raise Denied(421, f"This server does not answer under that name. {OPEN_IT}{self._over_ssh()}")
        origins = headers.getlist("origin")
        if origins and origins != [f"http://{hosts[0]}"]:
            raise Denied(403, "Requests from other sites are refused.")
        allowed = ("same-origin", "none") if scope["path"] == "/" else ("same-origin",)
        for site in headers.getlist("sec-fetch-site"):
            if site not in allowed:
                said = AGAIN if site == "none" else "Requests from other sites are refused."
                raise Denied(403, f"{said} {OPEN_IT}")
        if scope["method"] not in METHODS:
            raise Denied(405, "Only GET, POST and DELETE are known here.")

    def _over_ssh(self) -> str:
        """How to forward the port: under another one, the browser asks for a name that is not in `hosts`."""
        ports = [host.removeprefix("localhost:") for host in self.hosts if host.startswith("localhost:")]
        return f" Over ssh, forward the same port: ssh -L {ports[0]}:127.0.0.1:{ports[0]} MACHINE." if ports else ""

    def _enter(self, scope: Scope) -> RedirectResponse:
        """The token in the address becomes a cookie, and the address loses it."""
        if scope["method"] != "GET":
            raise Denied(405, "The page is read by GET.")
        name, _, given = scope["query_string"].decode("latin-1").partition("=")
        if name != "token" or not (self._is_token(given) or given in self._tickets):
            raise Denied(403, f"The token in this address is not that of this run. {OPEN_IT}")
        self._tickets.discard(given)
        cookie = f"{self.cookie}={self.token}; Path={self.home}/; HttpOnly; SameSite=Strict"
        return RedirectResponse(f"{self.home}/", 303, {"set-cookie": cookie})

    def _check_token(self, headers: Headers) -> None:
        bearers = [value[7:] for value in headers.getlist("authorization") if value[:7].lower() == "bearer "]
        pairs = [pair.strip().partition("=") for value in headers.getlist("cookie") for pair in value.split(";")]
        cookies = [value for name, _, value in pairs if name == self.cookie]
        if not any(self._is_token(given) for given in (*bearers, *cookies)):
            raise Denied(403, f"{AGAIN} {OPEN_IT}")

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def _headers(scope: Scope) -> Headers:
    sizes = (len(name) + len(value) for name, value in scope["headers"])
    if len(scope["path"]) + len(scope["query_string"]) + sum(sizes) > limits.HEAD:
        raise Denied(431, f"Address and headers may have {limits.HEAD // 1024} KB at most.")
    return Headers(scope=scope)


def _check_request(scope: Scope, headers: Headers) -> None:
    """Check the rules of every route: no query, a JSON body, and a length that is a number within the limit."""
    if scope["query_string"]:
        raise Denied(400, "Addresses take no query here.")
    kinds = [kind.partition(";")[0].strip().lower() for kind in headers.getlist("content-type")]
    if scope["method"] == "POST" and kinds != ["application/json"]:
        raise Denied(415, "The body must be JSON: send Content-Type: application/json.")
    for length in headers.getlist("content-length"):
        if not length.isdecimal() or int(length[:20]) > limits.BODY:
            raise Denied(413, f"A request's body may have {limits.BODY // 1024} KB at most.")


async def _body(receive: Receive, headers: Headers) -> bytes:
    """The whole body. It must arrive in time and within its limit, whatever Content-Length says."""
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
    """Give the application the body at once, then pass on what comes after it: the end of the connection."""
    bodies = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        return next(bodies, None) or await receive()

    return replayed


def _secured(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Replace an answer's security headers by the guard's."""
    ours = {name.encode(): value.encode() for name, value in HEADERS.items()}
    dropped = {*ours, b"server"}
    own = [(name.lower(), value) for name, value in headers]
    kept = [(name, value) for name, value in own if name not in dropped and not name.startswith(b"access-control-")]
    return kept + list(ours.items())


def _is_opened(scope: Scope) -> bool:
    """Whether a browser opens this address, and shows its answer to a person."""
    accepted = [value for name, value in scope["headers"] if name == b"accept"]
    return scope["method"] == "GET" and any(b"text/html" in value for value in accepted)


def refusal(status: int, says: str, as_page: bool = False) -> Response:
    """A refusal as JSON, or as a page for a person, with the security headers."""
    close = {"connection": "close"}
    answer: Response = JSONResponse({"error": says}, status, close)
    if as_page:
        words = f"<h1>attemper does not open this page</h1><p>{html.escape(says)}</p>"
        answer = HTMLResponse(
            f"<!doctype html><html lang=en><title>attemper</title>{ICON}{DARK}{words}</html>", status, close
        )
    answer.raw_headers = _secured(answer.raw_headers)
    return answer
