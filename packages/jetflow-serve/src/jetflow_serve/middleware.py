"""ASGI middleware: request id and log line, the API keys, and the limit on a request's size, all before a body is parsed."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetflow_serve.errors import ApiError
from jetflow_serve.logs import RequestRecord, current_request
from jetflow_serve.metrics import Metrics

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready"})  # what a load balancer asks, without a key
DRAIN_FACTOR = 4  # how much of an oversized body is read and thrown away, so that the client gets to read the answer


class LogRequests:
    """Gives a request its id (the client's `x-request-id` where it sent a usable one), counts it and logs a line at its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """With `decode`, the prompts are logged too."""
        self.app, self.metrics, self.decode = app, metrics, decode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and note what becomes of it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        record = RequestRecord(name, scope["method"], scope["path"])

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.id
            await send(message)

        token = current_request.set(record)
        try:
            await self.app(scope, receive, noted)
        except Exception:
            record.status = 500  # answered further out
            raise
        finally:
            current_request.reset(token)
            route = getattr(scope.get("route"), "path", "unknown")
            self.metrics.http.labels(route, str(record.status)).inc()
            record.write(self.decode)


class RequireKey:
    """Answers 401 to requests, but those for `OPEN_PATHS`, that do not carry `Authorization: Bearer <one of the keys>`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.expected = [_digest(f"Bearer {key}".encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = _digest(Headers(scope=scope).get("authorization", "").encode("latin-1"))
            if sum(hmac.compare_digest(given, key) for key in self.expected) == 0:  # all are compared: no key is faster
                error = ApiError(
                    401, "wrong or missing API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _digest(text: bytes) -> bytes:
    """Of equal length for keys of any length."""
    return hashlib.sha256(text).digest()


class LimitBody:
    """Answers 413 to requests whose body is larger than `max_bytes`, announced or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what the application reads; the count raises inside it once it is too much."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_bytes:
                await self._drain(message, receive)
                raise ApiError(413, f"the body is larger than {self.max_bytes} bytes", code="body_too_large")
            return message

        await self.app(scope, counted, send)

    async def _drain(self, message: Message, receive: Receive) -> None:
        left = DRAIN_FACTOR * self.max_bytes
        while message.get("more_body", False) and left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
