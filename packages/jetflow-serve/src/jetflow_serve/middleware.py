"""ASGI middleware: the API key and the limit on a request's size, both before any of the body is parsed."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetflow_serve.errors import ApiError

DRAIN_FACTOR = 4  # how much of an oversized body is read and thrown away, so that the client gets to read the answer


class RequireKey:
    """Answers 401 to requests under `/v1` that do not carry `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app = app
        self.expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on or refuse it."""
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self.expected):
                error = ApiError(
                    401, "wrong or missing API key", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


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
