"""Request schemas of the OpenAI surface. What is not supported is refused by name, never dropped.

A field of OpenAI's that is not supported is declared with the neutral values it may carry (`Only`), so that clients
which spell out defaults work.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, LiteralString, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from jetflow_core.logprobs import MAX_TOP

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]  # JSON has no other keys than strings
Bias = Annotated[float, Field(ge=-100, le=100)]
StopText = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, eq=False)  # by identity: `typing` would take Only((0,)) and Only((False,)) for one annotation
class Only:
    """Marks a field of which only these (neutral) values are accepted."""

    values: tuple[Any, ...]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validate by equality; `True == 1` does not count."""
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The accepted values, for the OpenAPI document."""
        return {"enum": [*self.values, None]}

    def _check(self, value: Any) -> Any:
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in self.values):
            return value
        allowed = " or ".join([repr(v) for v in self.values] or ["null"])
        message = "this value is not supported by this server; leave the field out or send {allowed}"
        raise PydanticCustomError("unsupported_value", message, {"allowed": allowed})


def _fault(param: str, message: LiteralString) -> PydanticCustomError:
    """An error of a rule between fields: `param` is the one to change."""
    return PydanticCustomError("invalid_value", message, {"param": param})


def _require_shallow(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse data nested deeper than `MAX_DEPTH`: templates and encoders walk it recursively."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        members = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [inner for item in members if isinstance(item, list) for inner in item]
        if not level:
            return value
    raise PydanticCustomError("invalid_value", "it is nested deeper than {limit} levels", {"limit": MAX_DEPTH})


def _require_object(text: str) -> str:
    """Refuse what is not the text of a JSON object: templates read tool calls' arguments as objects."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise PydanticCustomError("invalid_value", "it must be the text of a JSON object")
    _require_shallow(cast("dict[str, Any]", value))
    return text


MAX_DEPTH = 64
JsonObject = Annotated[dict[str, Any], AfterValidator(_require_shallow)]


