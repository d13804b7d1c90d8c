"""HTTP requests into the engine's terms: prompt ids and sampling parameters, one `Job` a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetflow_core.sampling import SamplingParams
from jetflow_serve.errors import bad_request
from jetflow_serve.protocol import ChatRequest, CompletionRequest, GenerationRequest
from jetflow_serve.service import Job

if TYPE_CHECKING:
    from jetflow_core.tokenizer import Tokenizer

LEGACY_MAX_TOKENS = 16  # OpenAI's default of /v1/completions; chat has none
RESERVED_TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Translator:
    """Turns requests into jobs for a model with this tokenizer and a context of `context` tokens."""

    tokenizer: Tokenizer
    context: int

    def chat_jobs(self, request: ChatRequest) -> list[Job]:
        """The n jobs of a chat request. Raises `ApiError` 400."""
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        tools = None if request.tool_choice == "none" else request.tools
        declared = [tool.model_dump(exclude_unset=True) for tool in tools] if tools else None
        options = request.chat_template_kwargs or {}
        if reserved := options.keys() & RESERVED_TEMPLATE_NAMES:
            raise bad_request(f"it may not set {', '.join(sorted(reserved))}", "chat_template_kwargs")
        try:
            ids = self.tokenizer.encode_chat(messages, declared, **options)
        except ValueError as error:
            raise bad_request(str(error), _blamed(str(error), options)) from error
        return self._jobs(request, [ids], request.limit(), "messages")

    def completion_jobs(self, request: CompletionRequest) -> list[Job]:
        """The n jobs of every prompt of a legacy completion, prompt by prompt. Raises `ApiError` 400."""
        prompts = [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts()]
        return self._jobs(request, prompts, request.max_tokens, "prompt", LEGACY_MAX_TOKENS)

    def _encode(self, text: str) -> list[int]:
        try:
            return self.tokenizer.encode(text, allow_special=True, add_special=True)
        except ValueError as error:
            raise bad_request(str(error), "prompt") from error

    def _jobs(
        self,
        request: GenerationRequest,
        prompts: Sequence[list[int]],
        limit: int | None,
        param: str,
        default_limit: int | None = None,
    ) -> list[Job]:
        """n jobs a prompt. Only an asked-for `limit` must fit; `default_limit` gives way to a long prompt."""
        jobs: list[Job] = []
        for ids in prompts:
            _require_fit(ids, limit, self.context, param)
            room = self.context - len(ids)
            own = min(default_limit, room) if limit is None and default_limit is not None else limit
            jobs += [Job(ids, _params(request, own, choice)) for choice in range(request.n or 1)]
        return jobs


def _blamed(message: str, options: Mapping[str, Any]) -> str:
    """The request field that the chat template's complaint is about."""
    if message.startswith("messages"):
        return "messages"
    if "'tools'" in message:
        return "tools"
    return "chat_template_kwargs" if any(repr(name) in message for name in options) else "messages"


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
