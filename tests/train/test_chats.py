"""Chats as tokens: the loss covers what the model itself would generate, under every kind of template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jetflow_core.tokenizer import Tokenizer
from jetflow_train.chats import Chat, Tokens, chat_tokens, prompt_key, read_chat, text_tokens
from jetflow_train.data import is_held_out, read_rows

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|eot|>", "<s>", "</s>"]
ENDS = ["<|im_end|>", "<|eot|>", "</s>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
LLAMA2 = (  # the header is text, the question's end; only an answer ends with a control token
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# As Qwen3: thinking is kept for the answers to the last question alone, which may have called tools in between.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}"
    "<|im_end|>\n{% elif m.role == 'tool' %}<|im_start|>user\n<result>{{ m.content }}</result><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# The prompt opens the thinking block itself; earlier answers lose theirs.
OPENED = QWEN.replace(
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}", "<think>\n"
)


def tokenizer(template: str, merges: tuple[tuple[str, str], ...] = ()) -> Tokenizer:
    """Bytes, the control tokens, `<think>` tags as ordinary added tokens, and `merges` (in byte-level spelling)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    ends = [number for end in ENDS if (number := inner.token_to_id(end)) is not None]
    return Tokenizer(inner, eos_token_ids=ends, special_tokens={"bos_token": "<s>"}, chat_template=template)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, thought: str | None = None, call: dict[str, Any] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thought is not None:
        message["reasoning_content"] = thought
    if call is not None:
        message["tool_calls"] = [{"type": "function", "function": {"name": "look", "arguments": call}}]
    return message


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def counted(
    template: str, *messages: dict[str, Any], merges: tuple[tuple[str, str], ...] = (), **kwargs: Any
) -> list[str]:
    """The texts that carry the loss."""
    made = tokenizer(template, merges)
    tokens = chat_tokens(made, Chat(list(messages), None, kwargs))
    return texts(made, tokens)


def texts(made: Tokenizer, tokens: Tokens) -> list[str]:
    return [made.decode(tokens.ids[start:end], skip_special=False) for start, end in tokens.spans]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["Hello!<|im_end|>", "4<|im_end|>"]),
        (LLAMA3, ["Hello!<|eot|>", "4<|eot|>"]),
        (LLAMA2, [" Hello!</s>", " 4</s>"]),
        (QWEN, ["Hello!<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"]),
    ],
)
def test_every_answer_with_its_end_token_counts(template: str, expected: list[str]) -> None:
    chat = [user("Hi"), assistant("Hello!"), user("2 + 2?"), assistant("4")]
    assert counted(template, *chat) == expected
    assert counted(template, *chat, user("what nobody has answered is left out")) == expected


def test_thinking_counts_where_the_template_keeps_it() -> None:
    chat = [user("a"), assistant("b", "why b"), user("c"), assistant("d", "why d")]
    assert counted(QWEN, *chat) == ["b<|im_end|>", "<think>\nwhy d\n</think>\n\nd<|im_end|>"]
    assert counted(QWEN, *chat[:2]) == ["<think>\nwhy b\n</think>\n\nb<|im_end|>"]
    # What the prompt already opens is no work of the model's.
    assert counted(OPENED, *chat) == ["b<|im_end|>", "why d\n</think>\n\nd<|im_end|>"]


def test_without_thinking_the_empty_block_belongs_to_the_prompt() -> None:
    chat = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert counted(QWEN, *chat, enable_thinking=False) == ["b<|im_end|>", "d<|im_end|>"]
    assert counted(QWEN, *chat, enable_thinking=True) == ["b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"]


def test_tool_calls_count_and_results_do_not() -> None:
    first = [
        user("weather?"),
        assistant("", "look it up", {"city": "Rome"}),
        tool("sunny"),
        assistant("Sunny.", "nice"),
    ]
    call = '<tool_call>look {"city": "Rome"}</tool_call><|im_end|>'
    assert counted(QWEN, *first) == [
        f"<think>\nlook it up\n</think>\n\n{call}",
        "<think>\nnice\n</think>\n\nSunny.<|im_end|>",
    ]
    # A later question takes the thinking out of all that was rendered before it.
    later = [*first, user("thanks"), assistant("Welcome", "polite")]
    assert counted(QWEN, *later) == [
        call,
        "Sunny.<|im_end|>",
        "<think>\npolite\n</think>\n\nWelcome<|im_end|>",
    ]


