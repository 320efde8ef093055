"""make(): the application with the guard around its routes. Errors leave it as sentences that quote neither paths nor inputs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from attemper import __version__

from . import files
from .events import PageRuns, Streams
from .guard import Denied, Guard
from .record import FollowedRecord
from .routes import REFUSALS, add_routes
from .worker import WorkerClient

NOT_JSON = "The body is not JSON that can be read."
STATUSES = {
    404: "There is nothing under this address.",
    405: "This address does not take that method.",
    400: NOT_JSON,
}


@dataclass
class Served:
    """A server before it listens: the guarded application, the routes inside it, and what ends with it."""

    guarded: Guard
    inner: FastAPI
    worker: WorkerClient
    streams: Streams


def make(hosts: list[str], token: str, model: str | None = None, record: FollowedRecord | None = None) -> Served:
    """The application.

    Args:
        hosts: the names and the port under which it answers, as ``127.0.0.1:7862``; the first one's port names the cookie.
        token: the secret of this run.
        model: as ``attemper scan`` takes it; None is the embedded MiniLM.
        record: the record that is followed.
    """
    worker, streams = WorkerClient(model), Streams()
    runs = PageRuns(worker)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()  # it starts while the page opens
        for path in files.FILES:
            files.content(path, packed=True)
        # the model reads the first sentence while a person reads the first page; a record is followed beside a training
        first = None if record else asyncio.create_task(worker.prepare())
        try:
            yield
        finally:
            if first:
                first.cancel()
            streams.end()
            worker.close()
            await runs.close()

    inner = FastAPI(
        title="attemper serve",
        version=__version__,
        openapi_url=None,  # and so no page that shows the schema
        redirect_slashes=False,
        responses=REFUSALS,
        lifespan=lifespan,
    )
    about = {
        "version": __version__,
        "model": model and model.rstrip("/\\").replace("\\", "/").rpartition("/")[2],
        "record": record and record.name,
    }
    add_routes(inner, worker, runs, streams, record, about)
    for error, answer in ((Denied, _denied), (RequestValidationError, _invalid), (HTTPException, _status)):
        inner.add_exception_handler(error, answer)  # type: ignore[arg-type]
    cookie = f"attemper-{hosts[0].rpartition(':')[2]}"
    return Served(Guard(inner, hosts, token, cookie), inner, worker, streams)


async def _denied(request: Request, error: Denied) -> JSONResponse:
    headers = {"retry-after": "2"} if error.status == 503 else None
    return JSONResponse({"error": error.says}, error.status, headers)


async def _status(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"error": STATUSES.get(error.status_code, "The request was refused.")}, error.status_code)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """Name the fields and the rule that each breaks, but never quote what was sent."""
    return JSONResponse({"error": "; ".join(map(_broken_rule, error.errors()[:5]))}, 422)


def _broken_rule(error: dict[str, Any]) -> str:
    if error["type"] == "json_invalid":
        return NOT_JSON
    name = ".".join(str(part) for part in error["loc"][1:] if str(part).isidentifier() or isinstance(part, int))
    if error["type"] == "string_too_long":
        return f"{name[:80] or 'the body'} is longer than {error['ctx']['max_length']} characters. Send less."
    return f"{name[:80] or 'the body'}: {error['msg']}"
