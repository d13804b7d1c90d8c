"""Answers from an OpenAI-compatible endpoint that serves the target: vLLM, SGLang, llama.cpp, jetflow-serve.

A prompt goes out as token ids to `/completions`, so the endpoint reads exactly the prompt that training will show, whatever
template it has. Token ids are used where they come back (vLLM's `return_token_ids`); text is tokenised again and
refused where that loses something. Endpoints that know chats only get the messages (`/chat/completions`), and the message that
comes back goes through the target's chat template: the template's spelling of thinking and tool calls stands for the
model's own. The standard library does the HTTP: a request lasts seconds, so a pool of connections would gain nothing.
"""

from __future__ import annotations

import http.client
import json
import queue
import random
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from jetflow_core.sampling import SamplingParams
from jetflow_core.tokenizer import REPLACEMENT, Tokenizer
from jetflow_train.chats import Chat, chat_tokens, read_chat

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})  # statuses of trouble that passes
FIRST_WAIT, LONGEST_WAIT = 0.5, 60.0  # seconds between tries, doubling
MAX_ERROR = 300  # characters of an endpoint's complaint that are shown
WITH_IDS = "return_token_ids"


@dataclass(frozen=True)
class Choice:
    """One answer as it comes: its text, why it ended, its token ids where the endpoint tells them, a chat's message."""

    text: str
    finish_reason: str | None
    token_ids: list[int] | None = None
    message: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Unusable:
    """An answer that no row can be made of, and why."""

    reason: str


