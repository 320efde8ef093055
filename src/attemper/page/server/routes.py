"""The routes: what a page can ask for. Bodies are bounded here; paths name a module or a run, never a file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Response
from pydantic import BaseModel, ConfigDict, Field

from ...scale import RULES
from . import files, limits
from .events import EventStream, PageRuns, Streams
from .guard import Denied
from .record import FollowedRecord
from .work import Desk

REFUSED: dict[int | str, dict[str, Any]] = {
    code: {"description": words, "content": {"application/json": {"schema": {
        "type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}}}}
    for code, words in {
        400: "not a request of this page", 403: "no token, or another site", 404: "no such thing", 405: "another method",
        408: "too slow", 413: "too large", 415: "not JSON", 422: "out of bounds, or the model refuses it",
        500: "a failure", 501: "an extra is not installed", 503: "too many wait", 504: "it took too long",
    }.items()
}  # fmt: skip
FLOATS: dict[int | str, dict[str, Any]] = {
    200: {"description": "float32, little endian", "content": {"application/octet-stream": {}}}
}
EVENTS: dict[int | str, dict[str, Any]] = {
    200: {"description": "server-sent events", "content": {"text/event-stream": {}}}
}

RunRule = Literal["sqrt_dk", "none", "dk", "qk_norm", "learned", "softcap"]
assert set(RunRule.__args__) <= set(RULES)  # type: ignore[attr-defined]


class Body(BaseModel):
    """What every body keeps to: no other fields, no number that is a text, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Sentence(Body):
    """A sentence for the model."""

    text: Annotated[str, Field(min_length=1, max_length=limits.TEXT)]


class HeadOfSentence(Sentence):
    """One head on a sentence."""

    layer: Annotated[int, Field(ge=0, lt=limits.LAYERS)]
    head: Annotated[int, Field(ge=0, lt=limits.HEADS)]


class RunSettings(Body):
    """A training run: the rules, one after the other, on the same data from the same beginning."""

    rules: Annotated[list[RunRule], Field(min_length=1, max_length=3)]
    d: Annotated[int, Field(ge=limits.HEAD_DIM[0], le=limits.HEAD_DIM[1])] = 64
    lr: Annotated[float, Field(ge=limits.RATES[0], le=limits.RATES[1], strict=False)] = 3e-3
    steps: Annotated[int, Field(ge=15, le=limits.STEPS)] = 150
    seed: Annotated[int, Field(ge=0, le=limits.SEED)] = 0


class Begun(BaseModel):
    """A run that was begun."""

    id: str


RunName = Annotated[str, Path(pattern="^[0-9a-f]{16}$")]


def add_routes(
    app: FastAPI, desk: Desk, runs: PageRuns, streams: Streams, record: FollowedRecord | None, about: dict[str, Any]
) -> None:
    """The routes, over what they use."""
    _pages(app, about)
    _models(app, desk)
    _trainings(app, runs, streams, record)


def _pages(routes: FastAPI, about: dict[str, Any]) -> None:
    @routes.get("/", response_class=Response, responses={200: {"content": {"text/html": {}}}})
    async def page() -> Response:
        """The page."""
        return Response(files.page(), media_type=files.PAGE)

    @routes.get(
        "/modules/{name:path}",
        response_class=Response,
        responses={200: {"content": {"text/javascript": {}, "text/css": {}}}},
    )
    async def module(name: Annotated[str, Path(max_length=200)]) -> Response:
        """A module or the style sheet, by its name in a table."""
        found = files.served().get(name)
        if found is None:
            raise Denied(404, "There is no such module.")
        return Response(found[1], media_type=found[0])

    @routes.get("/about")
    async def described() -> dict[str, Any]:
        """What this server was started with: names alone."""
        return about

    @routes.get("/data", response_class=Response, responses={200: {"content": {"application/json": {}}}})
    async def data() -> Response:
        """What the panels read when the page opens; what needs the model they ask for."""
        return Response(files.data(), media_type="application/json")


def _models(routes: FastAPI, desk: Desk) -> None:
    @routes.post("/heads", response_class=Response, responses={200: {"content": {"application/json": {}}}})
    async def heads(asked: Sentence) -> Response:
        """Every head of the model on a sentence, as a document."""
        return Response((await desk.ask("heads", **asked.model_dump())).content, media_type="application/json")

    @routes.post("/heads/logits", response_class=Response, responses=FLOATS)
    async def logits(asked: HeadOfSentence) -> Response:
        """The logits of one head, queries × keys, as float32."""
        return Response((await desk.ask("logits", **asked.model_dump())).content, media_type="application/octet-stream")

    @routes.post("/flow", response_class=Response, responses={200: {"content": {"application/json": {}}}})
    async def flow(asked: HeadOfSentence) -> Response:
        """A sentence through one head, step by step, as a document."""
        return Response((await desk.ask("flow", **asked.model_dump())).content, media_type="application/json")


def _trainings(routes: FastAPI, runs: PageRuns, streams: Streams, record: FollowedRecord | None) -> None:
    @routes.post("/runs", status_code=201, responses={409: REFUSED[400]})
    async def begin(asked: RunSettings) -> Begun:
        """Begin a training run."""
        return Begun(id=runs.begin(asked.model_dump()).id)

    @routes.get("/runs/{run}/events", response_class=Response, responses=EVENTS)
    async def follow(run: RunName) -> Response:
        """The rows of a run as they come."""
        return Streamed(EventStream(streams, runs.find(run).follow))

    @routes.delete("/runs/{run}", status_code=204, response_class=Response)
    async def cancel(run: RunName) -> Response:
        """Cancel a run; one that is over stays as it is."""
        await runs.cancel(run)
        return Response(status_code=204)

    @routes.get("/record/events", response_class=Response, responses=EVENTS)
    async def recorded() -> Response:
        """The record that --record named, again whenever a step is added."""
        if record is None:
            raise Denied(404, "No record is followed. Start `attemper serve --record run.jsonl`.")
        return Streamed(EventStream(streams, record.follow))


class Streamed(Response):
    """An answer that an :class:`EventStream` sends."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.stream(scope, receive, send)
