"""Answers from an endpoint: a fake one on a real socket with every kind of trouble, and our own server."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_checkpoint import write_checkpoint, write_prompts

from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_core.tokenizer import Tokenizer
from jetflow_core.weights import open_checkpoint
from jetflow_train import endpoint as endpoint_module
from jetflow_train.chats import Chat
from jetflow_train.config import RegenerateOptions
from jetflow_train.endpoint import Choice, Endpoint, Unusable, end_token, read_answer, read_message, side_by_side
from jetflow_train.regenerate import answer, regenerate, row_seed
from serve.support import serving

Reply = tuple[int, dict[str, str], bytes]
PARAMS = SamplingParams(max_tokens=8)


def reply(value: object, status: int = 200, **headers: str) -> Reply:
    return status, headers, json.dumps(value).encode()


def says(text: str, reason: str = "stop", **more: object) -> Reply:
    return reply({"choices": [{"text": text, "finish_reason": reason, **more}]})


def trouble(status: int, message: str = "no", **headers: str) -> Reply:
    return reply({"error": {"message": message}}, status, **headers)


@dataclass
class Fake:
    """What the server is told to say, and what it was asked."""

    url: str = ""
    script: Callable[[dict[str, Any]], Reply | None] = lambda body: says("w5 w6")
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[Any] = field(default_factory=list[Any])
    running: int = 0
    most: int = 0


@contextmanager
def fake_endpoint() -> Iterator[Fake]:
    fake, lock = Fake(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(reply({"data": [{"id": "the-target"}]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                fake.bodies.append(body)
                fake.headers.append(self.headers)
                fake.running += 1
                fake.most = max(fake.most, fake.running)
            said = fake.script(body)
            with lock:
                fake.running -= 1
            if said is not None:  # None: hang up
                self._answer(said)

        def _answer(self, said: Reply) -> None:
            status, headers, content = said
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def fake() -> Iterator[Fake]:
    with fake_endpoint() as made:
        yield made


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def tokenizer(target: str) -> Tokenizer:
    found = open_checkpoint(target).tokenizer
    assert found is not None
    return found


def options(folder: Path, fake: Fake, target: str, **changes: object) -> RegenerateOptions:
    made = RegenerateOptions(
        target=target,
        prompts=(write_prompts(folder / "prompts.jsonl", 4),),
        output=str(folder / "rows.jsonl"),
        endpoint=fake.url,
        max_tokens=8,
        max_length=100,
        retries=2,
        timeout=10.0,
    )
    return replace(made, **changes)  # pyright: ignore[reportArgumentType]


def written(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return {(row["id"], row["temperature"], row["sample"]): row for row in rows}


def plain(fake: Fake, retries: int = 2, timeout: float = 10.0, waits: list[float] | None = None) -> Endpoint:
    noted: list[float] = [] if waits is None else waits
    return Endpoint(fake.url, "m", None, retries, timeout, noted.append)


# -- what goes out, what comes back -----------------------------------------------------------------------------------


def test_text_becomes_rows(tmp_path: Path, fake: Fake, target: str) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    fake.script = lambda body: says("w5 w6") if body["temperature"] == 0 else says("w7 w8 w9", "length")
    chosen = options(
        tmp_path, fake, target, temperature=(0.0, 0.8), samples=2, top_p=0.9, top_k=5, api_key_file=str(key)
    )
    assert regenerate(chosen) == 4 * 3
    rows = written(tmp_path)
    assert rows["p/1", 0.0, 0]["output_ids"] == [5, 6, 2]  # the end token, which the text does not show
    assert rows["p/1", 0.8, 1]["output_ids"] == [7, 8, 9]  # cut off: there was none
    assert rows["p/1", 0.8, 1]["finish_reason"] == "length"
    assert rows["p/1", 0.8, 1]["prompt_ids"] == [1, 8, 20, 3]
    asked = {body.get("seed"): body for body in fake.bodies if body["prompt"] == [1, 8, 20, 3]}
    seed = row_seed(0, "p/1", 0.8, 1)
    assert asked[seed] == {
        "model": "the-target",
        "prompt": [1, 8, 20, 3],
        "max_tokens": 8,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 5,
        "seed": seed,
        "return_token_ids": True,
    }
    assert "top_p" not in asked[None]
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}


def test_requests_run_side_by_side_up_to_the_batch_size(tmp_path: Path, fake: Fake, target: str) -> None:
    together = threading.Barrier(3)

    def meet(body: dict[str, Any]) -> Reply:
        together.wait(10)
        return says("w5")

    fake.script = meet
    assert regenerate(options(tmp_path, fake, target, batch_size=3, temperature=(0.0, 0.1, 0.2))) == 12
    assert fake.most == 3


def test_token_ids_are_taken_where_they_come(tokenizer: Tokenizer) -> None:
    end = end_token(tokenizer)
    assert end == 2
    assert read_answer(tokenizer, Choice("w5 w6", "stop", [5, 6, 2]), end) == ([5, 6, 2], "stop")
    assert read_answer(tokenizer, Choice("anything", "stop", [5, 6]), end) == ([5, 6, 2], "stop")
    assert read_answer(tokenizer, Choice("", "stop", None), end) == ([2], "stop")
    assert read_answer(tokenizer, Choice("w5", "length", None), end) == ([5], "length")


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (Choice("w5  w6", "stop", None), "does not come back"),
        (Choice("w5 unheard", "stop", None), "does not come back"),
        (Choice("w5 \ufffd", "stop", None), "does not come back"),
        (Choice("w5", "content_filter", None), "'content_filter'"),
        (Choice("w5", None, None), "None"),
        (Choice("w5", "stop", [5, 97]), "does not know"),
        (Choice("w5 \ud800", "stop", None), "surrogate"),
    ],
)
def test_answers_that_are_no_rows(tokenizer: Tokenizer, choice: Choice, reason: str) -> None:
    result = read_answer(tokenizer, choice, 2)
    assert isinstance(result, Unusable)
    assert reason in result.reason


def test_the_end_token_is_the_templates(tokenizer: Tokenizer) -> None:
    several = Tokenizer(
        tokenizer._inner,  # pyright: ignore[reportPrivateUsage]
        eos_token_ids=[9, 2, 8],
        chat_template="{% for m in messages %}{{ m.content }} w2 {% endfor %}",
    )
    assert end_token(several) == 2
    assert end_token(Tokenizer(tokenizer._inner)) is None  # pyright: ignore[reportPrivateUsage]


def test_rows_that_do_not_fit_are_told_of_and_asked_again(tmp_path: Path, fake: Fake, target: str) -> None:
    fake.script = lambda body: says("w5  w6") if body["prompt"][1] in (8, 9) else says("w5")
    notes: list[str] = []
    seen: list[tuple[int, int, int]] = []
    assert regenerate(options(tmp_path, fake, target), lambda *row: seen.append(row), notes.append) == 2
    assert notes.pop(0) == f"the-target answers at {fake.url}"
    assert sorted(notes)[1:] == [
        "row p/1 is left out: its text does not come back from the target's tokens",
        "row p/2 is left out: its text does not come back from the target's tokens",
    ]
    assert "2 of 4 rows are left out" in notes[-1]
    assert [done for done, _, _ in seen] == [0, 1, 2, 3, 4]
    fake.script = lambda body: says("w6")
    assert regenerate(options(tmp_path, fake, target)) == 2
    assert {key[0] for key in written(tmp_path)} == {"p/0", "p/1", "p/2", "p/3"}


def test_a_model_that_is_not_the_target_ends_the_run(tmp_path: Path, fake: Fake, target: str) -> None:
    fake.script = lambda body: says("another model's words")
    with pytest.raises(
        ValueError, match=r"/v1: none of 4 answers is a row; is it the target \(.*model\) that is served"
    ):
        regenerate(options(tmp_path, fake, target))


# -- trouble ----------------------------------------------------------------------------------------------------------


def test_trouble_that_passes_is_waited_out(fake: Fake) -> None:
    script = iter(
        [
            trouble(429, Retry_After="7"),
            trouble(503, Retry_After="soon"),
            None,
            (200, {}, b"half a"),
            (200, {}, b"[" * 100_000),
            (500, {"Content-Length": "1000"}, b"cut off"),
            says("w5"),
        ]
    )
    fake.script = lambda body: next(script)
    waits: list[float] = []
    assert plain(fake, retries=6, waits=waits).complete([1], PARAMS).text == "w5"
    assert len(waits) == 6
    assert waits[0] == 7.0  # what the endpoint asks for
    for attempt in range(1, 6):
        assert 0.5 * 2**attempt / 2 <= waits[attempt] <= 0.5 * 2**attempt


def test_trouble_that_stays_ends_the_run_and_keeps_the_rows(tmp_path: Path, fake: Fake, target: str) -> None:
    fake.script = lambda body: trouble(500, "out of order") if body["prompt"][1] == 9 else says("w5")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(endpoint_module, "FIRST_WAIT", 0.0)
        with pytest.raises(ValueError, match=r"/v1/completions: answered 500: out of order \(3 tries\)"):
            regenerate(options(tmp_path, fake, target, batch_size=1))
    assert {key[0] for key in written(tmp_path)} == {"p/0", "p/1"}
    asked = len(fake.bodies)
    fake.script = lambda body: says("w5")
    assert regenerate(options(tmp_path, fake, target)) == 2
    assert len(fake.bodies) == asked + 2


def test_an_endpoint_that_is_too_slow_or_gone(fake: Fake) -> None:
    fake.script = lambda body: (time.sleep(0.3), says("w5"))[1]
    with pytest.raises(ValueError, match=r"cannot be reached: .*timed out.*\(2 tries\)"):
        plain(fake, retries=1, timeout=0.05).complete([1], PARAMS)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]  # and then nobody's
    with pytest.raises(ValueError, match=r"/models: cannot be reached: .*refused.*\(1 tries\)"):
        Endpoint(f"http://127.0.0.1:{port}/v1", None, None, 0, 1.0)


@pytest.mark.parametrize(
    "said", [b"\x00\x1b[31m garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]
)
def test_what_is_no_http_is_called_so(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer_once() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(said)

        threading.Thread(target=answer_once, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with pytest.raises(ValueError, match=r"/models: does not speak HTTP as it should: \w+ .*\(1 tries\)") as caught:
            Endpoint(url, None, None, 0, 10.0)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("status", ["200 OK", "503 Busy"])
def test_an_answer_that_never_ends_is_given_up(status: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.recv(1 << 16)
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 1000000\r\n\r\n".encode())
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.01)

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with pytest.raises(
            ValueError, match=r"/completions: (cannot be reached: timed out|answered 503:) .*\(1 tries\)"
        ):
            Endpoint(url, "m", None, 0, 0.3).complete([1], PARAMS)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (trouble(400, "prompt too long"), "answered 400: prompt too long"),
        (trouble(401, "no such key"), "answered 401: no such key"),
        ((404, {}, b"<html>" + b"x" * 1000), "answered 404: <html>x{294}$"),
        (reply({"choices": []}), "has no choices"),
        (reply([1]), "has no choices"),
        (reply({"choices": ["w5"]}), "choice is str"),
        (reply({"choices": [{"text": None}]}), "text is NoneType"),
        ((307, {"Location": "http://127.0.0.1:9/"}, b""), "answered 307"),
        ((400, {"Content-Length": "1000"}, b"cut off"), r"answered 400: cut off$"),
        (trouble(400, "two\nlines \x1b[31mred"), r"answered 400: two lines \[31mred$"),
    ],
)
def test_refusals_are_not_tried_again(fake: Fake, said: Reply, message: str) -> None:
    fake.script = lambda body: said
    with pytest.raises(ValueError, match=message):
        plain(fake).complete([1], PARAMS)
    assert len(fake.bodies) == 1


def test_token_ids_are_not_asked_for_where_that_is_unknown(fake: Fake) -> None:
    fake.script = lambda body: (
        trouble(400, "return_token_ids: unknown field") if "return_token_ids" in body else says("w5", token_ids="none")
    )
    strict = plain(fake)
    assert strict.complete([1], PARAMS) == Choice("w5", "stop", None)
    assert strict.complete([1], PARAMS) == Choice("w5", "stop", None)
    assert ["return_token_ids" in body for body in fake.bodies] == [True, False, False]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host/v1",
        "http:///v1",
        "http://host:port/v1",
        "http://host:99999/v1",
        "http://[::1/v1",
        "http://ho st/v1",
        "http://höst/v1",
        "http://host/v1\n",
    ],
)
def test_urls_that_cannot_be_used_are_not_tried(url: str) -> None:
    with pytest.raises(ValueError, match="is no URL: give http://host:port/v1"):
        Endpoint(url, "m", None, 0, 1.0)


def test_keys_that_cannot_be_used(tmp_path: Path, fake: Fake) -> None:
    for content in ("", "two\nlines", "schlüssel"):
        (tmp_path / "key").write_text(content)
        with pytest.raises(ValueError, match="key: holds no API key"):
            Endpoint(fake.url, "m", str(tmp_path / "key"), 0, 1.0)
    with pytest.raises(ValueError, match="nothing: cannot read the API key"):
        Endpoint(fake.url, "m", str(tmp_path / "nothing"), 0, 1.0)


def test_one_failure_stops_the_other_workers(fake: Fake) -> None:
    fake.script = lambda body: trouble(400, "no") if body["prompt"] == [3] else says("w5")
    tasks = [partial(plain(fake).complete, [number], PARAMS) for number in range(200)]
    with pytest.raises(ValueError, match="answered 400: no"):
        list(side_by_side(tasks, 2))
    assert len(fake.bodies) < 200


# -- chats ------------------------------------------------------------------------------------------------------------


def message(reason: str = "stop", **fields: object) -> Reply:
    return reply({"choices": [{"finish_reason": reason, "message": {"role": "assistant", **fields}}]})


THINKING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w3 {% if loop.last %}<think> {{ m.reasoning_content or '' }} </think> "
    "{% endif %}{{ m.content }} {% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.x }} {% endfor %}"
    "w2 {% else %}w1 {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}w3{% endif %}"
    "{% if tools and enable_thinking %}{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tokenizer: Tokenizer) -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(tokenizer._inner.to_str())  # pyright: ignore[reportPrivateUsage]
    inner.add_tokens(["<think>", "</think>"])
    return Tokenizer(inner, eos_token_ids=[2], chat_template=THINKING)


def test_a_conversation_goes_out_as_it_is(fake: Fake) -> None:
    call = {"type": "function", "id": "c", "function": {"name": "w9", "arguments": {"x": "w8"}}}
    tools = [{"type": "function", "function": {"name": "w9"}}]
    said = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    fake.script = lambda body: message(content="w6", reasoning_content="w7", refusal=None)
    choice = plain(fake).chat(Chat(said, tools, {"enable_thinking": True}), SamplingParams(max_tokens=8))
    assert choice.message == {"role": "assistant", "content": "w6", "reasoning_content": "w7"}
    sent = fake.bodies[0]
    assert sent["messages"][1]["tool_calls"][0]["function"] == {"name": "w9", "arguments": '{"x": "w8"}'}
    assert (sent["tools"], sent["chat_template_kwargs"]) == (tools, {"enable_thinking": True})
    assert said[1]["tool_calls"] == [call]  # left as it was


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        (message(content="w5 w6"), "<think> </think> w5 w6 w2"),
        (message(content="w5", reasoning_content="w7"), "<think> w7 </think> w5 w2"),
        (
            message("tool_calls", tool_calls=[{"function": {"name": "w9", "arguments": '{"x": "w8"}'}}]),
            "<think> </think> w9 w8 w2",
        ),
        (message("length", content="w5 w6"), "<think> </think> w5 w6"),
    ],
)
def test_a_message_is_spelled_by_the_template(thinker: Tokenizer, fake: Fake, answered: Reply, expected: str) -> None:
    fake.script = lambda body: answered
    asked = Chat([{"role": "user", "content": "w4"}])
    prompt = asked.encode(thinker, opened=True)
    result = read_message(thinker, asked, prompt, plain(fake).chat(asked, PARAMS))
    assert not isinstance(result, Unusable)
    assert result[0] == thinker.encode(expected, allow_special=True)


@pytest.mark.parametrize(
    ("answered", "reason"),
    [
        (message("content_filter", content="w5"), "'content_filter'"),
        (message("length", reasoning_content="w5"), "cut off"),
        (message(content="w5 \ufffd"), "no characters"),
        (message(tool_calls=[{"function": {"name": "w9", "arguments": "{"}}]), "not JSON"),
        (message(tool_calls=5), "'tool_calls' must be a list"),
        (message(content="w5 \ud800"), "surrogate"),
    ],
)
def test_messages_that_are_no_rows(thinker: Tokenizer, fake: Fake, answered: Reply, reason: str) -> None:
    fake.script = lambda body: answered
    asked = Chat([{"role": "user", "content": "w4"}])
    result = read_message(thinker, asked, asked.encode(thinker, opened=True), plain(fake).chat(asked, PARAMS))
    assert isinstance(result, Unusable)
    assert reason in result.reason


def test_a_prompt_that_an_answer_changes_is_no_row(thinker: Tokenizer, fake: Fake) -> None:
    fake.script = lambda body: message(content="w6")
    asked = Chat([{"role": "user", "content": "w4"}])
    result = read_message(thinker, asked, [1, 5, 3], plain(fake).chat(asked, PARAMS))
    assert isinstance(result, Unusable)
    assert "differently" in result.reason


def test_a_chat_without_a_message_is_refused(fake: Fake) -> None:
    with pytest.raises(ValueError, match="/chat/completions: the answer's choice has no message"):
        plain(fake).chat(Chat([{"role": "user", "content": "w4"}]), PARAMS)


# -- the real thing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_our_own_server_makes_the_rows_of_our_own_engine(tmp_path: Path, target: str, api: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    changes: dict[str, Any] = {"temperature": (0.0, 0.9), "samples": 2, "top_k": 20, "max_tokens": 24}
    if api == "completions":  # this template hides in a conversation how its prompt was opened: no way back from a chat
        changes["thinking"] = False
    llm = LLM.load(target)
    chosen = options(here, Fake("http://unused/v1"), target, **changes)
    answer(llm, replace(chosen, endpoint=None))
    with serving(LLM.load(target).engine) as running:
        assert regenerate(options(there, Fake(f"{running.url}/v1"), target, endpoint_api=api, **changes)) == 12
    assert written(here) == written(there)
    assert {row["finish_reason"] for row in written(here).values()} == {"stop", "length"}