class _Passing(Exception):
    """Trouble that a later try may not have; `wait` is what the endpoint asks for, in seconds."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it could carry the key to another host."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        """Follow nothing."""


class Endpoint:
    """Speaks to `url` (".../v1"). Safe to use from several threads. `sleep` takes seconds.

    Raises ValueError for a URL, a key file or a model that cannot be used.
    """

    def __init__(
        self,
        url: str,
        model: str | None,
        api_key_file: str | None,
        retries: int,
        timeout: float,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        _check_url(url)
        self._url = url.rstrip("/")
        self._retries, self._timeout, self._sleep = retries, timeout, sleep
        self._headers = {"Content-Type": "application/json"}
        if api_key_file is not None:
            self._headers["Authorization"] = f"Bearer {_read_key(api_key_file)}"
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._with_ids = True
        self.model = self._first_model() if model is None else model

    def complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Choice:
        """The answer to a prompt. Raises ValueError when the endpoint refuses it, or is still in trouble after all tries."""
        choice = _first_choice(self._completions(self._body(params) | {"prompt": list(prompt_ids)}), self._url)
        ids = choice.get("token_ids")
        known = isinstance(ids, list) and all(type(token) is int for token in cast("list[object]", ids))
        return Choice(_text(choice, self._url), choice.get("finish_reason"), ids if known else None)

    def chat(self, chat: Chat, params: SamplingParams) -> Choice:
        """The answer to a conversation. Raises ValueError as `complete` does."""
        body = self._body(params) | {"messages": [_wire_message(message) for message in chat.messages]}
        if chat.tools:
            body["tools"] = chat.tools
        if chat.template_kwargs:
            body["chat_template_kwargs"] = chat.template_kwargs
        choice = _first_choice(self._request("/chat/completions", body), self._url)
        message = choice.get("message")
        if not isinstance(message, dict):
            raise ValueError(f"{self._url}/chat/completions: the answer's choice has no message")
        kept = ("content", "reasoning_content", "tool_calls")
        said = {"role": "assistant"} | {key: message[key] for key in kept if message.get(key)}
        return Choice(str(said.get("content", "")), choice.get("finish_reason"), None, {"content": ""} | said)

    def _body(self, params: SamplingParams) -> dict[str, Any]:
        body = {"model": self.model, "max_tokens": params.max_tokens, "temperature": params.temperature}
        if params.temperature:
            body |= {"top_p": params.top_p, "seed": params.seed}
            if params.top_k:
                body["top_k"] = params.top_k  # not OpenAI's, but everybody's who serves open models
        return body

    def _completions(self, body: dict[str, Any]) -> Any:
        """Ask for token ids as well, until the endpoint says that it knows no such thing."""
        if self._with_ids:
            try:
                return self._request("/completions", body | {WITH_IDS: True})
            except ValueError as error:
                if WITH_IDS not in str(error):
                    raise
                self._with_ids = False
        return self._request("/completions", body)

    def _first_model(self) -> str:
        listed = self._request("/models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self._url}/models: lists no model; give --endpoint-model") from error

    def _request(self, path: str, body: dict[str, Any] | None) -> Any:
        for attempt in range(self._retries + 1):
            try:
                return self._once(path, body)
            except _Passing as trouble:
                if attempt == self._retries:
                    raise ValueError(f"{self._url}{path}: {trouble} ({attempt + 1} tries)") from trouble
                wait = min(FIRST_WAIT * 2**attempt, LONGEST_WAIT) * (0.5 + random.random() / 2)
                self._sleep(max(wait, min(trouble.wait, LONGEST_WAIT)))
        raise AssertionError("the last try returns or raises")

    def _once(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return json.loads(_read(response, self._timeout))
        except urllib.error.HTTPError as error:
            reason = f"answered {error.code}: {_complaint(_body_text(error, self._timeout))}"
            if error.code in AGAIN:
                raise _Passing(reason, _seconds(error.headers.get("Retry-After"))) from error
            raise ValueError(f"{self._url}{path}: {reason}") from error
        except OSError as error:  # no connection, cut off, or too slow
            raise _Passing(f"cannot be reached: {_one_line(str(error)) or type(error).__name__}") from error
        except http.client.HTTPException as error:
            raise _Passing(
                f"does not speak HTTP as it should: {type(error).__name__} {_one_line(str(error))}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise _Passing(f"answered no JSON: {error}") from error


def _check_url(url: str) -> None:
    """Raise ValueError for what is no HTTP URL with a host: no later try would mend it."""
    try:
        parts = urllib.parse.urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        usable = usable and url.isascii() and url.isprintable() and " " not in url
    except ValueError:  # of a port that is none, for one
        usable = False
    if not usable:
        raise ValueError(f"endpoint {url!r} is no URL: give http://host:port/v1")


def _read_key(path: str) -> str:
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot read the API key ({error})") from error
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{path}: holds no API key: one line of plain characters")
    return key


def _complaint(text: str) -> str:
    """The message of an error body in OpenAI's shape, or its beginning."""
    with suppress(ValueError, KeyError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return _one_line(text)


def _read(response: Any, seconds: float) -> bytes:
    """The body of a response. Raises TimeoutError when it goes on for longer: a socket's timeout begins anew with every byte."""
    parts: list[bytes] = []
    deadline = time.monotonic() + seconds
    while part := response.read1(1 << 16):
        parts.append(part)
        if time.monotonic() > deadline:
            raise TimeoutError("timed out")
    return b"".join(parts)


def _body_text(error: urllib.error.HTTPError, seconds: float) -> str:
    """The body of an error, or nothing where it cannot be read."""
    with error, suppress(OSError, http.client.HTTPException):
        return _read(error, seconds).decode("utf-8", "replace")
    return ""


def _one_line(text: str) -> str:
    """The beginning of a foreign text, fit for one line of a terminal."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:MAX_ERROR]


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:
        return 0.0


def _wire_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the API has it: the arguments of tool calls are text there."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _first_choice(value: Any, url: str) -> dict[str, Any]:
    try:
        choice: Any = value["choices"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{url}: the answer has no choices ({error!r})") from error
    if not isinstance(choice, dict):
        raise ValueError(f"{url}: the answer's choice is {type(choice).__name__}")
    return cast("dict[str, Any]", choice)


def _text(choice: dict[str, Any], url: str) -> str:
    text = choice.get("text")
    if not isinstance(text, str):
        raise ValueError(f"{url}/completions: the answer's text is {type(text).__name__}")
    return text


def read_answer(tokenizer: Tokenizer, choice: Choice, end: int | None) -> tuple[list[int], str] | Unusable:
    """(output ids, finish reason) of an answer. The token `end`, which no text shows, is put behind one that has stopped."""
    if choice.finish_reason not in ("stop", "length"):
        return Unusable(f"it ended for the reason {choice.finish_reason!r}")
    ids = choice.token_ids
    if ids is None:
        try:
            ids = tokenizer.encode(choice.text, allow_special=False)
        except ValueError as error:  # half of a pair of surrogates
            return Unusable(str(error))
        if REPLACEMENT in choice.text or tokenizer.decode(ids) != choice.text:
            return Unusable("its text does not come back from the target's tokens")
    elif any(not 0 <= token < tokenizer.size for token in ids):
        return Unusable("it holds ids that the target's tokenizer does not know")
    if choice.finish_reason == "stop" and end is not None and not (ids and ids[-1] in tokenizer.eos_token_ids):
        ids = [*ids, end]
    return ids, choice.finish_reason


def read_message(
    tokenizer: Tokenizer, chat: Chat, prompt_ids: Sequence[int], choice: Choice
) -> tuple[list[int], str] | Unusable:
    """`read_answer` for a chat's message: the template renders it behind the prompt, and the end token only of a whole one."""
    reason = "stop" if choice.finish_reason == "tool_calls" else choice.finish_reason
    if reason not in ("stop", "length"):
        return Unusable(f"it ended for the reason {reason!r}")
    if reason == "length" and (choice.message.keys() & {"reasoning_content", "tool_calls"}):
        return Unusable("it was cut off, and the template writes thinking and tool calls as a whole; raise max_tokens")
    if REPLACEMENT in choice.text:
        return Unusable("its text holds bytes that are no characters")
    try:
        answered = read_chat({"messages": [*chat.messages, choice.message]}, "the answer")
        tokens = chat_tokens(tokenizer, replace(chat, messages=answered.messages))
    except ValueError as error:
        return Unusable(str(error))
    start = tokens.spans[-1][0]
    if tokens.ids[:start] != list(prompt_ids):
        return Unusable("the chat template renders its prompt differently once it is answered")
    ids = tokens.ids[start:]
    if reason == "length" and ids and ids[-1] in tokenizer.eos_token_ids:
        ids = ids[:-1]
    return ids, reason


def end_token(tokenizer: Tokenizer) -> int | None:
    """The token that ends a generation; of several, the one that the chat template puts behind an answer."""
    ends = tokenizer.eos_token_ids
    if len(ends) < 2:
        return next(iter(ends), None)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    written = tokenizer.encode_chat(messages, add_generation_prompt=False)
    return next((token for token in reversed(written) if token in ends), ends[0])


def side_by_side(tasks: Sequence[Callable[[], Choice]], workers: int) -> Iterator[tuple[int, Choice]]:
    """(number, result) of every task, as they finish, `workers` of them at a time.

    The threads are daemons: an interrupt does not wait for answers under way.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    finished: queue.SimpleQueue[tuple[int, Choice | Exception]] = queue.SimpleQueue()
    stopped = threading.Event()
    for number in range(len(tasks)):
        waiting.put(number)

    def work() -> None:
        while not stopped.is_set():
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((number, tasks[number]()))
            except Exception as error:  # raised again by the reader, who wants no more answers
                stopped.set()
                finished.put((number, error))

    for _ in range(min(workers, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in tasks:
            number, result = finished.get()
            if isinstance(result, Exception):
                raise result
            yield number, result
    finally:
        stopped.set()
