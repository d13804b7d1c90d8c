"""Request schemas of the OpenAI surface. What is not supported is refused by name, never dropped.

A field of OpenAI's that is not supported is declared with the neutral values it may carry (`Only`), so that clients
which spell out defaults work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, LiteralString

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
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


MAX_DEPTH = 64
JsonObject = Annotated[dict[str, Any], AfterValidator(_require_shallow)]


class Strict(BaseModel):
    """A schema that refuses unknown fields, non-finite numbers and values of another type (no "1" for 1)."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, Only((False,))] = None


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
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    user: str | None = None

    presence_penalty: Annotated[Any, Only((0,))] = None
    frequency_penalty: Annotated[Any, Only((0,))] = None
    repetition_penalty: Annotated[Any, Only((1,))] = None
    logit_bias: Annotated[Any, Only(({},))] = None
    metadata: Annotated[Any, Only(({},))] = None
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
    arguments: str


class ToolCall(Strict):
    """One entry of an assistant message's `tool_calls`."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One chat message. What the model's template cannot express is refused when it is rendered."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    refusal: Annotated[Any, Only(())] = None
    annotations: Annotated[Any, Only(([],))] = None
    audio: Annotated[Any, Only(())] = None
    function_call: Annotated[Any, Only(())] = None

    @model_validator(mode="after")
    def _role_and_fields_agree(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise _fault("content", "it is missing")
        if self.tool_calls and self.role != "assistant":
            raise _fault("tool_calls", "only an assistant message has it")
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

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, Only(("none", "auto"))] = None
    chat_template_kwargs: JsonObject | None = None
    response_format: ResponseFormat | None = None

    logprobs: Annotated[Any, Only((False,))] = None
    top_logprobs: Annotated[Any, Only((0,))] = None
    parallel_tool_calls: Annotated[Any, Only((True,))] = None
    modalities: Annotated[Any, Only((["text"],))] = None
    audio: Annotated[Any, Only(())] = None
    prediction: Annotated[Any, Only(())] = None
    functions: Annotated[Any, Only(([],))] = None
    function_call: Annotated[Any, Only(("none",))] = None
    reasoning_effort: Annotated[Any, Only(())] = None
    web_search_options: Annotated[Any, Only(())] = None

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

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    best_of: int | None = None

    logprobs: Annotated[Any, Only(())] = None
    echo: Annotated[Any, Only((False,))] = None
    suffix: Annotated[Any, Only(("",))] = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _fault("best_of", "a value other than that of 'n' is not supported by this server")
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [part for part in self.prompt if not isinstance(part, int)]
