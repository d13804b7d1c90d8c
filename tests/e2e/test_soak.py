"""Hundreds of clients at once, many of them rude, for minutes (`--soak-minutes`): no wrong answer, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from jetflow_core.engine import Engine, EngineConfig
from serve.support import Running, byte_tokenizer, serving, wait_for
from tiny import tiny_head, tiny_model

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CLIENTS = 250
SPECS = 60
CONTEXT = 160
JSON = {"Content-Type": "application/json"}
OVERLOAD = {429, 503, 504}


def engine(**changes: Any) -> Engine:
    """A tiny model in float32. Its pages hold a few requests, so that they preempt each other all the time."""
    model = tiny_model(vocab_size=258)
    head = tiny_head(model)
    head.pack()
    limits = {"budget": 6, "page_size": 4, "num_pages": 60, "max_running": 16, "max_batch_tokens": 128}
    return Engine(model, byte_tokenizer(), head, EngineConfig(**(limits | {"max_model_len": CONTEXT} | changes)))


def random_request(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body that is fine."""
    words = " ".join(
        draw.choice(["tree", "draft", "head", "page", "token", "walk"]) for _ in range(draw.randint(1, 12))
    )
    body: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "seed": draw.randint(0, 5)}
    body["temperature"] = draw.choice([0, 0, 0.7, 1.3])
    options: dict[str, Any] = {
        "top_p": 0.9, "top_k": 20, "min_p": 0.05, "n": 3, "stop": ["a", "zz"], "ignore_eos": True, "min_tokens": 1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "logit_bias": {"65": -100, "70": 3},
    }  # fmt: skip
    body |= {name: options[name] for name in draw.sample(sorted(options), draw.randint(0, 4))}
    if draw.random() < 0.5:
        return TEXT, body | {"prompt": words, **draw.choice([{}, {"logprobs": 2}, {"echo": True}])}
    return CHAT, body | {"messages": [{"role": "user", "content": words}]}


@dataclass
class Soak:
    """What the clients share: where to ask, what is right, and what has happened."""

    url: str
    specs: list[tuple[str, dict[str, Any]]]
    answers: list[list[tuple[str, str]]]
    until: float
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.wrong.append(what)

    def expect(self, response: httpx.Response, status: int) -> None:
        self.seen[str(response.status_code)] += 1
        if response.status_code != status:
            self.fail(f"{response.status_code} instead of {status}: {response.text[:200]}")


def outcome(body: dict[str, Any]) -> list[tuple[str, str]]:
    """Text and finish reason of every choice of a whole answer."""
    return [
        (choice["text"] if "text" in choice else choice["message"]["content"] or "", choice["finish_reason"])
        for choice in body["choices"]
    ]


def streamed(lines: list[str]) -> tuple[list[tuple[str, str]], str | None]:
    """The same of a stream, and the error it ended with."""
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for line in lines:
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return [], event["error"]["code"]
        for choice in event["choices"]:
            index = choice["index"]
            piece = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[index] = texts.get(index, "") + piece
            if choice["finish_reason"] is not None:
                ends[index] = choice["finish_reason"]
    return [(texts[index], ends[index]) for index in sorted(texts)], None


# -- what clients do --------------------------------------------------------------------------------------------------


