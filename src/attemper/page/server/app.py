"""make(): the application, the guard around its routes; errors leave it as sentences, without a path or an input in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ... import __version__
from . import files
from .events import PageRuns, Streams
from .guard import Denied, Guard
from .record import FollowedRecord
from .routes import REFUSED, add_routes
from .work import Desk

STATUSES = {
    404: "There is nothing under this address.",
    405: "This address does not take that method.",
    400: "The body is not JSON that can be read.",
}


@dataclass
class Served:
    """A server before it listens: the guarded application, the routes inside it, and what must be ended with it."""

    guarded: Guard
    inner: FastAPI
    desk: Desk
    streams: Streams = field(default_factory=Streams)


def make(
    hosts: list[str],
    token: str,
    model: str | None = None,
    record: FollowedRecord | None = None,
) -> Served:
    """The application.

    Args:
        hosts: the names and the port under which it answers, as ``127.0.0.1:7862``; the first one's port names the cookie.
        token: the secret of this run.
        model: as ``attemper scan`` takes it; None is the embedded MiniLM.
        record: the record that is followed.
    """
    desk, streams = Desk(model), Streams()
    runs = PageRuns(desk)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await desk.start()  # it loads while the page opens
        for ready in (files.page, files.served, files.data):
            ready()
        try:
            yield
        finally:
            streams.end()
            await runs.close()
            await desk.close()

    inner = FastAPI(
        title="attemper serve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        responses=REFUSED,
        lifespan=lifespan,
    )
    about = {
        "version": __version__,
        "model": model and model.rstrip("/\\").replace("\\", "/").rpartition("/")[2],
        "record": record and record.name,
    }
    add_routes(inner, desk, runs, streams, record, about)
    inner.add_exception_handler(Denied, _denied)  # type: ignore[arg-type]
    inner.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    inner.add_exception_handler(HTTPException, _status)  # type: ignore[arg-type]
    cookie = f"attemper-{hosts[0].rpartition(':')[2]}"
    return Served(Guard(inner, hosts, token, cookie), inner, desk, streams)


async def _denied(request: Request, error: Denied) -> JSONResponse:
    headers = {"retry-after": "2"} if error.status == 503 else None
    return JSONResponse({"error": error.says}, error.status, headers)


async def _status(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"error": STATUSES.get(error.status_code, "The request was refused.")}, error.status_code)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """Which fields, and which rule each breaks; never what was sent."""
    return JSONResponse({"error": "; ".join(_broken_rule(one) for one in error.errors()[:5])}, 422)


def _broken_rule(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return "The body is not JSON that can be read."
    name = ".".join(str(part) for part in error["loc"][1:] if str(part).isidentifier() or isinstance(part, int))
    if error["type"] == "string_too_long":
        return f"{name[:80] or 'the body'} is longer than {error['ctx']['max_length']} characters. Send less."
    return f"{name[:80] or 'the body'}: {error['msg']}"
