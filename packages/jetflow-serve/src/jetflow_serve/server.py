"""`jetflow-serve serve`: bind, load, warm up, announce, serve until told to stop."""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
import socket
import threading
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from jetflow_serve.app import ServerSettings, create_app
from jetflow_serve.choice import ModelChoice, choose_model, load
from jetflow_serve.errors import unavailable
from jetflow_serve.logs import configure
from jetflow_serve.measure import warm_up
from jetflow_serve.service import EngineService

GRACE_S = 30.0  # how long running requests may go on once the server is told to stop
CUT_S = 3.0  # how long the last words to clients may take after that
QUEUE_FACTOR = 8  # sequences taken, running and waiting together, as a multiple of those that run at once


class Server(uvicorn.Server):
    """Uvicorn with our way to stop.

    The first signal: new requests get 503, running ones may finish within `grace_s` seconds, what is left then fails with a
    reason. A second signal: it fails at once. Either way the process ends as one that did its work, with status 0.
    """

    def __init__(
        self, app: FastAPI, service: EngineService, on_ready: Callable[[], None], grace_s: float = GRACE_S
    ) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            log_config=None,  # our own, see logs.py
            access_log=False,
            lifespan="on",
            ws="none",
            server_header=False,
        )
        super().__init__(config)
        self._service = service
        self._on_ready = on_ready
        self._grace_s = grace_s
        self._cut_at: float | None = None  # time of the event loop; None until told to stop
        self._signals = itertools.count()  # one step, so that a signal in the middle of another's handler counts too

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain; the second one: stop."""
        if next(self._signals) == 0:
            self._drain()
        else:
            self._leave()
            self._service.stop("the server was told to stop at once")

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to leave; when draining, once nothing runs or the time is over."""
        if self._cut_at is not None and not self.should_exit:
            over = asyncio.get_running_loop().time() >= self._cut_at
            if over or self._service.open_requests == 0:
                self._leave()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the door; what still runs at the end of the grace period fails with a reason, who does not listen is cut off."""
        loop = asyncio.get_running_loop()
        if self._cut_at is None:
            self._drain()
        assert self._cut_at is not None
        left = max(0.0, self._cut_at - loop.time())
        cut = loop.call_later(left, self._service.stop)
        self.config.timeout_graceful_shutdown = math.ceil(left + CUT_S)
        try:
            await super().shutdown(sockets)
        finally:
            cut.cancel()

    def _drain(self) -> None:
        self._cut_at = asyncio.get_running_loop().time() + self._grace_s
        self._service.drain()

    def _leave(self) -> None:
        self._cut_at = asyncio.get_running_loop().time()
        self.should_exit = True


def serve(options: Namespace, write: Callable[[str], None]) -> int:
    """Run the server until it is told to stop. Raises ValueError for a port in use, a wrong model and the like."""
    configure(options.log_format)
    keys = read_keys(options.api_key, options.api_key_file)
    choice = choose_model(options.model, options.head, options.budget, options.served_model_name, options.drafter)
    listener = bind(options.host, options.port)
    try:
        write(f"loading {choice.model} ...\n")
        with _answering_not_ready(listener), _signals_interrupt():
            llm = load(choice, options)
            warm_up(llm)
        limit = options.max_queue or QUEUE_FACTOR * llm.engine.config.max_running
        service = EngineService(llm.engine, limit, options.request_timeout or None)
        settings = ServerSettings(
            choice.name, keys, tuple(options.cors_origin), int(options.max_body_mib * 2**20), options.log_prompts
        )
        greeting = announcement(choice, _url(listener), bool(keys))
        server = Server(
            create_app(service, settings), service, lambda: write(greeting + "\n"), options.shutdown_timeout
        )
        server.run(sockets=[listener])
    except KeyboardInterrupt:  # while loading
        pass
    finally:
        listener.close()
    return 0


def read_keys(given: list[str], path: str | None) -> tuple[str, ...]:
    """API keys of the command line and of a file (a key a line; empty lines and those with # in front do not count).

    Raises ValueError for a file that cannot be read or holds none, and for a key that no HTTP header can carry.
    """
    keys = list(given)
    if path is not None:
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file {path} cannot be read: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ValueError(f"--api-key-file {path} holds no key: write one a line")
        keys += found
    for key in keys:
        if not key.strip() or not key.isprintable():
            raise ValueError("an API key is empty or holds control characters: use printable ones")
    return tuple(dict.fromkeys(keys))


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


@contextmanager
def _answering_not_ready(listener: socket.socket) -> Generator[None]:
    """Meanwhile everyone who asks gets a 503 with `Retry-After`: the model is being loaded."""
    config = uvicorn.Config(_not_ready, log_level="critical", log_config=None, lifespan="off", server_header=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener.dup()]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


async def _not_ready(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await unavailable("the model is being loaded").response()(scope, receive, send)


@contextmanager
def _signals_interrupt() -> Generator[None]:
    """Meanwhile SIGTERM is what Ctrl-C is: KeyboardInterrupt."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # only there can signals be had
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def announcement(choice: ModelChoice, url: str, with_key: bool) -> str:
    """What a user reads once the server is up."""
    speed = f"budget {choice.budget}, {choice.drafts_by}" if choice.budget else "budget 0: no speculation"
    key = " -H 'Authorization: Bearer YOUR_KEY'" if with_key else ""
    body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
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