async def polite(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Ask, read to the end, compare."""
    index = draw.randrange(len(soak.specs))
    path, body = soak.specs[index]
    if draw.random() < 0.5:
        response = await client.post(path, json=body)
        if response.status_code in OVERLOAD:
            await overloaded(soak, response, draw)
            return
        soak.expect(response, 200)
        found = outcome(response.json()) if response.status_code == 200 else []
    else:
        async with client.stream("POST", path, json=body | {"stream": True}) as response:
            lines = [line async for line in response.aiter_lines()]
        if response.status_code in OVERLOAD:
            await overloaded(soak, response, draw)
            return
        found, error = streamed(lines)
        if error == "request_timeout":
            soak.seen["504 in a stream"] += 1
            return
        soak.seen["200 streamed"] += 1
    if found != soak.answers[index]:
        soak.fail(f"{path} {body}: {found} instead of {soak.answers[index]}")


async def overloaded(soak: Soak, response: httpx.Response, draw: random.Random) -> None:
    soak.seen[str(response.status_code)] += 1
    if response.status_code != 504 and int(response.headers["retry-after"]) < 1:
        soak.fail(f"{response.status_code} with retry-after {response.headers['retry-after']}")
    await asyncio.sleep(draw.uniform(0.05, 0.5))  # sooner than it was told to: the queue stays full


async def leaver(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Hang up in the middle of a stream."""
    path, body = draw.choice(soak.specs)
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        left = draw.randint(0, 3)
        async for _ in response.aiter_lines():
            left -= 1
            if left < 0:
                break
    soak.seen["left"] += 1


async def canceller(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Give up waiting for a whole answer."""
    path, body = draw.choice(soak.specs)
    try:
        await client.post(path, json=body, timeout=httpx.Timeout(60, read=draw.uniform(0.001, 0.3)))
    except httpx.ReadTimeout:
        soak.seen["cancelled"] += 1


async def vanisher(soak: Soak, _: httpx.AsyncClient, draw: random.Random) -> None:
    """Send a request, or a part of one, and close the connection without reading."""
    path, body = draw.choice(soak.specs)
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    whole = head.encode() + content
    _, writer = await asyncio.open_connection("127.0.0.1", int(soak.url.rsplit(":", 1)[1]))
    with suppress(OSError):  # the server may have hung up first
        writer.write(whole[: draw.choice([len(whole), len(whole), draw.randint(1, len(whole))])])
        await writer.drain()
        await asyncio.sleep(draw.choice([0, 0.01, 0.2]))
        writer.close()
        await writer.wait_closed()
    soak.seen["vanished"] += 1


async def malformed(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Send what is no request."""
    path, body = draw.choice(soak.specs)
    junk: Any = draw.choice([None, -1, "x", [], {}, 1e400, "\ud800", [[[]]], True])
    key = draw.choice([*body, "nonsense"])
    bad = (
        {"nonsense": 1} | body
        if key in ("stop", "ignore_eos", "logprobs", "echo")
        else body | {key: junk, "nonsense": 1}
    )
    content = draw.choice([b"", b"{", os.urandom(draw.randint(1, 60)), json.dumps(bad).encode()])
    soak.expect(await client.post(path, content=content, headers=JSON), 400)


async def oversized(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Send too much: too many bytes, or too many tokens for the context."""
    if draw.random() < 0.5:
        soak.expect(await client.post(TEXT, json={"prompt": "x" * 40_000}), 413)
    else:
        soak.expect(await client.post(TEXT, json={"prompt": "x" * CONTEXT, "max_tokens": 5}), 400)


async def watcher(soak: Soak, client: httpx.AsyncClient, draw: random.Random) -> None:
    """Look at what monitors look at."""
    soak.expect(await client.get(draw.choice(["/health", "/ready", "/metrics", "/v1/models"])), 200)
    await asyncio.sleep(0.2)


ACTIONS: list[tuple[Callable[[Soak, httpx.AsyncClient, random.Random], Awaitable[None]], int]] = [
    (polite, 50), (leaver, 12), (canceller, 10), (vanisher, 10), (malformed, 10), (oversized, 4), (watcher, 4),
]  # fmt: skip


async def client_loop(soak: Soak, client: httpx.AsyncClient, number: int) -> None:
    draw = random.Random(number)
    actions, weights = zip(*ACTIONS, strict=True)
    while time.monotonic() < soak.until and not soak.wrong:
        action = draw.choices(actions, weights)[0]
        try:
            await action(soak, client, draw)
        except httpx.HTTPError as error:
            soak.fail(f"{action.__name__}: {type(error).__name__}: {error}")


async def crowd(soak: Soak) -> None:
    # A server closes connections that idle for 5 s; a client that reuses one at that very moment has an error of its own making.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS, keepalive_expiry=1)
    async with httpx.AsyncClient(base_url=soak.url, timeout=60, limits=limits) as client:
        await asyncio.gather(*(client_loop(soak, client, number) for number in range(CLIENTS)))


# -- before and after -------------------------------------------------------------------------------------------------


def loop_tasks(running: Running) -> int:
    """Tasks of the server's event loop, this look at them not counted."""
    loop = running.service._loop
    assert loop is not None

    async def count() -> int:
        return len(asyncio.all_tasks()) - 1

    return asyncio.run_coroutine_threadsafe(count(), loop).result(10)


def answers(url: str, specs: list[tuple[str, dict[str, Any]]]) -> list[list[tuple[str, str]]]:
    with httpx.Client(base_url=url, timeout=60) as client:
        found = [client.post(path, json=body) for path, body in specs]
    assert [response.status_code for response in found] == [200] * len(specs), [r.text for r in found][:3]
    return [outcome(response.json()) for response in found]


def state(running: Running) -> tuple[int, int, int]:
    """Tasks, threads and file handles."""
    return loop_tasks(running), threading.active_count(), len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_soak(request: pytest.FixtureRequest) -> None:
    draw = random.Random(0)
    specs = [random_request(draw) for _ in range(SPECS)]
    with serving(engine(budget=0, max_running=1, num_pages=200, prefix_cache=False)) as plain:
        expected = answers(plain.url, specs)
    tested = engine()
    with serving(tested, max_requests=64, timeout_s=30.0, max_body_bytes=20_000) as running:
        assert answers(running.url, specs[:8]) == expected[:8]
        wait_for(lambda: loop_tasks(running) <= 3)
        before = state(running)
        seconds = 60 * request.config.getoption("--soak-minutes")
        soak = Soak(running.url, specs, expected, time.monotonic() + seconds)
        asyncio.run(crowd(soak))
        stats = tested.stats
        nodes = tested.budgets.state().nodes
        request.node.add_report_section(
            "call", "soak", f"{dict(soak.seen)}, {stats}, {nodes} nodes drafted"
        )  # -rP shows it
        assert not soak.wrong, soak.wrong[:5]
        running.wait_idle(30)
        assert answers(running.url, specs) == expected
        running.wait_idle(10)
        tested.check_idle()
        assert (tested.stats.used_pages, tested.stats.running, tested.stats.waiting) == (0, 0, 0)
        wait_for(lambda: all(now <= then for now, then in zip(state(running), before, strict=True)), 20)
        assert stats.preemptions > 0  # the pages did run out
        assert nodes > 0
        assert soak.seen["429"] > 0  # and so did the queue
        assert all(
            soak.seen[kind] > 0 for kind in ("200", "200 streamed", "left", "cancelled", "vanished", "400", "413")
        )
