"""Response schemas. Fields without a default are always there; the others only where they say something."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

Finish = Literal["stop", "length", "tool_calls"]
TextFinish = Literal["stop", "length"]


# -- usage ------------------------------------------------------------------------------------------------------------


class PromptTokensDetails(BaseModel):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """How many completion tokens came from accepted drafts."""

    accepted_prediction_tokens: int


class UsageBody(BaseModel):
    """Token counts of one HTTP request; a prompt counts once however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


# -- log-probabilities ------------------------------------------------------------------------------------------------


class TopLogprob(BaseModel):
    """A token and its log-probability; `bytes` is what it adds to the UTF-8 text, which need not be whole characters."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, with the most probable tokens at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Every token of the generated text in order, reasoning and tool calls included."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """The legacy form: one entry a token in each list; the first token of an echoed prompt has no probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


# -- chat -------------------------------------------------------------------------------------------------------------


class CalledFunction(BaseModel):
    """Which function to call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class CallBody(BaseModel):
    """One tool call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The answer of one chat choice. `content` is null when there is nothing but reasoning or tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[CallBody] | None = None


class ChatChoice(BaseModel):
    """One chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(BaseModel):
    """Body of a chat answer that is not streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class FunctionDelta(BaseModel):
    """The name, or a piece of the arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(BaseModel):
    """What a chunk adds to the tool call with this index."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """What a chunk adds to a chat answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """A chunk's share of one chat answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletionChunk(BaseModel):
    """The data of one event of a streamed chat answer; the one with usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None


# -- legacy completions -----------------------------------------------------------------------------------------------


class TextChoice(BaseModel):
    """One legacy completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextFinish


class TextCompletion(BaseModel):
    """Body of a legacy completion that is not streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


class TextChunkChoice(BaseModel):
    """A chunk's share of one legacy completion."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: TextFinish | None


class TextCompletionChunk(BaseModel):
    """The data of one event of a streamed legacy completion; the one with usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: UsageBody | None = None


# -- the rest ---------------------------------------------------------------------------------------------------------


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jetflow"
    max_model_len: int


class ModelList(BaseModel):
    """Body of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(BaseModel):
    """Body of `POST /tokenize`. `max_model_len` is the context of the model, the answer included."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(BaseModel):
    """Body of `POST /detokenize`."""

    prompt: str


class Health(BaseModel):
    """Body of `GET /health` and `GET /ready`."""

    status: Literal["ok"] = "ok"
    model: str
    open_requests: int
