"""Response schemas and the assembly of outputs into them, whole or as server-sent events."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from jetflow_core.request import Output
from jetflow_serve.errors import ApiError
from jetflow_serve.service import Generation, GenerationError

FinishReason = Literal["stop", "length"]


class CompletionTokensDetails(BaseModel):
    """How many completion tokens came from accepted drafts."""

    accepted_prediction_tokens: int


class UsageBody(BaseModel):
    """Token counts of one HTTP request; a prompt counts once however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class AssistantMessage(BaseModel):
    """The answer of one chat choice."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One chat answer."""

    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: FinishReason


class TextChoice(BaseModel):
    """One legacy completion."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(BaseModel):
    """Body of a chat answer that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class TextCompletion(BaseModel):
    """Body of a legacy completion that is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody


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


class Health(BaseModel):
    """Body of `GET /health` and `GET /ready`."""

    status: Literal["ok"] = "ok"
    model: str
    open_requests: int


@dataclass
class Answer:
    """What an HTTP request asked for and what has come back so far. `answers` is n, the sequences a prompt gets."""

    kind: Literal["chat", "text"]
    model: str
    sequences: int
    answers: int
    with_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        """Start with empty sequences."""
        self.texts = [""] * self.sequences
        self.last: list[Output | None] = [None] * self.sequences

    def take(self, index: int, output: Output) -> None:
        """Add an output of sequence `index`."""
        self.texts[index] += output.text
        self.last[index] = output

    def usage(self) -> UsageBody:
        """Counts of all sequences."""
        done: Sequence[Output] = [output for output in self.last if output is not None]
        prompt = sum(output.usage.prompt_tokens for output in self.last[:: self.answers] if output is not None)
        completion = sum(output.usage.completion_tokens for output in done)
        accepted = sum(output.usage.accepted_draft_tokens for output in done)
        return UsageBody(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            completion_tokens_details=CompletionTokensDetails(accepted_prediction_tokens=accepted),
        )

    def whole(self) -> ChatCompletion | TextCompletion:
        """The finished answer as one body."""
        ends: list[FinishReason] = [_finish(output) for output in self.last]
        if self.kind == "chat":
            chats = [
                ChatChoice(index=i, message=AssistantMessage(content=text), finish_reason=end)
                for i, (text, end) in enumerate(zip(self.texts, ends, strict=True))
            ]
            return ChatCompletion(
                id=self._id(), created=self.created, model=self.model, choices=chats, usage=self.usage()
            )
        texts = [
            TextChoice(index=i, text=text, finish_reason=end)
            for i, (text, end) in enumerate(zip(self.texts, ends, strict=True))
        ]
        return TextCompletion(id=self._id(), created=self.created, model=self.model, choices=texts, usage=self.usage())

    def chunks(self, index: int, output: Output) -> list[str]:
        """The events of one output: the role before the first one of a chat choice, the text, the end."""
        first = self.last[index] is None
        self.take(index, output)
        events: list[str] = []
        if first and self.kind == "chat":
            events.append(self._event(index, {"role": "assistant", "content": ""}))
        if output.text:
            events.append(self._event(index, {"content": output.text}))
        if output.finish_reason is not None:
            events.append(self._event(index, {}, _finish(output)))
        return events

    def usage_chunk(self) -> str:
        """The event after the last choice when usage was asked for: no choices, the counts."""
        return _sse({**self._head(), "choices": [], "usage": self.usage().model_dump()})

    def _event(self, index: int, delta: dict[str, str], end: FinishReason | None = None) -> str:
        content: dict[str, Any] = {"delta": delta} if self.kind == "chat" else {"text": delta.get("content", "")}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": end}
        return _sse({**self._head(), "choices": [choice], **({"usage": None} if self.with_usage else {})})

    def _head(self) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {"id": self._id(), "object": name, "created": self.created, "model": self.model}

    def _id(self) -> str:
        return ("chatcmpl-" if self.kind == "chat" else "cmpl-") + self.key


async def event_stream(answer: Answer, generation: Generation) -> AsyncIterator[str]:
    """Server-sent events of an answer as its tokens come. A failure becomes an error event and ends the stream."""
    try:
        async for index, output in generation:
            for event in answer.chunks(index, output):
                yield event
    except GenerationError as error:
        yield _sse(ApiError(500, str(error), code="generation_failed").body.model_dump())
        return
    if answer.with_usage:
        yield answer.usage_chunk()
    yield "data: [DONE]\n\n"


def _sse(data: Any) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _finish(output: Output | None) -> FinishReason:
    assert output is not None, "an answer was assembled before its sequence ended"
    return "length" if output.finish_reason == "length" else "stop"
