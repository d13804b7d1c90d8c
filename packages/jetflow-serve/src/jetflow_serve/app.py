"""The HTTP routes: `/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/tokenize`, `/health`, `/metrics` …"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_1_0_0
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jetflow_serve.bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Detokenized,
    Health,
    ModelCard,
    ModelList,
    TextCompletion,
    TextCompletionChunk,
    Tokens,
)
from jetflow_serve.errors import ApiError, from_validation, unavailable
from jetflow_serve.middleware import OPEN_PATHS, LimitBody, LogRequests, RequireKey
from jetflow_serve.openapi import DocumentedApp, events, failures
from jetflow_serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from jetflow_serve.responses import Answer, ChatForm, TextForm, event_stream
from jetflow_serve.service import EngineService, Generation
from jetflow_serve.translate import Plan, Translator

R = TypeVar("R", bound=GenerationRequest)


@dataclass(frozen=True)
class ServerSettings:
    """What the HTTP side needs to know.

    No `api_keys`: open to everyone who can connect. `cors_origins`: web pages whose scripts may call ("*": all).
    `log_prompts`: log lines hold the prompts.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 4 * 1024 * 1024
    log_prompts: bool = False


SEND_GRACE_S = 5.0  # how long a stream that has passed its deadline may take to say so


GENERATION_FAILURES = failures(400, 404, 413, 429, 503, 504)
TOKEN_FAILURES = failures(400, 404, 413)


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
    app = DocumentedApp(
        title="JetFlow", version="1", lifespan=lifespan, needs_key=bool(settings.api_keys), open_paths=OPEN_PATHS
    )
    _add_middleware(app, service, settings)
    _add_error_handlers(app)
    _add_generation_routes(app, service, translator, settings)
    _add_token_routes(app, translator, settings)
    _add_model_routes(app, service, settings)
    return app


def _add_middleware(app: FastAPI, service: EngineService, settings: ServerSettings) -> None:
    """From the inside out: what was added last sees a request first."""
    app.add_middleware(LimitBody, max_bytes=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
            expose_headers=["Retry-After", "X-Request-ID"],
        )
    assert service.engine.tokenizer is not None
    decode = service.engine.tokenizer.decode if settings.log_prompts else None
    app.add_middleware(LogRequests, metrics=service.metrics, decode=decode)


def _add_generation_routes(
    app: FastAPI, service: EngineService, translator: Translator, settings: ServerSettings
) -> None:
    chat, text = ChatForm(translator.tokenizer), TextForm(translator.tokenizer)
    chat_responses = events(ChatCompletionChunk) | GENERATION_FAILURES
    text_responses = events(TextCompletionChunk) | GENERATION_FAILURES

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=chat_responses)
    async def chat_completions(body: ChatRequest, request: Request) -> Any:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, whole or as server-sent events."""
        return await _generate(body, request, translator.chat, chat)

    @app.post("/v1/completions", response_model=TextCompletion, responses=text_responses)
    async def completions(body: CompletionRequest, request: Request) -> Any:  # pyright: ignore[reportUnusedFunction]
        """Continue one or more prompts, whole or as server-sent events."""
        return await _generate(body, request, translator.completion, text)

    async def _generate(body: R, request: Request, to_plan: Callable[[R], Plan], form: ChatForm | TextForm) -> Response:
        _check_model(body.model, settings)
        plan = await run_in_threadpool(to_plan, body)
        answer = Answer(form, plan, translator.tokenizer, settings.model_name, body.stream_options)
        generation = await service.submit(plan.jobs)
        if body.stream:
            return EventStream(answer, generation, service)
        try:
            return await _collect(answer, generation, request)
        finally:
            service.cancel(generation)


def _add_token_routes(app: FastAPI, translator: Translator, settings: ServerSettings) -> None:
    @app.post("/tokenize", responses=TOKEN_FAILURES)
    async def tokenize(body: Annotated[TokenizeRequest, Body()]) -> Tokens:  # pyright: ignore[reportUnusedFunction]
        """The token ids of a text or a conversation, as a completion or chat would start from them."""
        _check_model(body.model, settings)
        ids = await run_in_threadpool(translator.tokens, body)
        return Tokens(count=len(ids), max_model_len=translator.context, tokens=ids)

    @app.post("/detokenize", responses=TOKEN_FAILURES)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:  # pyright: ignore[reportUnusedFunction]
        """The text of token ids, control tokens included."""
        _check_model(body.model, settings)
        return Detokenized(prompt=await run_in_threadpool(translator.text, body.tokens))


def _add_model_routes(app: FastAPI, service: EngineService, settings: ServerSettings) -> None:
    card = ModelCard(id=settings.model_name, created=int(time.time()), max_model_len=service.engine.max_model_len)

    @app.get("/v1/models", response_model=ModelList, responses=failures())
    async def models() -> ModelList:  # pyright: ignore[reportUnusedFunction]
        """The one model served."""
        return ModelList(data=[card])

    @app.get("/v1/models/{model:path}", response_model=ModelCard, responses=failures(404))
    async def model(model: str) -> ModelCard:  # pyright: ignore[reportUnusedFunction]
        """One model by its id (which may contain slashes)."""
        _check_model(model, settings)
        return card

    @app.get("/health", response_model=Health, responses=failures(503))
    async def health() -> Health:  # pyright: ignore[reportUnusedFunction]
        """Whether the engine runs: the process is worth keeping."""
        if not service.alive:
            raise unavailable("the engine is not running")
        return Health(model=settings.model_name, open_requests=service.open_requests)

    @app.get("/ready", response_model=Health, responses=failures(503))
    async def ready() -> Health:  # pyright: ignore[reportUnusedFunction]
        """Whether requests should be sent here: not while the server stops, and not when step after step fails."""
        if not service.ready:
            raise unavailable("the server is stopping, or its engine fails")
        return Health(model=settings.model_name, open_requests=service.open_requests)

    @app.get("/metrics", response_class=PlainTextResponse, responses=failures())
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Counters and timings in Prometheus' text format."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE_PLAIN_1_0_0)


class EventStream(StreamingResponse):
    """Server-sent events of one generation; whichever way it ends, the generation is freed."""

    def __init__(self, answer: Answer, generation: Generation, service: EngineService) -> None:
        super().__init__(
            event_stream(answer, generation),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._release = lambda: service.cancel(generation)
        self._cut_at = None if generation.deadline is None else generation.deadline + SEND_GRACE_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream; a client that goes away, or has stopped to read when time is up, ends this, even before the first event."""
        try:
            async with asyncio.timeout_at(self._cut_at):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            pass  # nobody takes the last event: the connection is closed in mid-answer
        finally:
            self._release()


async def _collect(answer: Answer, generation: Generation, request: Request) -> Response:
    """Read the whole generation, or stop when the client goes away."""
    reader = asyncio.ensure_future(_read(answer, generation))
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((reader, gone), return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            return Response(status_code=499)  # nobody is there to read it
        reader.result()
        return answer.whole()
    finally:
        reader.cancel()
        gone.cancel()


async def _read(answer: Answer, generation: Generation) -> None:
    async for index, output in generation:
        answer.take(index, output)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
