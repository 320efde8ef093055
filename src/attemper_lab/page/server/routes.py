"""The routes that a page can ask for. Bodies have bounds; paths name a module or a run, never a file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from attemper import RULES

from . import files, limits
from .events import EventStream, PageRuns, Streams
from .guard import Denied
from .record import FollowedRecord
from .worker import WorkerClient

# the body of a refusal is JSON, whatever the route answers otherwise
_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": _ERROR}}}
    for status in (400, 403, 404, 405, 408, 413, 415, 422, 500, 501, 503, 504)
}

RunRule = Literal["sqrt_dk", "none", "dk", "qk_norm", "learned", "softcap"]
assert set(RunRule.__args__) <= set(RULES)  # type: ignore[attr-defined]


class JSON(Response):
    """JSON that is written already."""

    media_type = "application/json"


class Floats(Response):
    """float32, little endian."""

    media_type = "application/octet-stream"


class Body(BaseModel):
    """The rules for every body: no other fields, no text in place of a number, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sentence(Body):
    """A sentence for the model."""

    text: Annotated[str, Field(min_length=1, max_length=limits.TEXT)]


class HeadOfSentence(Sentence):
    """One head on a sentence."""

    layer: Annotated[int, Field(ge=0, lt=limits.LAYERS)]
    head: Annotated[int, Field(ge=0, lt=limits.HEADS)]


class RunSettings(Body):
    """A training run under each of the rules in turn, on the same data from the same initial weights."""

    rules: Annotated[list[RunRule], Field(min_length=1, max_length=3)]
    d: Annotated[int, Field(ge=limits.HEAD_DIM[0], le=limits.HEAD_DIM[1])] = 64
    lr: Annotated[float, Field(ge=limits.RATES[0], le=limits.RATES[1], strict=False)] = 3e-3
    steps: Annotated[int, Field(ge=15, le=limits.STEPS)] = 150
    seed: Annotated[int, Field(ge=0, le=limits.SEED)] = 0


class Begun(BaseModel):
    """A run that was begun."""

    id: str


RunName = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]


def file(path: str) -> Callable[[Request], Awaitable[Response]]:
    """The route of one of the page's files, packed for a browser that takes it so."""

    async def found(request: Request) -> Response:
        packed = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"vary": "accept-encoding"} | ({"content-encoding": "gzip"} if packed else {})
        return Response(files.content(path, packed), media_type=files.FILES[path][0], headers=headers)

    return found


def add_routes(
    app: FastAPI,
    worker: WorkerClient,
    runs: PageRuns,
    streams: Streams,
    record: FollowedRecord | None,
    about: dict[str, Any],
) -> None:
    """The routes, over what they use."""

    for path, (kind, _) in files.FILES.items():
        media: dict[int | str, dict[str, Any]] = {200: {"content": {kind.partition(";")[0]: {}}}}
        app.get(path, response_class=Response, responses=media, name=path)(file(path))

    @app.get("/about")
    async def described() -> dict[str, Any]:
        """The version, and the names of the model and of the record."""
        return about

    @app.post("/heads", response_class=JSON)
    async def heads(asked: Sentence) -> Response:
        """Every head of the model on a sentence, as a document."""
        return JSON(await worker.ask("heads", **asked.model_dump()))

    @app.post("/heads/logits", response_class=Floats)
    async def logits(asked: HeadOfSentence) -> Response:
        """The logits of one head, queries × keys, as float32."""
        return Floats(await worker.ask("logits", **asked.model_dump()))

    @app.post("/flow", response_class=JSON)
    async def flow(asked: HeadOfSentence) -> Response:
        """A sentence through one head, step by step, as a document."""
        return JSON(await worker.ask("flow", **asked.model_dump()))

    @app.post("/runs", status_code=201, responses={409: REFUSALS[400]})
    async def begin(asked: RunSettings) -> Begun:
        """Begin a training run."""
        return Begun(id=runs.begin(asked.model_dump()).id)

    @app.get("/runs/{run}/events", status_code=200, response_class=EventStream)
    async def follow(run: RunName) -> Response:
        """The rows of a run as they come."""
        return EventStream(runs.find(run).follow(), streams)

    @app.delete("/runs/{run}", status_code=204, response_class=Response)
    async def cancel(run: RunName) -> Response:
        """Cancel a run; one that is over stays as it is."""
        await runs.cancel(run)
        return Response(status_code=204)

    @app.get("/record/events", status_code=200, response_class=EventStream)
    async def recorded() -> Response:
        """The record that --record named, again whenever a step is added."""
        if record is None:
            raise Denied(404, "No record is followed. Start `attemper serve --record run.jsonl`.")
        return EventStream(record.follow(), streams)
