"""Let the target answer prompts: the rows a head learns from.

Answers come from our own engine, or from an endpoint that serves the target. Rows are appended as they finish and looked
up by their keys at the next start, so an interrupted run goes on where it stopped. A sampled row's seed depends on the
option's seed and the row alone, so neither batch nor interruption changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from jetflow_core.engine import EngineConfig
from jetflow_core.llm import LLM
from jetflow_core.sampling import SamplingParams
from jetflow_core.tokenizer import Tokenizer
from jetflow_core.weights import open_checkpoint
from jetflow_train.chats import prompt_key, tokens_key
from jetflow_train.config import RegenerateOptions
from jetflow_train.data import RowKey, variant_of
from jetflow_train.endpoint import Endpoint, Unusable, end_token, read_answer, read_message, side_by_side
from jetflow_train.prompts import SAMPLES, Prompt, encode_prompts, read_prompts
from jetflow_train.row_file import open_rows
from jetflow_train.targets import target_path, target_tokenizer

OnRow = Callable[[int, int, int], object]
Note = Callable[[str], object]
NOTED = 5  # rows left out that are told of one by one


@dataclass(frozen=True)
class Question:
    """One row to make: a prompt, how it is answered, and what is recorded of that."""

    prompt: Prompt
    prompt_ids: list[int]
    params: SamplingParams
    sample: int
    sampling: dict[str, Any]  # what a row of the same key must agree in

    @property
    def key(self) -> RowKey:
        """What names the row."""
        return self.prompt.id, self.params.temperature, self.sample, variant_of(self.prompt.chat.template_kwargs)

    def row(self, tokenizer: Tokenizer, answer: Answer) -> dict[str, Any]:
        """The row as it is written."""
        name, temperature, sample, _ = self.key
        row: dict[str, Any] = {"id": name, "temperature": temperature, "sample": sample}
        if self.prompt.chat.template_kwargs:
            row["chat_template_kwargs"] = self.prompt.chat.template_kwargs
        if self.sampling:
            row["sampling"] = self.sampling
        row |= {"prompt_ids": self.prompt_ids, "output_ids": answer.token_ids, "finish_reason": answer.finish_reason}
        content = prompt_key(tokenizer, self.prompt.chat)
        return row if content == tokens_key(self.prompt_ids) else row | {"prompt_key": content}


@dataclass
class Answer:
    """Output ids, with the end token when it came."""

    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None


Answers = Callable[[Sequence[Question]], Iterable[tuple[Question, Answer | Unusable]]]


def regenerate(
    options: RegenerateOptions,
    on_row: OnRow = lambda done, total, tokens: None,
    note: Note = lambda text: None,
) -> int:
    """Load the target, or its tokenizer alone where an endpoint has the model, and make the rows that are missing.

    `on_row(done, total, tokens)` is told of each row, with its output length; `note` of what is left out. Returns how
    many rows were new. Raises ValueError for prompts, target, endpoint or output file that cannot be used.
    """
    checkpoint = open_checkpoint(target_path(options.target))
    tokenizer = target_tokenizer(checkpoint)
    # The target reads no more than its positions, whatever the option allows.
    options = replace(options, max_length=min(options.max_length, checkpoint.config.max_position_embeddings))
    if options.endpoint is not None:
        return _fill(tokenizer, options, endpoint_source(tokenizer, options, note), on_row, note)
    config = EngineConfig(
        budget=options.budget if options.head else 0,
        max_running=options.batch_size,
        max_batch_tokens=max(EngineConfig.max_batch_tokens, 2 * options.batch_size),  # as much room for prefills
        max_model_len=options.max_length,
    )
    llm = LLM.load(target_path(options.target), options.head, device=options.device, config=config)
    return answer(llm, options, on_row, note)


def answer(
    llm: LLM,
    options: RegenerateOptions,
    on_row: OnRow = lambda done, total, tokens: None,
    note: Note = lambda text: None,
) -> int:
    """`regenerate` with a loaded engine."""
    return _fill(llm.tokenizer, options, lambda questions: engine_answers(llm, questions), on_row, note)


def _fill(tokenizer: Tokenizer, options: RegenerateOptions, answers: Answers, on_row: OnRow, note: Note) -> int:
    """Append the rows that `options.output` lacks; how many were new."""
    wanted = list(_wanted(tokenizer, options, note))
    left_out = 0
    with open_rows(Path(options.output)) as file:
        missing = [each for each in wanted if not file.has(each.key, each.prompt_ids, each.sampling)]
        done = len(wanted) - len(missing)
        on_row(done, len(wanted), 0)
        for question, result in answers(missing) if missing else ():
            done += 1
            if isinstance(result, Unusable):
                left_out += 1
                if left_out <= NOTED:
                    note(f"row {question.prompt.id} is left out: {result.reason}")
                on_row(done, len(wanted), 0)
                continue
            file.append(question.row(tokenizer, result))
            on_row(done, len(wanted), len(result.token_ids))
    if left_out and left_out == len(wanted):
        raise ValueError(
            f"{options.endpoint}: none of {left_out} answers is a row; is it the target ({options.target or 'the demo model'}) "
            "that is served there?"
        )
    if left_out:
        note(f"{left_out} of {len(wanted)} rows are left out; the same command asks for them again")
    return len(missing) - left_out


def engine_answers(llm: LLM, questions: Sequence[Question]) -> Iterator[tuple[Question, Answer]]:
    """Answers of our own engine, in the order in which they finish."""
    running = {llm.engine.add(each.prompt_ids, each.params): (each, Answer()) for each in questions}
    while llm.engine.has_work:
        for part in llm.engine.step():
            question, made = running[part.request_id]
            if part.error:
                raise ValueError(f"prompt {question.prompt.id}: {part.error}")
            made.token_ids += part.token_ids
            made.finish_reason = part.finish_reason
            if part.finish_reason:
                yield question, made


def endpoint_source(tokenizer: Tokenizer, options: RegenerateOptions, note: Note) -> Answers:
    """Answers of the endpoint that `options` name, `batch_size` requests at a time. `note` is told which model is asked."""
    assert options.endpoint is not None
    endpoint = Endpoint(
        options.endpoint, options.endpoint_model, options.api_key_file, options.retries, options.timeout
    )

    note(f"{endpoint.model} answers at {options.endpoint}")
    end = end_token(tokenizer)
    chats = options.endpoint_api == "chat"

    def answers(questions: Sequence[Question]) -> Iterator[tuple[Question, Answer | Unusable]]:
        tasks = [
            partial(endpoint.chat, each.prompt.chat, each.params)
            if chats
            else partial(endpoint.complete, each.prompt_ids, each.params)
            for each in questions
        ]
        for number, choice in side_by_side(tasks, options.batch_size):
            asked = questions[number]
            if chats:
                result = read_message(tokenizer, asked.prompt.chat, asked.prompt_ids, choice)
            else:
                result = read_answer(tokenizer, choice, end)
            yield asked, result if isinstance(result, Unusable) else Answer(*result)

    return answers


def row_seed(seed: int, row_id: str, temperature: float, sample: int = 0) -> int:
    """The sampling seed of a row."""
    name = f"{seed}/{row_id}/{temperature}" + (f"/{sample}" if sample else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def _wanted(tokenizer: Tokenizer, options: RegenerateOptions, note: Note) -> Iterator[Question]:
    """The rows that `options` ask for: every prompt once at temperature 0, `samples` times at others."""
    copies = 0
    named: dict[str, list[int]] = {}
    contents: set[tuple[int, ...]] = set()
    for file, prompt, ids in _prompts(tokenizer, options):
        if prompt.id in named and named[prompt.id] != ids:
            raise ValueError(f"{file}: prompt id {prompt.id} occurs twice; ids name rows, so they must differ")
        named[prompt.id] = ids
        if tuple(ids) in contents:
            copies += 1
            continue
        contents.add(tuple(ids))
        for temperature in dict.fromkeys(options.temperature):
            for sample in range(options.samples if temperature else 1):
                yield _question(options, prompt, ids, temperature, sample)
    if copies:
        note(f"{copies} prompts say what an earlier one says and are left out")


def _prompts(tokenizer: Tokenizer, options: RegenerateOptions) -> Iterator[tuple[str, Prompt, list[int]]]:
    """File, prompt and token ids of everything that is asked."""
    files = options.prompts or (str(SAMPLES),)
    if unknown := set(options.suffix_files) - set(files):
        raise ValueError(f"suffix_files names {min(unknown)}, which is not among prompts")
    thinking = {} if options.thinking is None else {"enable_thinking": options.thinking}
    for file in files:
        prompts = read_prompts(Path(file), options.suffix if file in options.suffix_files else "", options.limit)
        prompts = [
            replace(each, chat=replace(each.chat, template_kwargs=each.chat.template_kwargs | thinking))
            for each in prompts
        ]
        encoded = encode_prompts(
            tokenizer, prompts, options.max_length, file, "raise max_length as far as the target goes"
        )
        yield from ((file, *pair) for pair in zip(prompts, encoded, strict=True))


def _question(options: RegenerateOptions, prompt: Prompt, ids: list[int], temperature: float, sample: int) -> Question:
    sampled: dict[str, Any] = {"top_p": options.top_p, "top_k": options.top_k} if temperature else {}
    params = SamplingParams(
        temperature=temperature,
        max_tokens=min(options.max_tokens, options.max_length - len(ids)),
        seed=row_seed(options.seed, prompt.id, temperature, sample),
        **sampled,
    )
    return Question(prompt, ids, params, sample, sampled | {"seed": options.seed} if sampled else {})