def test_the_template_of_qwen3() -> None:
    template = (Path(__file__).parents[1] / "core" / "qwen3_template.jinja").read_text(encoding="utf-8")
    chat = [user("weather?"), assistant("", "look", {"city": "Rome"}), tool("sunny"), assistant("Sunny.", "nice")]
    call = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    assert counted(template, *chat) == [
        f"<think>\nlook\n</think>\n\n{call}",
        "<think>\nnice\n</think>\n\nSunny.<|im_end|>",
    ]
    asked = [*chat, user("thanks"), assistant("Welcome")]
    assert counted(template, *asked) == [call, "Sunny.<|im_end|>", "<think>\n\n</think>\n\nWelcome<|im_end|>"]
    assert counted(template, *asked, enable_thinking=False) == [call, "Sunny.<|im_end|>", "Welcome<|im_end|>"]
    # Thinking written into the text is the template's to take out.
    assert counted(template, user("a"), assistant("<think>\nb\n</think>\n\nc"), user("d"), assistant("e")) == [
        "c<|im_end|>",
        "<think>\n\n</think>\n\ne<|im_end|>",
    ]


def test_the_prompt_of_an_answer_is_what_serving_would_read() -> None:
    made = tokenizer(QWEN)
    tools = [{"type": "function", "function": {"name": "look"}}]
    chat = Chat([user("a"), assistant("b"), user("c"), assistant("d")], tools)
    tokens = chat_tokens(made, chat)
    for number, (start, _) in enumerate(tokens.spans):
        assert tokens.ids[:start] == made.encode_chat(chat.messages[: 2 * number + 1], tools)


def test_control_tokens_typed_in_a_message_end_nothing() -> None:
    texts = counted(
        CHATML, user("say <|im_end|>"), assistant("<|im_end|> said<|im_start|>assistant\n"), user("x"), assistant("y")
    )
    assert texts == ["<|im_end|> said<|im_start|>assistant\n<|im_end|>", "y<|im_end|>"]


def test_a_token_that_holds_header_and_answer_is_no_answer() -> None:
    merges = (("Ċ", "Ċ"),)
    assert counted(CHATML, user("a"), assistant("\nb"), merges=merges) == ["b<|im_end|>"]
    assert counted(CHATML, user("a"), assistant("b"), merges=merges) == ["b<|im_end|>"]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\U000f0000"), max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    template=st.sampled_from([CHATML, QWEN, LLAMA2]),
    turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4),
)
def test_spans_hold_the_answers_and_nothing_else(template: str, turns: list[tuple[str, str]]) -> None:
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    end = "</s>" if template is LLAMA2 else "<|im_end|>"
    bare = [text.removeprefix("<think>\n\n</think>\n\n") for text in counted(template, *messages)]
    lead = " " if template is LLAMA2 else ""
    assert bare == [f"{lead}{answer}{end}" for _, answer in turns]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            CHATML.replace("<|im_end|>", "<|end|>"),
            r"messages\[1\].*does not end the answer with one of the target's end tokens",
        ),
        # The question's place depends on what follows it.
        (
            CHATML.replace("{{ m.content }}", "{{ m.content }}{{ messages | length }}"),
            r"messages\[1\].*rendered differently in its prompt",
        ),
        # The opened header is not the one of a closed turn.
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}",
            r"messages\[1\].*opens the turn with ': ', the conversation does not",
        ),
        (
            CHATML.replace("{% for", "{% if add_generation_prompt %}<s>{% endif %}{% for", 1),
            r"messages\[1\].*opening the assistant's turn changes what comes before it",
        ),
    ],
)
def test_ambiguous_templates_are_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        counted(template, user("a"), assistant("b"), user("c"), assistant("d"))


def test_a_last_answer_without_an_end_token_goes_to_the_end() -> None:
    template = CHATML.replace(
        "<|im_end|>\n{% endfor %}", "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}"
    ).replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}<|im_end|>\n")
    assert counted(template, user("a"), assistant("b"), user("c"), assistant("d")) == ["b<|im_end|>", "d"]


# -- files ------------------------------------------------------------------------------------------------------------


def rows_of(folder: Path, *values: object, template: str = QWEN, limit: int = 500) -> list[Any]:
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return read_rows([file], 300, limit, tokenizer(template))


def test_a_file_of_every_kind(tmp_path: Path) -> None:
    token_row = {"id": "t", "temperature": 0.0, "prompt_ids": [1, 2], "output_ids": [3, 4]}
    chat = {"id": "c", "messages": [user("a"), assistant("bb"), user("c"), assistant("dd")]}
    rows = rows_of(tmp_path, token_row, chat, {"prompt": "q", "response": "an answer"}, {"text": "raw text"})
    made = tokenizer(QWEN)
    assert [row.temperature for row in rows] == [0.0, None, None, None]
    assert [row.id for row in rows][:2] == ["t", "c"]
    assert len({row.id for row in rows}) == 4
    spans = [[made.decode(row.tokens[start:end], skip_special=False) for start, end in row.spans] for row in rows]
    assert spans[1:] == [
        ["bb<|im_end|>", "<think>\n\n</think>\n\ndd<|im_end|>"],
        ["<think>\n\n</think>\n\nan answer<|im_end|>"],
        ["aw text"],
    ]


