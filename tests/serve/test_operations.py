"""The server as whoever runs it sees it: readiness, limits, keys, logs, and the ways a request or the server can end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetflow_core.engine import Engine, EngineConfig
from jetflow_core.request import Output
from jetflow_core.sampling import SamplingParams
from jetflow_serve import server as server_module
from jetflow_serve.logs import JsonFormatter, TextFormatter
from jetflow_serve.service import EngineService, Job
from serve.support import Running, ScriptedEngine, byte_tokenizer, serving, wait_for
from tiny import tiny_head, tiny_model

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 240}


def endless(step_s: float = 0.01) -> ScriptedEngine:
    return ScriptedEngine(lambda _: [1] * 250, step_s=step_s)


def tiny_engine(**limits: Any) -> Engine:
    """A real engine in float32 with random weights."""
    model = tiny_model(vocab_size=258)
    head = tiny_head(model)
    head.pack()
    config = {
        "budget": 4,
        "page_size": 4,
        "num_pages": 80,
        "max_running": 4,
        "max_batch_tokens": 64,
        "max_model_len": 128,
    }
    return Engine(model, byte_tokenizer(), head, EngineConfig(**(config | limits)))


def error_of(response: httpx.Response) -> dict[str, Any]:
    return response.json()["error"]


def last_error(lines: list[str]) -> dict[str, Any]:
    return json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]


def signal_to(running: Running, number: int) -> None:
    """What a signal does, in the event loop's thread, where a process would get it."""
    loop = running.service._loop
    assert loop is not None
    loop.call_soon_threadsafe(running.server.handle_exit, number, None)


# -- readiness --------------------------------------------------------------------------------------------------------


def test_everyone_is_told_to_wait_while_the_model_is_loaded() -> None:
    with server_module.bind("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with server_module._answering_not_ready(listener):
            for path in ("/ready", "/health", "/v1/models"):
                response = httpx.get(url + path)
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) >= 1
                assert "loaded" in error_of(response)["message"]
        assert listener.fileno() >= 0  # the server itself listens here next


def test_a_server_whose_steps_keep_failing_is_not_ready_until_one_works() -> None:
    broken = [True]

    def step() -> None:
        if broken[0]:
            raise RuntimeError("no memory")

    with serving(ScriptedEngine(before_step=step)) as running, running.client() as client:
        for number in range(3):
            assert client.get("/ready").status_code == 200, number
            assert client.post(TEXT, json=LONG).status_code == 500
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200  # the process is not to be killed
        broken[0] = False
        assert client.post(TEXT, json=LONG).status_code == 200
        assert client.get("/ready").status_code == 200


def test_an_engine_that_is_gone_is_neither_ready_nor_healthy() -> None:
    def step() -> None:
        engine.abort_all = lambda *_, **__: 1 // 0  # type: ignore[assignment]
        raise RuntimeError("gone")

    engine = ScriptedEngine(before_step=step)
    with serving(engine) as running, running.client() as client:
        response = client.post(TEXT, json=LONG)
        assert response.status_code == 503
        assert "engine stopped" in error_of(response)["message"]
        wait_for(lambda: not running.service.alive)
        for path in ("/ready", "/health"):
            assert client.get(path).status_code == 503
        assert client.post(TEXT, json=LONG).status_code == 503
        engine.running.clear()


# -- stopping ---------------------------------------------------------------------------------------------------------


def test_a_draining_server_finishes_what_runs_and_refuses_what_comes() -> None:
    told = threading.Event()
    engine = ScriptedEngine(before_step=lambda: engine.steps < 3 or told.wait())
    with serving(engine, grace_s=20.0) as running, running.client() as client, running.client() as other:
        with client.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            signal_to(running, signal.SIGTERM)
            wait_for(lambda: not running.service.ready)
            assert other.get("/ready").status_code == 503
            assert other.get("/health").status_code == 200
            response = other.post(TEXT, json=LONG)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            told.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        wait_for(lambda: not running.service.alive)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("twice", [True, False])
def test_what_runs_too_long_is_cut_with_a_reason(stream: bool, twice: bool) -> None:
    """At the end of the grace period, or at the second signal."""
    engine = endless(step_s=0.05)
    with serving(engine, grace_s=60.0 if twice else 0.3) as running, running.client() as client:
        answers: list[httpx.Response] = []
        body = LONG | {"stream": stream}
        thread = threading.Thread(target=lambda: answers.append(client.post(TEXT, json=body)))
        thread.start()
        wait_for(lambda: engine.steps >= 2)
        signal_to(running, signal.SIGTERM)
        if twice:
            signal_to(running, signal.SIGINT)
        thread.join(20)
        assert engine.steps < 200
    answer = answers[0]
    assert answer.status_code == (200 if stream else 503)
    error = last_error(answer.text.split("\n\n")) if stream else error_of(answer)
    assert error["code"] == "shutting_down"
    assert ("at once" if twice else "shutting down") in error["message"]


