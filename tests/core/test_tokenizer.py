"""Tokenizer, chat prompts and incremental text."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jetflow_core.config import ModelConfig
from jetflow_core.tensor_source import CheckpointError
from jetflow_core.tokenizer import Detokenizer, Tokenizer, load_tokenizer

QWEN3 = (Path(__file__).parent / "qwen3_template.jinja").read_text(encoding="utf-8")
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["he", "hel", "lo", "hello", "Ġw", "im", "_s", "<|"]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE: every byte, a few merges, three control tokens, and `<think>` as an ordinary added token."""
    merges = [("h", "e"), ("he", "l"), ("l", "o"), ("hel", "lo"), ("Ġ", "w"), ("i", "m"), ("_", "s"), ("<", "|")]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet, *WORDS])}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    inner.add_tokens([AddedToken(token, special=False, normalized=False) for token in ("<think>", "</think>")])
    return inner


def sentencepiece() -> tokenizers.Tokenizer:
    """BPE with byte fallback and a decoder that drops the first space, as Llama 2's."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "▁▁"]
    vocabulary = {token: index for index, token in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return inner


def make(template: str | None = None, **named: str) -> Tokenizer:
    return Tokenizer(byte_level(), eos_token_ids=(2,), special_tokens=named, chat_template=template)


PLAIN, CHATML, QWEN = make(), make(SMOLLM2), make(QWEN3)
END = CHATML.encode("<|im_end|>", allow_special=True)[0]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# -- text -------------------------------------------------------------------------------------------------------------


def test_attributes() -> None:
    tokenizer = make(bos_token="<|im_start|>")
    assert tokenizer.size == 3 + 256 + len(WORDS) + 2
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.bos_token_id == 1
    assert PLAIN.bos_token_id is None
    assert PLAIN.eos_token_ids == (2,)
    assert not PLAIN.has_chat_template
    assert PLAIN.template_variables == frozenset()
    assert QWEN.template_variables >= {"messages", "tools", "enable_thinking", "add_generation_prompt"}


def test_control_tokens_only_where_allowed() -> None:
    text = "hello<|im_end|> w"
    assert END in PLAIN.encode(text, allow_special=True)
    plain = PLAIN.encode(text, allow_special=False)
    assert not set(plain) & PLAIN.special_ids
    assert PLAIN.decode(plain) == text


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives(text: str) -> None:
    assert PLAIN.decode(PLAIN.encode(text, allow_special=False)) == text


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogate at position 2"):
        PLAIN.encode("ab\ud800", allow_special=False)


def test_special_ids_are_left_out_of_text() -> None:
    ids = PLAIN.encode("hello<|im_end|>", allow_special=True)
    assert PLAIN.decode(ids) == "hello"
    assert PLAIN.decode(ids, skip_special=False) == "hello<|im_end|>"


def test_ids_of_padded_rows_have_no_text() -> None:
    assert PLAIN.decode([PLAIN.size + 5]) == ""


def test_threads_do_not_mix_modes() -> None:
    expected = {mode: PLAIN.encode("a<|im_end|>" * 50, allow_special=mode) for mode in (True, False)}
    wrong: list[bool] = []

    def work(mode: bool) -> None:
        for _ in range(100):
            if PLAIN.encode("a<|im_end|>" * 50, allow_special=mode) != expected[mode]:
                wrong.append(mode)

    threads = [threading.Thread(target=work, args=(index % 2 == 0,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- chat prompts -----------------------------------------------------------------------------------------------------


def test_qwen3_plain_turns() -> None:
    messages = [{"role": "system", "content": "S"}, *user("U"), {"role": "assistant", "content": "A"}, *user("V")]
    assert QWEN.apply_chat_template(messages) == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
        "<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\n"
    )
    assert QWEN.apply_chat_template(messages, add_generation_prompt=False).endswith("V<|im_end|>\n")


def test_qwen3_thinking_can_be_switched_off() -> None:
    assert QWEN.apply_chat_template(user("U"), enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")
    assert QWEN.apply_chat_template(user("U"), enable_thinking=True).endswith("assistant\n")


def test_qwen3_drops_old_thoughts_and_keeps_new_ones() -> None:
    thought = {"role": "assistant", "content": "<think>\nT\n</think>\n\nA"}
    assert "T" not in QWEN.apply_chat_template([*user("U"), thought, *user("V")])
    assert QWEN.apply_chat_template([*user("U"), thought], add_generation_prompt=False).endswith(
        "<|im_start|>assistant\n<think>\nT\n</think>\n\nA<|im_end|>\n"
    )
    apart = {"role": "assistant", "content": "A", "reasoning_content": "T"}
    same = QWEN.apply_chat_template([*user("U"), thought]) == QWEN.apply_chat_template([*user("U"), apart])
    assert same


def test_qwen3_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "Größe <b>&'"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        *user("U"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "R1"},
        {"role": "tool", "tool_call_id": "2", "content": "R2"},
    ]
    text = QWEN.apply_chat_template(messages, tools=[tool])
    assert json.dumps(tool, ensure_ascii=False) in text, "text in JSON stays as it is"
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in text
    assert (
        "<|im_start|>user\n<tool_response>\nR1\n</tool_response>\n<tool_response>\nR2\n</tool_response><|im_end|>"
        in text
    )


def test_text_parts_are_joined_with_nothing_between() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert CHATML.apply_chat_template(user(parts)) == CHATML.apply_chat_template(user("a b"))


def test_developer_is_system_where_the_template_has_no_developer() -> None:
    developer = [{"role": "developer", "content": "S"}, *user("U")]
    system = [{"role": "system", "content": "S"}, *user("U")]
    assert CHATML.apply_chat_template(developer) == CHATML.apply_chat_template(system)
    assert QWEN.apply_chat_template(developer) == QWEN.apply_chat_template(system)
    own = make("{% for m in messages %}{% if m.role == 'developer' %}[{{ m.content }}]{% endif %}{% endfor %}")
    assert own.apply_chat_template(developer) == "[S]"


@pytest.mark.parametrize(
    ("messages", "extra", "message"),
    [
        ([], {}, "messages must not be empty"),
        ([{"role": "critic", "content": "x"}], {}, r"messages\[0\]: role = 'critic': known are"),
        ([{"content": "x"}], {}, "role = None"),
        ([{"role": "user"}], {}, r"messages\[0\]: content is missing"),
        (user(3), {}, "content must be text or a list of text parts"),
        (user([{"type": "image_url", "image_url": {}}]), {}, "content part 0 of type 'image_url': only text"),
        (user([{"type": "text"}]), {}, "content part 0"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], {}, "has no role 'tool'"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], {}, "cannot express the field 'tool_calls'"),
        ([{"role": "user", "content": "x", "audio": 1}], {}, "cannot express the field 'audio'"),
        (user("x"), {"tools": [{"type": "function"}]}, "does not read 'tools'"),
        (user("x"), {"enable_thinking": False}, "does not read 'enable_thinking'"),
    ],
)
def test_what_a_template_cannot_express_is_refused(
    messages: list[dict[str, Any]], extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CHATML.encode_chat(messages, **extra)
    with pytest.raises(ValueError, match=message):
        CHATML.apply_chat_template(messages, **extra)


def test_no_template() -> None:
    with pytest.raises(ValueError, match="no chat template; use plain completions"):
        PLAIN.encode_chat(user("x"))


# -- control tokens in user text --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [CHATML, QWEN])
def test_ordinary_chats_encode_as_their_text(tokenizer: Tokenizer) -> None:
    messages = [*user(" hello <think> ü "), {"role": "assistant", "content": "w"}, *user("hello|>")]
    text = tokenizer.apply_chat_template(messages)
    assert tokenizer.encode_chat(messages) == tokenizer.encode(text, allow_special=True)


SMUGGLED = st.lists(
    st.sampled_from(
        [
            *SPECIAL,
            "<|im_",
            "start|>",
            "|>",
            "<",
            "im_end|>",
            "<think>",
            "</think>",
            "hello",
            " ",
            "\n",
            "ü",
            "\U000f0001",
        ]
    ),
    max_size=6,
).map("".join)


@settings(deadline=None)
@given(contents=st.lists(SMUGGLED, min_size=1, max_size=4), qwen=st.booleans())
def test_user_text_cannot_smuggle_control_tokens(contents: list[str], qwen: bool) -> None:
    """The ids spell the same prompt, with exactly the control tokens of a conversation that holds none in its text."""
    tokenizer = QWEN if qwen else CHATML
    roles = ["user", "assistant"]
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(contents)]
    harmless = [{**message, "content": "x"} for message in messages]
    if qwen:  # the last assistant turn is written with its thoughts
        harmless = [
            {**message, "content": "x" if "</think>" not in text else "<think>y</think>x"}
            for message, text in zip(messages, contents, strict=True)
        ]
    ids = tokenizer.encode_chat(messages)
    assert tokenizer.decode(ids, skip_special=False) == tokenizer.apply_chat_template(messages)
    control = [index for index in ids if index in tokenizer.special_ids]
    assert control == [index for index in tokenizer.encode_chat(harmless) if index in tokenizer.special_ids]


def test_control_tokens_in_tools_and_arguments_are_plain_text() -> None:
    tool = {"type": "function", "function": {"name": "<|im_end|>", "description": "<|im_start|>"}}
    call = {"function": {"name": "f", "arguments": {"<|im_end|>": ["<|im_start|>"]}}}
    messages = [*user("U"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    ids = QWEN.encode_chat(messages, tools=[tool])
    assert QWEN.decode(ids, skip_special=False) == QWEN.apply_chat_template(messages, tools=[tool])
    assert ids.count(END) == 3


def test_control_tokens_that_form_across_a_border_are_plain_text() -> None:
    tokenizer = make("{{ messages[0].content }}im_end|>{{ messages[1].content }}<|im_{{ messages[2].content }}")
    ids = tokenizer.encode_chat([*user("a<|"), *user("<|im_start|>"), *user("end|>b")])
    assert not set(ids) & tokenizer.special_ids
    assert tokenizer.decode(ids) == "a<|im_end|><|im_start|><|im_end|>b"


def test_templates_that_take_text_apart_still_see_it() -> None:
    tokenizer = make("{% for m in messages %}{{ m.content.strip() }}|{{ m.content | length }}{% endfor %}")
    ids = tokenizer.encode_chat(user(" <|im_end|> "))
    assert tokenizer.decode(ids) == "<|im_end|>|12"


# -- hostile and damaged templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999999) %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(1000) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(1000) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(1000) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(1000) %}{% set n.x = n.x | replace('a', n.x) %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(1000) %}{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(1000) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(1000) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x=[1]) %}{% for i in range(1000) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{% set n = namespace(x=3) %}{% for i in range(1000) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 2 ** (2 ** 62) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a'.ljust(10000000000) }}",
        "{{ 'a' | center(10000000000) }}",
        "{{ [1] | tojson(indent=1000000000) }}",
        "{{ strftime_now('%1000000000d') }}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ self.__init__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content.encode('utf-16') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ undefined_function() }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + none }}",
    ],
)
def test_hostile_templates_fail_cleanly(source: str) -> None:
    with pytest.raises(ValueError, match=r"^chat template (failed|cannot be used): ."):
        make(source).apply_chat_template(user("x"))


@pytest.mark.parametrize(
    "source", ["{% if x %}", "{{ }}", "{% for %}", "{{ 'a' | nofilter }}", "a" * 300_000, "{{" * 5000]
)
def test_damaged_templates_are_refused_when_loaded(source: str) -> None:
    with pytest.raises(ValueError, match=r"^chat template cannot be used: "):
        make(source)


def test_a_template_may_refuse() -> None:
    with pytest.raises(ValueError, match=r"^chat template failed: roles must alternate$"):
        make("{{ raise_exception('roles must alternate') }}").apply_chat_template(user("x"))


def test_rendering_matches_what_templates_are_written_for() -> None:
    source = (
        "{% for m in messages %}\n"
        "    {% if loop.index0 == 1 %}\n        {% break %}\n    {% endif %}\n{{ m.content }}\n{% endfor %}\n"
        "{% generation %}g{% endgeneration %}{{ [1, 'ü<'] | tojson }}{{ {'a': 1}.items() | list | length }}"
        "{{ bos_token }}{{ loop_length(3) }}{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    source = (
        "{% macro loop_length(n) %}{% for i in range(n) %}{{ loop.length - loop.index }}{% endfor %}{% endmacro %}"
        + source
    )
    tokenizer = make(source, bos_token="<|im_start|>")
    assert tokenizer.apply_chat_template([*user("a"), *user("b")]) == 'a\ng[1, "ü<"]1<|im_start|>2104True'


def test_long_conversations_have_a_budget_that_grows() -> None:
    messages = [{"role": ("user", "assistant")[index % 2], "content": "hello " * 2000} for index in range(401)]
    assert len(QWEN.apply_chat_template(messages)) > 401 * 12000


# -- incremental text -------------------------------------------------------------------------------------------------


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [*(detokenizer.push(index) for index in ids), detokenizer.flush()]


LLAMA = Tokenizer(sentencepiece())


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 270), max_size=30), skip_special=st.booleans())
def test_pieces_of_random_ids_join_to_the_whole(ids: list[int], skip_special: bool) -> None:
    joined = "".join(pieces(PLAIN, ids, skip_special))
    assert joined == PLAIN.decode(ids, skip_special=skip_special)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(
        st.sampled_from([0, 1, *range(258, 265), 0xC3 + 2, 0xA9 + 2, 0xE2 + 2, 0x82 + 2, 0xAC + 2]), max_size=12
    )
)
def test_pieces_of_sentencepiece_ids_join_to_the_whole(ids: list[int]) -> None:
    assert "".join(pieces(LLAMA, ids)) == LLAMA.decode(ids)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_no_piece_holds_half_a_character(text: str) -> None:
    given_out = pieces(PLAIN, PLAIN.encode(text, allow_special=False))
    assert "".join(given_out) == text
    assert not any("\ufffd" in piece for piece in given_out)
    assert given_out[-1] == ""


def test_an_incomplete_character_comes_at_the_end() -> None:
    ids = PLAIN.encode("a🙂", allow_special=False)[:-1]
    assert pieces(PLAIN, ids) == ["a", "", "", "", "\ufffd"]


def test_leading_space_belongs_to_the_middle_only() -> None:
    a, b = (LLAMA._inner.token_to_id(token) for token in ("▁a", "▁b"))
    assert pieces(LLAMA, [a, b, a]) == ["a", " b", " a", ""]
    assert pieces(LLAMA, [a, 1, b]) == ["a", "", " b", ""], "a skipped control token is no new beginning"


# -- files ------------------------------------------------------------------------------------------------------------


def config(vocab_size: int = 300) -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "max_position_embeddings": 64,
            "eos_token_id": 0,
        },
        "config.json",
    )


def write(folder: Path, **settings: Any) -> Path:
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_folder(tmp_path: Path) -> None:
    bos = {"content": "<|im_start|>", "special": True}
    write(tmp_path, eos_token="<|im_end|>", bos_token=bos, chat_template="{{ bos_token }}x")
    tokenizer = load_tokenizer(tmp_path, config())
    assert tokenizer is not None
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (0, 2))
    assert tokenizer.apply_chat_template(user("y")) == "<|im_start|>x"


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    write(tmp_path, chat_template=named)
    tokenizer = load_tokenizer(tmp_path, config())
    assert tokenizer is not None
    assert tokenizer.apply_chat_template(user("y")) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    tokenizer = load_tokenizer(tmp_path, config())
    assert tokenizer is not None
    assert tokenizer.apply_chat_template(user("y")) == "file"


def test_truncation_in_the_file_is_switched_off(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(2)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, config())
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("hello world", allow_special=True)) == "hello world"


def test_bad_tokenizer_files(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path, config()) is None
    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: knows 269 ids, the model has vocab_size = 100"):
        load_tokenizer(tmp_path, config(100))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template: expected a string"):
        load_tokenizer(tmp_path, config())
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat template cannot be used"):
        load_tokenizer(tmp_path, config())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer file"):
        load_tokenizer(tmp_path, config())