def test_arguments_of_tool_calls_may_be_text(tmp_path: Path) -> None:
    as_object = assistant("", call={"city": "Rome"})
    as_text = json.loads(json.dumps(as_object))
    as_text["tool_calls"][0]["function"]["arguments"] = '{"city": "Rome"}'
    one, two = (read_chat({"messages": [user("a"), call]}, "here") for call in (as_object, as_text))
    assert one == two


def test_one_question_falls_on_one_side_whatever_the_mode(tmp_path: Path) -> None:
    base = {"messages": [user("a"), assistant("b")]}
    quiet = {**base, "chat_template_kwargs": {"enable_thinking": False}}
    longer = {"messages": [*base["messages"], user("c"), assistant("d")]}
    rows = rows_of(
        tmp_path, base, quiet, longer, {"prompt": "a", "response": "other"}, {"prompt": "z", "response": "b"}
    )
    assert len(rows) == 5
    assert len({row.prompt_key for row in rows[:4]}) == 1
    assert rows[4].prompt_key != rows[0].prompt_key
    assert len({is_held_out(row, 0.5) for row in rows[:4]}) == 1
    assert rows[1].variant == '{"enable_thinking": false}'
    assert rows[0].prompt_key == prompt_key(tokenizer(QWEN), Chat([user("a")], None, {"enable_thinking": False}))
    texts = rows_of(tmp_path, {"text": "one text"}, {"text": "other text"})
    assert texts[0].prompt_ids == texts[1].prompt_ids
    assert texts[0].prompt_key != texts[1].prompt_key


def test_copies_and_overlong_chats(tmp_path: Path) -> None:
    chat = {"messages": [user("a"), assistant("bbbb"), user("c"), assistant("dddd")]}
    assert len(rows_of(tmp_path, chat, {**chat, "id": "again"})) == 1
    whole = rows_of(tmp_path, chat, template=CHATML)[0]
    for limit in range(len(whole.prompt_ids) + 2, len(whole.tokens) + 1):
        cut = rows_of(tmp_path, chat, template=CHATML, limit=limit)[0]
        assert cut.tokens == whole.tokens[:limit]
        expected = [(start, min(end, limit)) for start, end in whole.spans if start < limit]
        assert list(cut.spans) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"id": "a", "turns": ["x"]}, "line 1: prompts have no answers to learn from; run `jetflow-train regenerate`"),
        ({"messages": []}, "'messages' must be a non-empty list of objects"),
        ({"messages": ["x"]}, "'messages' must be a non-empty list of objects"),
        ({"messages": [user("a"), assistant("b")], "tools": "x"}, "'tools' must be a list of objects"),
        (
            {"messages": [user("a"), assistant("b")], "chat_template_kwargs": [1]},
            "'chat_template_kwargs' must be an object",
        ),
        ({"messages": [user("a"), assistant("b")], "chat_template_kwargs": {"tools": 1}}, "may not set 'tools'"),
        (
            {"messages": [user("a"), assistant("b")], "chat_template_kwargs": {"mood": 1}},
            "line 1: .*does not read 'mood'",
        ),
        ({"messages": [assistant("b")]}, r"line 1: messages\[0\] is an answer"),
        ({"messages": [user("a"), {"role": "oracle", "content": "b"}, assistant("b")]}, "role = 'oracle'"),
        ({"messages": [user("a"), {**assistant("b"), "tool_calls": ["x"]}]}, "'tool_calls' must be a list of objects"),
        (
            {"messages": [user("a"), {**assistant("b"), "tool_calls": 5}]},
            "line 1: 'tool_calls' must be a list of objects",
        ),
        ({"messages": [user("a"), assistant("b")], "prompt": "x", "response": 3}, None),
        ({"response": "x"}, "'prompt' is missing or empty"),
        ({"prompt": "x", "response": 3}, "'response' must be a text"),
        ({"text": 3}, "'text' must be a text"),
        ({"messages": [user("a")]}, r"every row is masked \(none of 1"),
        ({"text": "x"}, r"every row is masked \(none of 1"),
        ({"text": ""}, r"every row is masked \(none of 1"),
        ({"messages": [user("a" * 500), assistant("b")]}, "the prompt has 5.. tokens, the limit is 500"),
    ],
)
def test_unusable_corpus_rows_are_named(tmp_path: Path, value: object, message: str | None) -> None:
    if message is None:
        assert len(rows_of(tmp_path, value)) == 1
        return
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path, value)


def test_a_target_without_a_tokenizer_takes_token_rows_alone(tmp_path: Path) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": "raw"}\n')
    with pytest.raises(ValueError, match="line 1: this target has no tokenizer; give token rows"):
        read_rows([file], 300, 50)


def test_raw_text_counts_but_for_its_first_token() -> None:
    assert text_tokens(tokenizer(CHATML), "abc").spans == [(1, 3)]
    assert text_tokens(tokenizer(CHATML), "").spans == []
