"""HTTP requests into the engine's terms: prompt ids and sampling parameters, one `Job` a sequence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetflow_core.sampling import SamplingParams
from jetflow_serve.chat import END_THINK, THINK, ChatStyle, Thinking
from jetflow_serve.errors import bad_request
from jetflow_serve.protocol import (
    ChatRequest,
    ChatTokenizeRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    TextTokenizeRequest,
    Tool,
)
from jetflow_serve.service import Job

if TYPE_CHECKING:
    from jetflow_core.tokenizer import Tokenizer

LEGACY_MAX_TOKENS = 16  # OpenAI's default of /v1/completions; chat has none
RESERVED_TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt"})
SAME_NAME = (  # fields that the engine has under the same name and with the same meaning
    "temperature", "top_p", "top_k", "min_p", "min_tokens", "ignore_eos",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
PROMPT_END = 32  # tokens at the end of a prompt in which an opened `<think>` can stand


@dataclass(frozen=True)
class Prompt:
    """One prompt. `text` is what echo shows of it; the tokenizer put `added` tokens before that by itself."""

    ids: list[int]
    text: str = ""
    added: int = 0


@dataclass(frozen=True)
class Plan:
    """What a request asks of the engine, and how its answers are read.

    `jobs` has `candidates` sequences for each of `prompts`, of which the `answers` likeliest are returned.
    """

    jobs: list[Job]
    prompts: Sequence[Prompt]
    candidates: int
    answers: int
    style: ChatStyle
    logprobs: bool
    echo: bool = False


@dataclass(frozen=True)
class Translator:
    """Turns requests into plans for a model with this tokenizer and a context of `context` tokens.

    Every method raises `ApiError` 400 for what the model cannot do, with the field at fault.
    """

    tokenizer: Tokenizer
    context: int

    def chat(self, request: ChatRequest) -> Plan:
        """The n sequences of a chat request."""
        tools = None if request.tool_choice == "none" else request.tools
        ids = self._chat_ids(request.messages, tools, request.chat_template_kwargs)
        limit = request.limit()
        _require_fit(ids, limit, self.context, "messages")
        top = (request.top_logprobs or 0) if request.logprobs else None
        n = request.n or 1
        jobs = [Job(ids, self._params(request, limit, choice, top)) for choice in range(n)]
        style = ChatStyle(
            tools=frozenset(tool.function.name for tool in tools or ()),
            thinking=self._thinking(ids, request.separate_reasoning),
            separate=request.separate_reasoning is not False,
        )
        return Plan(jobs, [Prompt(ids)], n, n, style, top is not None)

    def completion(self, request: CompletionRequest) -> Plan:
        """The sequences of every prompt of a legacy completion, prompt by prompt."""
        prompts = [self._prompt(prompt, bool(request.echo)) for prompt in request.prompts()]
        n, candidates = request.n or 1, request.candidates()
        ranking = 0 if candidates > n else None  # the best answers are found by their tokens' log-probabilities
        logprobs = ranking if request.logprobs is None else request.logprobs
        scored = request.logprobs if request.echo else None
        jobs: list[Job] = []
        for prompt in prompts:
            _require_fit(prompt.ids, request.max_tokens, self.context, "prompt")
            room = self.context - len(prompt.ids)
            limit = min(LEGACY_MAX_TOKENS, room) if request.max_tokens is None else request.max_tokens
            own = [self._params(request, limit, choice, logprobs, scored) for choice in range(candidates)]
            jobs += [Job(prompt.ids, params) for params in own]
        return Plan(jobs, prompts, candidates, n, ChatStyle(), request.logprobs is not None, echo=bool(request.echo))

    def tokens(self, request: ChatTokenizeRequest | TextTokenizeRequest) -> list[int]:
        """The ids that a completion of this prompt, or a chat of these messages, would start from."""
        if isinstance(request, TextTokenizeRequest):
            return self._encode(request.prompt, request.add_special_tokens)
        kwargs = request.chat_template_kwargs
        return self._chat_ids(request.messages, request.tools, kwargs, request.add_generation_prompt)

    def text(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        self._require_known(ids, "tokens")
        return self.tokenizer.decode(ids, skip_special=False)

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        options: Mapping[str, Any] | None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        options = options or {}
        if reserved := options.keys() & RESERVED_TEMPLATE_NAMES:
            raise bad_request(f"it may not set {', '.join(sorted(reserved))}", "chat_template_kwargs")
        written = [_template_message(message) for message in messages]
        declared = [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None
        try:
            return self.tokenizer.encode_chat(written, declared, add_generation_prompt=add_generation_prompt, **options)
        except ValueError as error:
            raise bad_request(str(error), _blamed(str(error), options)) from error

    def _prompt(self, prompt: str | list[int], echo: bool) -> Prompt:
        if not isinstance(prompt, str):
            self._require_known(prompt, "prompt")
            return Prompt(prompt, self.tokenizer.decode(prompt, skip_special=False) if echo else "")
        ids = self._encode(prompt)
        return Prompt(ids, prompt, len(ids) - len(self._encode(prompt, add_special=False)) if echo else 0)

    def _encode(self, text: str, add_special: bool = True) -> list[int]:
        try:
            return self.tokenizer.encode(text, allow_special=True, add_special=add_special)
        except ValueError as error:
            raise bad_request(str(error), "prompt") from error

    def _thinking(self, ids: Sequence[int], separate: bool | None) -> Thinking:
        """Whether an answer to this prompt may begin with `<think>`, by the end of the prompt and the template."""
        end = self.tokenizer.decode(ids[-PROMPT_END:], skip_special=False).rstrip()
        if not (separate or self.tokenizer.template_thinks) or end.endswith(END_THINK):
            return "never"
        return "opened" if end.endswith(THINK) else "may"

    # -- parameters ---------------------------------------------------------------------------------------------------

    def _params(
        self,
        request: GenerationRequest,
        limit: int | None,
        choice: int,
        logprobs: int | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """Parameters of the choice-th answer; its seed is the request's plus `choice`, within 64 bits."""
        ends = tuple(request.stop_token_ids or ())
        bias = {int(token): value for token, value in (request.logit_bias or {}).items()}
        self._require_known(ends, "stop_token_ids")
        self._require_known(bias, "logit_bias")
        given: dict[str, Any] = {"temperature": 1.0}
        given |= {name: value for name in SAME_NAME if (value := getattr(request, name)) is not None}
        try:
            return SamplingParams(
                **given,
                seed=None if request.seed is None else (request.seed + choice + 2**63) % 2**64 - 2**63,
                max_tokens=limit,
                stop=request.stop_strings(),
                stop_token_ids=ends,
                logit_bias=bias,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
        except ValueError as error:  # the message begins with the parameter's name
            raise bad_request(str(error), str(error).split(" ", 1)[0], "invalid_value") from error

    def _require_known(self, ids: Sequence[int] | Mapping[int, Any], param: str) -> None:
        for token in ids:
            if token >= self.tokenizer.size:
                message = f"token id {token} is outside the vocabulary of {self.tokenizer.size} tokens"
                raise bad_request(message, param, "invalid_value")


def _template_message(message: Message) -> dict[str, Any]:
    """A message as templates read it: the arguments of tool calls are objects there, not text."""
    written = message.model_dump(exclude_none=True)
    for call in written.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return written


def _blamed(message: str, options: Mapping[str, Any]) -> str:
    """The request field that the chat template's complaint is about."""
    if message.startswith("messages"):
        return "messages"
    if "'tools'" in message:
        return "tools"
    return "chat_template_kwargs" if any(repr(name) in message for name in options) else "messages"


def _require_fit(ids: Sequence[int], limit: int | None, context: int, param: str) -> None:
    if not ids:
        raise bad_request("the prompt is empty: give at least one token", param, "empty_prompt")
    if len(ids) >= context:
        message = f"the prompt has {len(ids)} tokens; the context of this model holds {context}, the answer included"
        raise bad_request(message, param, "context_length_exceeded")
    if limit is not None and len(ids) + limit > context:
        message = (
            f"the prompt has {len(ids)} tokens and max_tokens is {limit}, together more than the context of {context}: "
            f"at most {context - len(ids)} new tokens fit"
        )
        raise bad_request(message, "max_tokens", "context_length_exceeded")
