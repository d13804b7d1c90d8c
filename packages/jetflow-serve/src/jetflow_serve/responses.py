"""Outputs of the engine assembled into answers, whole or as server-sent events.

Each sequence has a `Reader` that turns outputs into parts: a whole answer is all of them, a stream sends them one by one.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel
from starlette.responses import Response

from jetflow_core.request import Output
from jetflow_serve.bodies import (
    AssistantMessage,
    CallBody,
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    Finish,
    FunctionDelta,
    PromptTokensDetails,
    TextChoice,
    TextChunkChoice,
    TextCompletion,
    TextCompletionChunk,
    TextFinish,
    TextLogprobs,
    UsageBody,
)
from jetflow_serve.chat import Call, ChatParser, Piece, Reasoning, Text
from jetflow_serve.logprobs import Entry, LogprobTrack, chat_logprobs, prompt_entries, text_logprobs
from jetflow_serve.protocol import StreamOptions
from jetflow_serve.service import Generation, GenerationError
from jetflow_serve.translate import Plan, Prompt

if TYPE_CHECKING:
    from jetflow_core.tokenizer import Tokenizer


@dataclass(frozen=True)
class Part:
    """What one output adds to an answer."""

    pieces: list[Piece]
    entries: list[Entry]
    finish: TextFinish | None


class Reader:
    """One sequence's answer so far. Log-probabilities wait for a part with text, so that a stream sends them together."""

    def __init__(self, plan: Plan, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self._plan, self._prompt, self._tokenizer = plan, prompt, tokenizer
        self._parser = ChatParser(plan.style)
        self._track = LogprobTrack(tokenizer, len(prompt.text) if plan.echo else 0)
        self._waiting: list[Entry] = []
        self._sum, self._count = 0.0, 0
        self.last: Output | None = None
        self.pieces: list[Piece] = []
        self.entries: list[Entry] = []
        self.finish: TextFinish | None = None

    def take(self, output: Output) -> Part:
        """Add an output and return what it makes certain."""
        pieces: list[Piece] = []
        if self.last is None and self._plan.echo:
            pieces += [Text(self._prompt.text)] if self._prompt.text else []
            self._waiting += self._prompt_entries(output)
        self.last = output
        pieces += self._parser.push(output.text)
        self._add_logprobs(output)
        if output.finish_reason is not None:
            self.finish = "length" if output.finish_reason == "length" else "stop"
            pieces += self._parser.flush()
        entries: list[Entry] = []
        if pieces or self.finish:
            entries, self._waiting = self._waiting, []
        self.pieces += pieces
        self.entries += entries
        return Part(pieces, entries, self.finish)

    @property
    def likelihood(self) -> float:
        """Mean log-probability of the tokens, by which the best answers are found."""
        return self._sum / max(1, self._count)

    @property
    def calls(self) -> list[Call]:
        """The tool calls."""
        return [piece for piece in self.pieces if isinstance(piece, Call)]

    def _add_logprobs(self, output: Output) -> None:
        if output.logprobs is None:
            return
        self._sum += sum(own.logprob for own in output.logprobs)
        self._count += len(output.logprobs)
        if self._plan.logprobs:
            for token, own in zip(output.token_ids, output.logprobs, strict=True):
                self._track.add(token, own)
            self._waiting += self._track.take(output.text, output.finish_reason)

    def _prompt_entries(self, output: Output) -> list[Entry]:
        if output.prompt_logprobs is None:
            return []
        prompt = self._prompt
        return prompt_entries(self._tokenizer, prompt.ids, output.prompt_logprobs, prompt.added, len(prompt.text))


class ChatForm:
    """Answers of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole = ChatCompletion
    chunk = ChatCompletionChunk
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, index: int, reader: Reader, logprobs: bool) -> ChatChoice:
        """A finished answer."""
        text = "".join(piece.text for piece in reader.pieces if isinstance(piece, Text))
        thought = "".join(piece.text for piece in reader.pieces if isinstance(piece, Reasoning))
        message = AssistantMessage(
            role="assistant", content=text or (None if thought or reader.calls else ""), refusal=None
        )
        if thought:
            message.reasoning_content = thought
        if reader.calls:
            message.tool_calls = [
                CallBody(id=call.id, type="function", function=CalledFunction(name=call.name, arguments=call.arguments))
                for call in reader.calls
            ]
        own = chat_logprobs(self._tokenizer, reader.entries) if logprobs else None
        return ChatChoice(index=index, message=message, logprobs=own, finish_reason=_chat_finish(reader))

    def opening(self, index: int) -> list[ChatChunkChoice]:
        """The role, before everything else."""
        delta = ChatDelta(role="assistant", content="")
        return [ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)]

    def events(self, index: int, part: Part, reader: Reader) -> Iterator[ChatChunkChoice]:
        """The deltas of a part; its log-probabilities go with the first."""
        logprobs: ChatLogprobs | None = chat_logprobs(self._tokenizer, part.entries) if part.entries else None
        for piece in part.pieces:
            for delta in _deltas(piece):
                yield ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=None)
                logprobs = None
        if part.finish is not None:
            end = _chat_finish(reader)
            yield ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=logprobs, finish_reason=end)


class TextForm:
    """Answers of `/v1/completions`."""

    id_prefix = "cmpl-"
    whole = TextCompletion
    chunk = TextCompletionChunk
    whole_object = chunk_object = "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, index: int, reader: Reader, logprobs: bool) -> TextChoice:
        """A finished answer."""
        assert reader.finish is not None, "an answer was assembled before its sequence ended"
        own = text_logprobs(self._tokenizer, reader.entries) if logprobs else None
        return TextChoice(index=index, text=_text(reader.pieces), logprobs=own, finish_reason=reader.finish)

    def opening(self, index: int) -> list[TextChunkChoice]:
        """Nothing."""
        return []

    def events(self, index: int, part: Part, reader: Reader) -> Iterator[TextChunkChoice]:
        """The text of a part with its log-probabilities, then the end."""
        logprobs: TextLogprobs | None = text_logprobs(self._tokenizer, part.entries) if part.entries else None
        if part.pieces:
            yield TextChunkChoice(index=index, text=_text(part.pieces), logprobs=logprobs, finish_reason=None)
            logprobs = None
        if part.finish is not None:
            yield TextChunkChoice(index=index, text="", logprobs=logprobs, finish_reason=part.finish)


class Answer:
    """The answer to one HTTP request."""

    def __init__(
        self, form: ChatForm | TextForm, plan: Plan, tokenizer: Tokenizer, model: str, options: StreamOptions | None
    ) -> None:
        self._form, self._plan = form, plan
        self._model, self._created = model, int(time.time())
        self._id = form.id_prefix + uuid.uuid4().hex
        self._options = options or StreamOptions()
        self._readers = [Reader(plan, plan.prompts[i // plan.candidates], tokenizer) for i in range(len(plan.jobs))]

    def take(self, index: int, output: Output) -> None:
        """Add an output of sequence `index`."""
        self._readers[index].take(output)

    def whole(self) -> Response:
        """The finished answer as one body."""
        kept = [reader for group in self._groups() for reader in self._best(group)]
        choices = [self._form.choice(index, reader, self._plan.logprobs) for index, reader in enumerate(kept)]
        body = self._form.whole.model_validate(
            {**self._head(self._form.whole_object), "choices": choices, "usage": self.usage()}
        )
        return Response(_json(body), media_type="application/json")

    def events(self, index: int, output: Output) -> Iterator[str]:
        """The events of one output of sequence `index`."""
        reader = self._readers[index]
        choices = [] if reader.last is not None else self._form.opening(index)
        part = reader.take(output)
        for choice in [*choices, *self._form.events(index, part, reader)]:
            yield self._event([choice], self.usage() if self._options.continuous_usage_stats else None)

    def closing(self) -> Iterator[str]:
        """The events after the last output: the usage if it was asked for, and the end mark."""
        if self._options.include_usage:
            yield self._event([], self.usage())
        yield "data: [DONE]\n\n"

    def usage(self) -> UsageBody:
        """Counts of all sequences so far."""
        done = [reader.last.usage for reader in self._readers if reader.last is not None]
        first = [group[0].last.usage for group in self._groups() if group[0].last is not None]
        prompt, completion = sum(u.prompt_tokens for u in first), sum(u.completion_tokens for u in done)
        return UsageBody(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(u.cached_tokens for u in first)),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=sum(u.accepted_draft_tokens for u in done)
            ),
        )

    def _groups(self) -> Iterator[Sequence[Reader]]:
        """The sequences of each prompt."""
        for start in range(0, len(self._readers), self._plan.candidates):
            yield self._readers[start : start + self._plan.candidates]

    def _best(self, group: Sequence[Reader]) -> Sequence[Reader]:
        """The answers to return: the likeliest where more were drawn."""
        if self._plan.answers == len(group):
            return group
        return sorted(group, key=lambda reader: -reader.likelihood)[: self._plan.answers]

    def _event(self, choices: Sequence[BaseModel], usage: UsageBody | None) -> str:
        fields = {**self._head(self._form.chunk_object), "choices": choices}
        if self._options.include_usage:
            fields["usage"] = usage
        return f"data: {_json(self._form.chunk.model_validate(fields))}\n\n"

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


async def event_stream(answer: Answer, generation: Generation) -> AsyncIterator[str]:
    """Server-sent events of an answer as its tokens come. A failure becomes an error event and ends the stream."""
    try:
        async for index, output in generation:
            for event in answer.events(index, output):
                yield event
    except GenerationError as error:
        yield f"data: {_json(error.body)}\n\n"
        return
    for event in answer.closing():
        yield event


def _deltas(piece: Piece) -> Iterator[ChatDelta]:
    """A call comes whole (a malformed one is text, which shows at its end), in the two steps that clients expect."""
    if isinstance(piece, Text):
        yield ChatDelta(content=piece.text)
    elif isinstance(piece, Reasoning):
        yield ChatDelta(reasoning_content=piece.text)
    else:
        named = FunctionDelta(name=piece.name, arguments="")
        yield ChatDelta(tool_calls=[CallDelta(index=piece.index, id=piece.id, type="function", function=named)])
        rest = FunctionDelta(arguments=piece.arguments)
        yield ChatDelta(tool_calls=[CallDelta(index=piece.index, function=rest)])


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


def _chat_finish(reader: Reader) -> Finish:
    assert reader.finish is not None, "an answer was assembled before its sequence ended"
    return "tool_calls" if reader.calls and reader.finish == "stop" else reader.finish


def _json(body: BaseModel) -> str:
    """The fields that were set, and no others."""
    return body.model_dump_json(exclude_unset=True)
