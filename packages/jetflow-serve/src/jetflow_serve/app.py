"""The HTTP routes: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/health`, `/ready`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jetflow_serve.errors import ApiError, ErrorBody, from_validation, unavailable
from jetflow_serve.middleware import LimitBody, RequireKey
from jetflow_serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jetflow_serve.responses import (
    Answer,
    ChatCompletion,
    Health,
    ModelCard,
    ModelList,
    TextCompletion,
    event_stream,
)
from jetflow_serve.service import EngineService, Generation, GenerationError, Job
from jetflow_serve.translate import Translator

R = TypeVar("R", bound=GenerationRequest)


@dataclass(frozen=True)
class ServerSettings:
    """What the HTTP side needs to know. `api_key` None: open to everyone who can connect."""

    model_name: str
    api_key: str | None = None
    max_body_bytes: int = 4 * 1024 * 1024


FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is at fault; `param` names the field."},
    "5XX": {"model": ErrorBody, "description": "The server is at fault, overloaded or stopping."},
}
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "The answer, or its events."}
}


def create_app(service: EngineService, settings: ServerSettings) -> FastAPI:
    """The application; it starts `service` when it starts and stops it when it ends."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        service.start()
        yield
        service.stop()
        await service.join()

    assert service.engine.tokenizer is not None, "a server needs a tokenizer"
    translator = Translator(service.engine.tokenizer, service.engine.max_model_len)
    app = FastAPI(title="JetFlow", version="1", lifespan=lifespan, responses=FAILURES)
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(RequireKey, key=settings.api_key)
    _add_error_handlers(app)
    _add_generation_routes(app, service, translator, settings)
    _add_model_routes(app, service, settings)
    return app


def _add_generation_routes(
    app: FastAPI, service: EngineService, translator: Translator, settings: ServerSettings
) -> None:
    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAMS)
    async def chat_completions(body: ChatRequest, request: Request) -> Any:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, whole or as server-sent events."""
        return await _generate(body, request, translator.chat_jobs, "chat")

    @app.post("/v1/completions", response_model=TextCompletion, responses=STREAMS)
    async def completions(body: CompletionRequest, request: Request) -> Any:  # pyright: ignore[reportUnusedFunction]
        """Continue one or more prompts, whole or as server-sent events."""
        return await _generate(body, request, translator.completion_jobs, "text")

    async def _generate(body: R, request: Request, to_jobs: Callable[[R], list[Job]], kind: Any) -> Any:
        _check_model(body.model, settings)
        jobs = await run_in_threadpool(to_jobs, body)
        answer = Answer(kind, settings.model_name, len(jobs), body.n or 1, _wants_usage(body))
        generation = await service.submit(jobs)
        if body.stream:
            return EventStream(answer, generation, service)
        try:
            return await _collect(answer, generation, request)
        finally:
            service.cancel(generation)


def _add_model_routes(app: FastAPI, service: EngineService, settings: ServerSettings) -> None:
    card = ModelCard(id=settings.model_name, created=int(time.time()), max_model_len=service.engine.max_model_len)

    @app.get("/v1/models", response_model=ModelList)
    async def models() -> ModelList:  # pyright: ignore[reportUnusedFunction]
        """The one model served."""
        return ModelList(data=[card])

    @app.get("/v1/models/{model:path}", response_model=ModelCard)
    async def model(model: str) -> ModelCard:  # pyright: ignore[reportUnusedFunction]
        """One model by its id (which may contain slashes)."""
        _check_model(model, settings)
        return card

    @app.get("/ready", response_model=Health)
    @app.get("/health", response_model=Health)
    async def health() -> Health:  # pyright: ignore[reportUnusedFunction]
        """Whether the engine runs and takes requests."""
        if not service.ready:
            raise unavailable("the engine is not running or the server is stopping")
        return Health(model=settings.model_name, open_requests=service.open_requests)


class EventStream(StreamingResponse):
    """Server-sent events of one generation; whichever way it ends, the generation is freed."""

    def __init__(self, answer: Answer, generation: Generation, service: EngineService) -> None:
        super().__init__(
            event_stream(answer, generation),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._release = lambda: service.cancel(generation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream; a client that goes away ends this, even before the first event."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._release()


async def _collect(
    answer: Answer, generation: Generation, request: Request
) -> ChatCompletion | TextCompletion | Response:
    """Read the whole generation, or stop when the client goes away."""
    reader = asyncio.ensure_future(_read(answer, generation))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((reader, gone), return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            return Response(status_code=499)  # nobody is there to read it
        reader.result()
        return answer.whole()
    except GenerationError as error:
        raise ApiError(500, str(error), code="generation_failed") from error
    finally:
        reader.cancel()
        gone.cancel()


async def _read(answer: Answer, generation: Generation) -> None:
    async for index, output in generation:
        answer.take(index, output)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _wants_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _check_model(name: str | None, settings: ServerSettings) -> None:
    if name is not None and name != settings.model_name:
        message = f"the model '{name}' does not exist here; this server has '{settings.model_name}'"
        raise ApiError(404, message, param="model", code="model_not_found")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:  # pyright: ignore[reportUnusedFunction]
        errors: Sequence[Any] = error.errors()
        return from_validation(errors).response()

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> Response:  # pyright: ignore[reportUnusedFunction]
        if not isinstance(error, ApiError):
            error = _as_api_error(request, error)
        return error.response()

    @app.exception_handler(Exception)
    async def broken(_: Request, error: Exception) -> Response:  # pyright: ignore[reportUnusedFunction]
        return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error").response()


def _as_api_error(request: Request, error: HTTPException) -> ApiError:
    """Starlette's own errors (unknown path, wrong method, unreadable body) in our shape."""
    if error.status_code == 404:
        return ApiError(404, f"there is no {request.url.path} here", code="unknown_path")
    if error.status_code == 405:
        text = f"{request.url.path} does not take {request.method}"
        return ApiError(405, text, code="method_not_allowed", headers=error.headers)
    if error.status_code == 400:
        return ApiError(400, "the body could not be read as JSON", code="invalid_json", headers=error.headers)
    return ApiError(error.status_code, str(error.detail), headers=error.headers)