class Strict(BaseModel):
    """A schema that refuses unknown fields, non-finite numbers and values of another type (no "1" for 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _examples(*bodies: dict[str, Any]) -> ConfigDict:
    """Bodies that the OpenAPI document shows."""
    return ConfigDict(json_schema_extra={"examples": list(bodies)})


class StreamOptions(Strict):
    """Options of a streamed answer: usage in a last event without choices, or in every event."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[Any, Only((False,))] = None

    @model_validator(mode="after")
    def _continuous_needs_usage(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise _fault("continuous_usage_stats", "it may be true only when 'include_usage' is")
        return self


class ResponseFormat(Strict):
    """The shape of the answer: plain text only."""

    type: Annotated[Any, Only(("text",))] = "text"


class GenerationRequest(Strict):
    """What chat and legacy completions share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=128)
    stop: StopText | Annotated[list[StopText], Field(max_length=4)] | None = None
    stop_token_ids: list[TokenId] | None = None
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0)
    logit_bias: dict[TokenKey, Bias] | None = None

    # Nothing in the answer depends on these; nothing is stored.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None

    store: Annotated[Any, Only((False,))] = None
    service_tier: Annotated[Any, Only(("auto", "default"))] = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _fault("stream_options", "it may be given only when 'stream' is true")
        return self

    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was written."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class TextPart(Strict):
    """One piece of a message's content."""

    type: Annotated[Any, Only(("text",))]
    text: str


class FunctionCall(Strict):
    """A call the assistant made earlier: a name and its arguments as JSON text."""

    name: str
    arguments: Annotated[str, AfterValidator(_require_object)]


class ToolCall(Strict):
    """One entry of an assistant message's `tool_calls`."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One chat message. What the model's template cannot express is refused when it is rendered."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    reasoning_content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    refusal: Annotated[Any, Only(())] = None
    annotations: Annotated[Any, Only(([],))] = None
    audio: Annotated[Any, Only(())] = None
    function_call: Annotated[Any, Only(())] = None

    @model_validator(mode="after")
    def _role_and_fields_agree(self) -> Message:
        if self.content is None and not self.tool_calls and not self.reasoning_content:
            raise _fault("content", "it is missing")
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise _fault(name, "only an assistant message has it")
        if self.tool_call_id is not None and self.role != "tool":
            raise _fault("tool_call_id", "only a tool message has it")
        return self


class FunctionDefinition(Strict):
    """A function the model may ask to call; it goes into the chat template as it is."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: Annotated[Any, Only((False,))] = None


class Tool(Strict):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    model_config = _examples(
        {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_completion_tokens": 64},
        {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me a joke."}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.7,
            "seed": 1,
            "max_completion_tokens": 64,
        },
        {
            "messages": [{"role": "user", "content": "Yes or no?"}],
            "logprobs": True,
            "top_logprobs": 2,
            "n": 2,
            "stop": "\n",
        },
    )

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, Only(("none", "auto"))] = None
    chat_template_kwargs: JsonObject | None = None
    separate_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    response_format: ResponseFormat | None = None

    parallel_tool_calls: Annotated[Any, Only((True,))] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    audio: Annotated[Any, Only(())] = None
    prediction: Annotated[Any, Only(())] = None
    functions: Annotated[Any, Only(([],))] = None
    function_call: Annotated[Any, Only(("none",))] = None
    reasoning_effort: Annotated[Any, Only(())] = None
    web_search_options: Annotated[Any, Only(())] = None
    verbosity: Annotated[Any, Only(("medium",))] = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise _fault("top_logprobs", "it may be given only when 'logprobs' is true")
        return self

    @model_validator(mode="after")
    def _an_answer_has_tokens(self) -> ChatRequest:
        if self.max_tokens == 0:
            raise _fault("max_tokens", "a chat answer has at least 1 token")
        return self

    @model_validator(mode="after")
    def _one_token_limit(self) -> ChatRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise _fault("max_tokens", "it differs from 'max_completion_tokens'; send one of them")
        return self

    def limit(self) -> int | None:
        """The token limit, by either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`. A prompt is text or token ids, alone or in a list."""

    model_config = _examples(
        {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0},
        {"prompt": ["One, two,", "Three, four,"], "stream": True, "n": 2, "max_tokens": 8},
        {"prompt": "The sky is blue", "echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt": [10, 20, 30], "best_of": 3, "max_tokens": 8},
    )

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    best_of: int | None = Field(None, ge=1, le=128)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: bool | None = None

    suffix: Annotated[Any, Only(("",))] = None

    @model_validator(mode="after")
    def _best_of_has_a_choice(self) -> CompletionRequest:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise _fault("best_of", "it may not be less than 'n'")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise _fault(
                "best_of", "the best answers are known only at the end: it cannot be more than 'n' in a stream"
            )
        return self

    def candidates(self) -> int:
        """Answers drawn for every prompt, of which the n best are returned."""
        return self.best_of or self.n or 1

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]


class ChatTokenizeRequest(Strict):
    """Body of `POST /tokenize` for a conversation."""

    model_config = _examples({"messages": [{"role": "user", "content": "Hi"}]})

    model: str | None = None
    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: JsonObject | None = None


class TextTokenizeRequest(Strict):
    """Body of `POST /tokenize` for a text, in which control tokens count."""

    model_config = _examples({"prompt": "How many tokens?"})

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


def _tokenize_kind(body: Any) -> str:
    return "Chat" if isinstance(body, dict) and "messages" in body else "Text"


# Told apart by a field, so that an error names a field of what was meant.
TokenizeRequest = Annotated[
    Annotated[ChatTokenizeRequest, Tag("Chat")] | Annotated[TextTokenizeRequest, Tag("Text")],
    Discriminator(_tokenize_kind),
]


class DetokenizeRequest(Strict):
    """Body of `POST /detokenize`."""

    model_config = _examples({"tokens": [10, 20, 30]})

    model: str | None = None
    tokens: list[TokenId]
