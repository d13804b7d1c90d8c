"""`jetflow-serve serve`: bind, load, warm up, announce, serve until told to stop."""

from __future__ import annotations

import asyncio
import socket
from argparse import Namespace
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from jetflow_serve.app import ServerSettings, create_app
from jetflow_serve.choice import ModelChoice, choose_model, load
from jetflow_serve.measure import warm_up
from jetflow_serve.service import EngineService

GRACE_S = 30.0  # how long running requests may go on once the server is told to stop
QUEUE_FACTOR = 8  # sequences taken, running and waiting together, as a multiple of those that run at once


class Server(uvicorn.Server):
    """Uvicorn that says when it accepts connections, and cuts what still runs `grace_s` after it is told to stop."""

    def __init__(
        self, app: FastAPI, service: EngineService, on_ready: Callable[[], None], grace_s: float = GRACE_S
    ) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", lifespan="on", ws="none", server_header=False))
        self._service = service
        self._on_ready = on_ready
        self._grace_s = grace_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let requests finish within the grace period; after it they fail with a reason."""
        cut = asyncio.get_running_loop().call_later(self._grace_s, self._service.stop)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()


def serve(options: Namespace, write: Callable[[str], None]) -> int:
    """Run the server until it is interrupted. Raises ValueError for a port in use, a wrong model and the like."""
    choice = choose_model(options.model, options.head, options.budget, options.served_model_name, options.device)
    listener = bind(options.host, options.port)
    try:
        write(f"loading {choice.model} ...\n")
        llm = load(choice, options)
        warm_up(llm)
        service = EngineService(llm.engine, QUEUE_FACTOR * llm.engine.config.max_running)
        app = create_app(service, ServerSettings(choice.name, options.api_key))
        greeting = announcement(choice, _url(listener), options.api_key is not None)
        server = Server(app, service, lambda: write(greeting + "\n"))
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises ValueError when the address cannot be had."""
    if port > 65535:
        raise ValueError(f"cannot listen on {host}:{port}: ports end at 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}:{port}: {error}") from error
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port with --port (0 picks a free one)"
        ) from error
    return listener


def announcement(choice: ModelChoice, url: str, with_key: bool) -> str:
    """What a user reads once the server is up."""
    speed = f"budget {choice.budget}, head {choice.head}" if choice.budget else "budget 0: no speculation"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    lines = [
        *([f"note: {choice.note}"] if choice.note else []),
        f"JetFlow serves {choice.name} at {url} ({speed}). Ctrl-C stops it. Try:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'",
    ]
    return "\n".join(lines)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
