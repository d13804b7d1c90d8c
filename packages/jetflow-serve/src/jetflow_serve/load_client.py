"""The clients of the load benchmark: they stream chat answers from a URL and note when each token came.

They run in a process of their own, without torch, so that they take nothing from the server but its sockets.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Target:
    """Where the requests go."""

    url: str
    api_key: str | None = None

    def connect(self) -> http.client.HTTPConnection:
        """A connection that opens with the first request. Raises ValueError for what is no HTTP URL."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {self.url} is no URL of a server: write http://host:port")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname, parts.port, timeout=TIMEOUT_S)

    def headers(self) -> dict[str, str]:
        """What every request carries."""
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **key}

    def get(self, path: str) -> str:
        """The text at `path`. Raises ValueError when the server cannot be reached or does not have it."""
        connection = self.connect()
        try:
            connection.request("GET", urlsplit(self.url).path.rstrip("/") + path, headers=self.headers())
            response = connection.getresponse()
            text = response.read().decode()
        except OSError as error:
            raise ValueError(f"{self.url}{path} cannot be reached: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise ValueError(f"{self.url}{path} answered {response.status}: {text[:200]}")
        return text


@dataclass
class Answer:
    """One request's answer. Times in seconds, `start` and `end` on the clients' common clock.

    `chunks`: (time since the chunk before, tokens in it) of every chunk with tokens, the first one's time counting from the
    request. `accepted`: tokens that came out of drafts. `error`: what went wrong, if anything.
    """

    start: float
    end: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    tokens: int = 0
    accepted: int = 0
    text: str = ""
    error: str | None = None


def run_load(
    target: Target, bodies: Sequence[dict[str, Any]], clients: int, arrivals: Sequence[float] | None
) -> list[Answer]:
    """Answers to all `bodies`, in their order.

    Without `arrivals` each of `clients` asks its next question when it has an answer; with them, request i is sent
    `arrivals[i]` seconds after the start, whatever is still open (and `clients` must be enough for that).
    """
    answers: list[Answer | None] = [None] * len(bodies)
    turn = count()
    begun = time.perf_counter()

    def client() -> None:
        connection = target.connect()
        try:
            while (index := next(turn)) < len(bodies):
                if arrivals is not None:
                    time.sleep(max(0.0, begun + arrivals[index] - time.perf_counter()))
                answers[index] = _ask(connection, target, bodies[index])
        finally:
            connection.close()

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(client) for _ in range(clients)]:
            done.result()
    return [answer for answer in answers if answer is not None]


def _ask(connection: http.client.HTTPConnection, target: Target, body: dict[str, Any]) -> Answer:
    """One streamed request."""
    answer = Answer(time.perf_counter())
    try:
        path = urlsplit(target.url).path.rstrip("/") + "/v1/chat/completions"
        connection.request("POST", path, json.dumps(body), target.headers())
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"{response.status}: {response.read()[:200].decode(errors='replace')}"
        else:
            _read(answer, response)
    except (OSError, http.client.HTTPException) as error:
        answer.error = f"{type(error).__name__}: {error}"
        connection.close()  # the next request opens a new one
    answer.end = time.perf_counter()
    return answer


def _read(answer: Answer, response: http.client.HTTPResponse) -> None:
    last = answer.start
    for event in _events(response):
        if "error" in event:
            answer.error = str(event["error"].get("message", event["error"]))
            continue
        for choice in event["choices"]:
            answer.text += choice["delta"].get("content") or ""
        usage = event.get("usage")
        if usage is None or usage["completion_tokens"] == answer.tokens:
            continue
        now = time.perf_counter()
        answer.chunks.append((now - last, usage["completion_tokens"] - answer.tokens))
        last = now
        answer.tokens = usage["completion_tokens"]
        answer.accepted = (usage.get("completion_tokens_details") or {}).get("accepted_prediction_tokens") or 0
    if not answer.tokens and answer.error is None:
        answer.error = "the answer has no tokens"


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its end mark."""
    for line in response:
        text = line.decode().strip()
        if text.startswith("data: ") and text != "data: [DONE]":
            yield json.loads(text.removeprefix("data: "))
