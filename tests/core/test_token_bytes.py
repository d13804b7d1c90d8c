"""The bytes of single tokens, whole characters or not."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jetflow_core.tokenizer import Tokenizer


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, "he", "Ġw", "Ã©"])}
    merges = [("h", "e"), ("Ġ", "w"), ("Ã", "©")]
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|end|>"])
    inner.add_tokens([AddedToken("<é>", special=False, normalized=False)])
    return Tokenizer(inner)


def sentencepiece() -> Tokenizer:
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "é", "<0x4>"]
    vocabulary = {token: index for index, token in enumerate(pieces)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a")], byte_fallback=True, fuse_unk=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<s>"])
    return Tokenizer(inner)


BYTE_LEVEL, SENTENCEPIECE = byte_level(), sentencepiece()


@given(st.text() | st.lists(st.sampled_from(["he", " w", "é", "<|end|>", "<é>", "👩‍🚀", "\x00", "\xad"])).map("".join))
def test_bytes_of_a_text_join_to_it(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, allow_special=True)
    assert b"".join(map(BYTE_LEVEL.token_bytes, ids)) == text.encode()
    spaced = " " + text.replace("<s>", "").replace("▁", "")
    ids = SENTENCEPIECE.encode(spaced, allow_special=False)
    assert b"".join(map(SENTENCEPIECE.token_bytes, ids)) == spaced.encode()


@pytest.mark.parametrize(
    ("tokenizer", "piece", "expected"),
    [
        (BYTE_LEVEL, "Ġw", b" w"),
        (BYTE_LEVEL, "Ã", b"\xc3"),
        (BYTE_LEVEL, "<|end|>", b"<|end|>"),
        (BYTE_LEVEL, "<é>", "<é>".encode()),
        (SENTENCEPIECE, "<0x4A>", b"J"),
        (SENTENCEPIECE, "<0xC3>", b"\xc3"),
        (SENTENCEPIECE, "▁a", b" a"),
        (SENTENCEPIECE, "<0x4>", b"<0x4>"),  # looks like a byte and is none
        (SENTENCEPIECE, "<s>", b"<s>"),
    ],
)
def test_single_tokens(tokenizer: Tokenizer, piece: str, expected: bytes) -> None:
    number = tokenizer._inner.token_to_id(piece)
    assert number is not None
    assert tokenizer.token_bytes(number) == expected


def test_an_id_without_a_token_has_no_bytes() -> None:
    assert BYTE_LEVEL.token_bytes(BYTE_LEVEL.size + 5) == b""
