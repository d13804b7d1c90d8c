"""Shared by the server's tests: a byte tokenizer, an engine that follows a script, a server on a real socket."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import tokenizers

from jetflow_core.budget import BudgetPolicy
from jetflow_core.engine import EngineStats
from jetflow_core.request import Output, Usage
from jetflow_core.sampling import SamplingParams
from jetflow_core.tokenizer import Detokenizer, Tokenizer
from jetflow_serve.app import ServerSettings, create_app
from jetflow_serve.server import Server, bind
from jetflow_serve.service import EngineService

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
END = 257  # <|im_end|>
MODEL = "tiny"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def byte_tokenizer(template: str | None = CHATML) -> Tokenizer:
    """A token a byte, and two control tokens (256 and 257); the second ends a text."""
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    inner.pre_tokenizer = byte_level
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(inner, eos_token_ids=[END], chat_template=template)


@dataclass
class _Running:
    prompt: list[int]
    params: SamplingParams
    script: list[int]
    detokenizer: Detokenizer
    sent: int = 0
    steps: int = 0


@dataclass
class ScriptedEngine:
    """The engine's interface without a model: `script(prompt ids)` gives the tokens, `per_step` of them a step."""

    script: Callable[[list[int]], Sequence[int]] | None = None
    per_step: int = 1
    step_s: float = 0.0
    max_model_len: int = 256
    tokenizer: Tokenizer = field(default_factory=byte_tokenizer)
    before_step: Callable[[], None] = lambda: None
    poison: str | None = None  # error of the next output

    def __post_init__(self) -> None:
        self.running: dict[str, _Running] = {}
        self.budgets = BudgetPolicy()
        self.aborted: list[int] = []  # the number of steps at each abort
        self.steps = 0
        self._made = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, budget: int | None = None) -> str:
        if any(not 0 <= token <= END for token in prompt_ids):
            raise ValueError("prompt holds a token id outside the vocabulary of 258 tokens")
        self._made += 1
        prompt = list(prompt_ids)
        tokens = (
            list(self.script(prompt)) if self.script else [*self.tokenizer.encode("Hello!", allow_special=False), END]
        )
        self.running[f"request-{self._made}"] = _Running(prompt, params, tokens, Detokenizer(self.tokenizer))
        return f"request-{self._made}"

    def abort(self, request_id: str) -> bool:
        self.aborted.append(self.steps)
        return self.running.pop(request_id, None) is not None

    def abort_all(self, reason: str, *, waiting: bool = True) -> list[Output]:
        ended, self.running = self.running, {}
        return [Output(key, [], "", None, reason, Usage(len(r.prompt), r.sent, 0, r.steps)) for key, r in ended.items()]

    @property
    def stats(self) -> EngineStats:
        return EngineStats(0, len(self.running), len(self.running), 0, 99 - len(self.running), 0, 0)

    def step(self) -> list[Output]:
        self.steps += 1
        time.sleep(self.step_s)
        self.before_step()
        return [self._advance(request_id, run) for request_id, run in list(self.running.items())]

    def check_idle(self) -> None:
        assert not self.running

    def _advance(self, request_id: str, run: _Running) -> Output:
        run.steps += 1
        limit = run.params.max_tokens
        if limit is None:
            limit = self.max_model_len - len(run.prompt)
        tokens = run.script[run.sent : min(run.sent + self.per_step, limit)]
        run.sent += len(tokens)
        text = "".join(run.detokenizer.push(token) for token in tokens)
        finish = "stop" if END in tokens else "length" if run.sent >= min(limit, len(run.script)) else None
        if finish:
            text += run.detokenizer.flush()
        error, self.poison = self.poison, None
        if finish or error:
            del self.running[request_id]
        usage = Usage(len(run.prompt), run.sent, max(0, run.sent - run.steps), run.steps)
        return Output(request_id, tokens, text, None if error else finish, error, usage)


@dataclass
class Running:
    """A server on a real socket."""

    url: str
    engine: Any
    service: EngineService
    server: Server

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=20, **options)

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Wait until the engine has nothing left; fails when it takes too long."""
        wait_for(lambda: not self.engine.has_work and self.service.open_requests == 0, seconds)


@contextmanager
def serving(
    engine: Any, max_requests: int = 64, grace_s: float = 5.0, timeout_s: float | None = None, **settings: Any
) -> Iterator[Running]:
    """Serve `engine` on a free port; afterwards the engine must be idle."""
    listener = bind("127.0.0.1", 0)
    service = EngineService(engine, max_requests, timeout_s)
    ready = threading.Event()
    server = Server(create_app(service, ServerSettings(MODEL, **settings)), service, ready.set, grace_s)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    assert ready.wait(10)
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, service, server)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
    assert not thread.is_alive()
    engine.check_idle()


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Poll `condition` until it holds; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[Any]:
    """Parsed data of a stream that ended with [DONE]."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def assert_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    return error["message"]
