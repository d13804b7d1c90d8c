"""HTTP requests into the engine's terms: prompt ids and sampling parameters, one `Job` a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jetflow_core.sampling import SamplingParams
from jetflow_serve.errors import bad_request
from jetflow_serve.protocol import ChatRequest, CompletionRequest, GenerationRequest, Tool, as_template_message
from jetflow_serve.service import Job

if TYPE_CHECKING:
    from jetflow_core.tokenizer import Tokenizer

LEGACY_MAX_TOKENS = 16  # OpenAI's default of /v1/completions; chat has none
RESERVED_TEMPLATE_NAMES = frozenset({"messages", "tools", "tokenize", "add_generation_prompt"})


@dataclass(frozen=True)
class Translator:
    """Turns requests into jobs for a model with this tokenizer and a context of `context` tokens."""

    tokenizer: Tokenizer
    context: int

    def chat_jobs(self, request: ChatRequest) -> list[Job]:
        """The n jobs of a chat request. Raises `ApiError` 400."""
        messages = [as_template_message(message) for message in request.messages]
        tools = None if request.tool_choice == "none" else _template_tools(request.tools)
        options = request.chat_template_kwargs or {}
        for name in options.keys() & RESERVED_TEMPLATE_NAMES:
            raise bad_request(f"'chat_template_kwargs' may not set '{name}'", "chat_template_kwargs")
        chat = _Chat(self.tokenizer, messages, tools, options)
        ids = chat.encode()
        chat.require_expressed(ids)
        return self._jobs(request, [ids], request.limit(), "messages")

    def completion_jobs(self, request: CompletionRequest) -> list[Job]:
        """The n jobs of every prompt of a legacy completion, prompt by prompt. Raises `ApiError` 400."""
        prompts = [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts()]
        limit = request.max_tokens
        if limit is None:
            room = self.context - max(len(ids) for ids in prompts)
            limit = max(1, min(LEGACY_MAX_TOKENS, room))
        return self._jobs(request, prompts, limit, "prompt")

    def _encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text, allow_special=True)
        except ValueError as error:
            raise bad_request(str(error), "prompt") from error

    def _jobs(
        self, request: GenerationRequest, prompts: Sequence[list[int]], limit: int | None, param: str
    ) -> list[Job]:
        for ids in prompts:
            _require_fit(ids, limit, self.context, param)
        return [Job(ids, _params(request, limit, choice)) for ids in prompts for choice in range(request.n or 1)]


@dataclass(frozen=True)
class _Chat:
    """What the chat template is given."""

    tokenizer: Tokenizer
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: Mapping[str, Any]

    def encode(self) -> list[int]:
        try:
            return self.tokenizer.encode_chat(self.messages, tools=self.tools, **self.options)
        except ValueError as error:
            raise bad_request(str(error), "messages") from error

    def require_expressed(self, ids: list[int]) -> None:
        """Refuse tools, names and tool calls that leave no trace in the prompt: the template drops them."""
        if self.tools and replace(self, tools=None).encode() == ids:
            text = "the chat template of this model cannot express 'tools'"
            raise bad_request(text, "tools", "unsupported_parameter")
        for index, message in enumerate(self.messages):
            for name in message.keys() & {"name", "tool_calls"}:
                if self._without(index, name).encode() == ids:
                    text = f"the chat template of this model cannot express '{name}' of a message"
                    raise bad_request(text, f"messages.{index}.{name}", "unsupported_parameter")

    def _without(self, index: int, name: str) -> _Chat:
        changed = {key: value for key, value in self.messages[index].items() if key != name}
        return replace(self, messages=[*self.messages[:index], changed, *self.messages[index + 1 :]])


def _params(request: GenerationRequest, limit: int | None, choice: int) -> SamplingParams:
    """Sampling parameters of the choice-th answer; its seed is the request's plus `choice`, within 64 bits."""
    seed = None if request.seed is None else (request.seed + choice + 2**63) % 2**64 - 2**63
    try:
        return SamplingParams(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            min_p=request.min_p or 0.0,
            seed=seed,
            max_tokens=limit,
            min_tokens=request.min_tokens or 0,
            stop=request.stop_strings(),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
        )
    except ValueError as error:  # the message begins with the parameter's name
        raise bad_request(str(error), str(error).split(" ", 1)[0], "invalid_value") from error


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


def _template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    return [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None