PROCESS = """
import sys, threading
sys.path.insert(0, {tests!r})
from serve.support import MODEL, ScriptedEngine
from jetflow_serve.app import ServerSettings, create_app
from jetflow_serve.server import Server, bind
from jetflow_serve.service import EngineService
listener = bind("127.0.0.1", 0)
service = EngineService(ScriptedEngine(lambda _: [1] * 250, step_s=0.02))
say = lambda: print(listener.getsockname()[1], flush=True)
Server(create_app(service, ServerSettings(MODEL)), service, say, 30.0).run(sockets=[listener])
print("ended", flush=True)
"""


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT, signal.SIGTERM]])
def test_a_signalled_process_ends_with_status_0(signals: list[signal.Signals]) -> None:
    source = PROCESS.format(tests=str(Path(__file__).parents[1]))
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        body = {"prompt": "a", "max_tokens": 30 if len(signals) == 1 else 250, "stream": True}
        with httpx.Client(base_url=url, timeout=30) as client, client.stream("POST", TEXT, json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            for number in signals:
                process.send_signal(number)
            rest = [line for line in lines if line]
        if len(signals) == 1:
            assert rest[-1] == "data: [DONE]"
        else:
            assert last_error(rest)["code"] == "shutting_down"
        assert process.stdout.read() == "ended\n"
        assert process.wait(20) == 0


# -- requests that end early ------------------------------------------------------------------------------------------


def raw_post(running: Running, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    content = json.dumps(body).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", int(running.url.rsplit(":", 1)[1])))
    connection.sendall(head.encode() + content)
    return connection


class Stepped:
    """Makes an engine wait before every step until the test lets it go on."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.taken, self.free = engine, 0, False
        self._permits = threading.Semaphore(0)
        self._honest = engine.step
        engine.step = self._step  # type: ignore[method-assign]

    def _step(self) -> Any:
        if not self.free:
            self._permits.acquire()
        self.taken += 1
        return self._honest()

    def until(self, condition: Callable[[], bool]) -> None:
        """Let single steps pass until `condition` holds."""

        def holds() -> bool:
            if not condition():
                self._permits.release()
            return condition()

        wait_for(holds)

    def go(self) -> None:
        self.free = True
        self._permits.release()


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_hang_up_give_back_their_pages_within_a_step(stream: bool) -> None:
    """Running and waiting ones, with a real engine."""
    engine = tiny_engine(max_running=2, prefix_cache=False)
    steps = Stepped(engine)
    with serving(engine) as running:
        body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "stream": stream}
        connections = [raw_post(running, body) for _ in range(3)]
        steps.until(lambda: engine.stats.running == 2 and engine.stats.waiting == 1)
        assert engine.stats.used_pages > 0
        for connection in connections:
            connection.close()
        wait_for(lambda: running.service.open_requests == 0)
        before = steps.taken
        steps.go()
        wait_for(lambda: not engine.has_work)
        assert steps.taken <= before + 1  # the one under way
        assert (engine.stats.used_pages, engine.stats.running, engine.stats.waiting) == (0, 0, 0)
        with running.client() as client:
            assert client.post(TEXT, json={"prompt": "hello", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_that_takes_too_long_ends_with_a_reason(stream: bool) -> None:
    engine = endless(step_s=0.02)
    with serving(engine, timeout_s=0.3) as running, running.client() as client:
        response = client.post(TEXT, json=LONG | {"stream": stream})
        assert response.status_code == (200 if stream else 504)
        error = last_error(response.text.split("\n\n")) if stream else error_of(response)
        assert error["code"] == "request_timeout"
        assert "0.3 s" in error["message"]
        running.wait_idle()
        assert client.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_waiting_counts_toward_the_timeout() -> None:
    """A request that never got a place ends in time and leaves the queue."""
    engine = tiny_engine(max_running=1)
    steps = Stepped(engine)
    with serving(engine, timeout_s=2.0) as running, running.client() as client:
        with raw_post(running, {"prompt": "first", "max_tokens": 50}):
            steps.until(lambda: engine.stats.running == 1)
            assert error_of(client.post(TEXT, json={"prompt": "b", "max_tokens": 2}))["code"] == "request_timeout"
            steps.go()
        running.wait_idle()
        assert engine.stats.waiting == 0


def test_a_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetflow_serve.app.SEND_GRACE_S", 0.2)

    class Flood(ScriptedEngine):
        """Far more text than a connection takes without a reader."""

        def step(self) -> list[Output]:
            return [replace(output, text="x" * 500_000) for output in super().step()]

    engine = Flood(lambda _: [1] * 250, step_s=0.02)
    with serving(engine, timeout_s=1.0) as running, raw_post(running, LONG | {"stream": True}):
        wait_for(lambda: running.service.open_requests == 1)
        wait_for(lambda: running.service.open_requests == 0, 15)


def test_a_request_whose_logits_are_no_numbers_fails_alone() -> None:
    """Its neighbours get the text they get alone, and the server goes on."""
    engine = tiny_engine()
    with torch.no_grad():
        engine.model.embed[200] = float("nan")
    with serving(engine) as running, running.client() as client:
        body = {"prompt": "neighbour", "max_tokens": 24, "temperature": 0, "logit_bias": {"200": -100}}
        alone = client.post(TEXT, json=body).json()["choices"][0]["text"]
        answers: list[httpx.Response] = []
        poisoned = {"prompt": [1, 200, 3], "max_tokens": 24, "temperature": 0}
        threads = [
            threading.Thread(target=lambda own=own: answers.append(client.post(TEXT, json=own)))
            for own in (body, poisoned, body, poisoned)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(answer.status_code for answer in answers) == [200, 200, 500, 500]
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == alone
            else:
                assert "not finite" in error_of(answer)["message"]
        assert client.post(TEXT, json=body).json()["choices"][0]["text"] == alone
        assert client.get("/ready").status_code == 200


def test_a_failed_step_ends_what_ran_and_keeps_what_waited() -> None:
    engine = tiny_engine(max_running=1)
    honest, failed = engine.step, []

    def step() -> Any:
        if not failed and engine.stats.waiting == 1 and engine.stats.running == 1:
            failed.append(True)
            raise RuntimeError("bad kernel")
        return honest()

    engine.step = step  # type: ignore[method-assign]
    with serving(engine) as running, running.client() as client:
        body = {"prompt": "hello", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
        with raw_post(running, body):
            wait_for(lambda: running.service.open_requests == 1)
            answer = client.post(TEXT, json=body)
            assert answer.status_code == 200, answer.text
        assert failed


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_full_queue_says_when_to_come_back() -> None:
    with serving(endless(), max_requests=2) as running, running.client() as client:
        service = running.service
        service._mean_s = 9.0  # what generations take here
        with raw_post(running, LONG | {"n": 2}):
            wait_for(lambda: service.open_requests == 2)
            response = client.post(TEXT, json=LONG)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "5"  # two places in 9 s
            assert error_of(response) | {"message": ""} == {
                "message": "", "type": "rate_limit_error", "param": None, "code": "queue_full",
            }  # fmt: skip


def test_every_key_opens_everything_and_no_key_only_health() -> None:
    with serving(ScriptedEngine(), api_keys=("first", "second")) as running, running.client() as client:
        for path in ("/v1/models", "/metrics", "/docs", "/openapi.json", "/nowhere"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers={"Authorization": "Bearer third"}).status_code == 401
            assert client.get(path, headers={"Authorization": "first"}).status_code == 401
        for key in ("first", "second"):
            assert client.get("/metrics", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200


def test_cors_is_off_unless_an_origin_is_named() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with serving(ScriptedEngine()) as running, running.client() as client:
        assert client.options(CHAT, headers=asked).status_code == 405
        assert "access-control-allow-origin" not in client.get("/health", headers=asked).headers
    page = ("https://a.example",)
    with serving(ScriptedEngine(), cors_origins=page, api_keys=("k",)) as running, running.client() as client:
        preflight = client.options(CHAT, headers=asked | {"Access-Control-Request-Headers": "authorization"})
        assert preflight.status_code == 200  # a preflight carries no key
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        other = client.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        refused = client.post(CHAT, json={}, headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"  # the page may read why


# -- logs -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "jetflow_serve")

    def logged() -> list[dict[str, Any]]:
        return [json.loads(JsonFormatter().format(r)) for r in caplog.records if r.name == "jetflow_serve.requests"]

    return logged


def test_one_line_a_request_without_its_text(lines: Any) -> None:
    secret = "xyzzy"
    engine = ScriptedEngine(per_step=3)
    with serving(engine) as running, running.client() as client:
        body = {"messages": [{"role": "user", "content": secret}]}
        first = client.post(CHAT, json=body, headers={"x-request-id": "mine-1"})
        assert first.headers["x-request-id"] == "mine-1"
        second = client.post(CHAT, json=body | {"stream": True})
        assert client.post(TEXT, json={"prompt": secret, "nonsense": secret}).status_code == 400
        wait_for(lambda: len(lines()) == 3)
    whole, streamed, refused = lines()
    assert whole["id"] == "mine-1"
    assert streamed["id"] == second.headers["x-request-id"] != ""
    for line in (whole, streamed):
        assert line["message"] == "request"
        assert (line["method"], line["path"], line["status"], line["finish"]) == ("POST", CHAT, 200, "stop")
        assert (line["completion_tokens"], line["acceptance_length"]) == (7, 2.33)
        assert line["prompt_tokens"] > 0
        assert 0 < line["ttft_s"] <= line["seconds"]
    assert refused["status"] == 400
    assert secret not in json.dumps(lines())


def test_prompts_are_logged_where_asked_for(lines: Any) -> None:
    with serving(ScriptedEngine(), log_prompts=True) as running, running.client() as client:
        client.post(TEXT, json={"prompt": ["one", "two"], "n": 2})
        wait_for(lambda: len(lines()) == 1)
    assert lines()[0]["prompts"] == ["one", "two"]


def test_failures_and_leavers_have_their_line(lines: Any) -> None:
    engine = endless()
    with serving(engine, timeout_s=0.3) as running, running.client() as client:
        client.post(TEXT, json=LONG)
        with raw_post(running, LONG):
            wait_for(lambda: running.service.open_requests == 1)
        wait_for(lambda: len(lines()) == 2)
    timed_out, gone = lines()
    assert (timed_out["status"], timed_out["finish"]) == (504, "request_timeout")
    assert "0.3 s" in timed_out["error"]
    assert gone["finish"] == "cancelled"


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "é", "a\tb"])
def test_unusable_request_ids_are_replaced(name: str) -> None:
    with serving(ScriptedEngine()) as running, running.client() as client:
        headers = {"x-request-id": name.encode("latin-1")}
        given = client.get("/health", headers=headers).headers["x-request-id"]
    assert len(given) == 32
    assert given != name


def test_text_lines_cannot_be_forged() -> None:
    record = logging.LogRecord("n", logging.INFO, "f", 1, "request", None, None)
    record.fields = {"path": "/a\nb status=200", "id": "x-1", "status": 404, "prompts": ["p q"]}
    line = TextFormatter().format(record)
    assert "\n" not in line
    assert line.endswith('info request path="/a\\nb status=200" id=x-1 status=404 prompts=["p q"]')
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: why" in TextFormatter().format(record)
    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["traceback"]


# -- no request changes another ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> Engine:
    """Small enough that a few requests exhaust the pages and preempt each other."""
    return tiny_engine(num_pages=24, max_model_len=64)


@cache
def plain() -> Engine:
    return tiny_engine(budget=0, max_model_len=64, prefix_cache=False)


@cache
def alone(spec: tuple[str, int, float, int]) -> list[int]:
    """The tokens a request gets from an engine that serves nothing else, does not speculate and remembers nothing."""
    engine = plain()
    engine.add(*job_of(spec))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


def job_of(spec: tuple[str, int, float, int]) -> tuple[list[int], SamplingParams]:
    prompt, limit, temperature, seed = spec
    ids = byte_tokenizer().encode(prompt, allow_special=False)
    return ids, SamplingParams(max_tokens=limit, temperature=temperature, seed=seed)


specs = st.tuples(
    st.sampled_from(["a", "hello", "hello world, how", "x" * 30, "the quick brown fox jumps over"]),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.8]),
    st.integers(0, 2),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(specs, st.integers(0, 4), st.sampled_from([0, 0, 0, 1, 3])), min_size=1, max_size=8))
def test_any_interleaving_gives_each_request_what_it_gets_alone(
    shared: Engine, clients: list[tuple[tuple[str, int, float, int], int, int]]
) -> None:
    """Each client waits some turns, sends its request, and reads to the end or leaves after some outputs."""

    async def client(service: EngineService, spec: Any, turns: int, leave_after: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0.004)
        ids, params = job_of(spec)
        generation = await service.submit([Job(ids, params)])
        tokens: list[int] = []
        try:
            async for _, output in generation:
                tokens += output.token_ids
                leave_after -= 1
                if leave_after == 0:
                    return
            assert tokens == alone(spec)
        finally:
            service.cancel(generation)

    async def body() -> None:
        service = EngineService(shared)
        service.start()
        try:
            await asyncio.gather(*(client(service, *entry) for entry in clients))
        finally:
            service.stop()
            await service.join()

    for spec, _, _ in clients:
        alone(spec)
    asyncio.run(body())
    shared.check_idle()


def test_nothing_is_left_open() -> None:
    """Threads and file handles after a server's life are those before it."""

    def handles() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        with serving(endless()) as running, running.client() as client:
            client.post(TEXT, json={"prompt": "a", "max_tokens": 3})
            with raw_post(running, LONG):
                wait_for(lambda: running.service.open_requests == 1)

    once()
    before = handles(), threading.active_count()
    once()
    assert (handles(), threading.active_count()) <= before
