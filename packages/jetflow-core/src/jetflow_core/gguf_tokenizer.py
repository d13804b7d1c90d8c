"""Rebuilding a byte-level BPE tokenizer and the chat template from GGUF metadata."""

from __future__ import annotations

import tokenizers
from gguf import TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jetflow_core.config_fields import Fields
from jetflow_core.gguf_file import GgufFile
from jetflow_core.model_config import ModelConfig
from jetflow_core.tensor_source import CheckpointError
from jetflow_core.tokenizer import Tokenizer, build_tokenizer

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` → repetition of the digits in one piece. The other two kinds split by GPT-2's own rule.
_DIGITS = {"qwen2": "", "llama-bpe": "{1,3}"}
_GPT2 = ("smollm", "gpt-2")


def read_tokenizer(file: GgufFile, config: ModelConfig) -> Tokenizer:
    """The tokenizer in the metadata of `file`, chat template included.

    Raises `CheckpointError` naming the key of anything missing, inconsistent or not supported.
    """
    fields = Fields(
        {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}, str(file.path)
    )
    if fields.string("tokenizer.ggml.model") != "gpt2":
        raise fields.error("tokenizer.ggml.model", "only gpt2 (byte-level BPE) is supported")
    tokens = fields.strings("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens) or len(tokens) > config.vocab_size:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens: {len(set(tokens))} different of {len(tokens)} tokens, "
            f"the model has vocab_size = {config.vocab_size}"
        )
    named = _named_tokens(fields, tokens)
    inner = _byte_level_bpe(fields, tokens)
    _add_special(inner, fields, tokens)
    if fields.boolean("tokenizer.ggml.add_bos_token", False) and config.bos_token_id is not None:
        bos = named["bos_token"]
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, config.bos_token_id)]
        )
    template = fields.string("tokenizer.chat_template") if fields.has("tokenizer.chat_template") else None
    return build_tokenizer(inner, named, template, config)


def _named_tokens(fields: Fields, tokens: tuple[str, ...]) -> dict[str, str]:
    named: dict[str, str] = {}
    for name, spelling in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        key = f"tokenizer.ggml.{spelling}_token_id"
        if fields.has(key):
            if not 0 <= fields.integer(key) < len(tokens):
                raise fields.error(key, f"there are {len(tokens)} tokens")
            named[f"{name}_token"] = tokens[fields.integer(key)]
    return named


def _byte_level_bpe(fields: Fields, tokens: tuple[str, ...]) -> tokenizers.Tokenizer:
    kind = fields.string("tokenizer.ggml.pre", "gpt-2")
    if kind not in _GPT2 and kind not in _DIGITS:
        raise fields.error("tokenizer.ggml.pre", f"supported are {', '.join((*_GPT2, *_DIGITS))}")
    merges: list[tuple[str, str]] = []
    for merge in fields.strings("tokenizer.ggml.merges"):
        first, separator, second = merge.partition(" ")
        if not separator or " " in second:
            raise CheckpointError(f"{fields.source}: tokenizer.ggml.merges: {merge!r} is not a pair")
        merges.append((first, second))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind == "llama-bpe")
    except Exception as error:  # the library raises plain Exception for merges outside the vocabulary
        raise CheckpointError(f"{fields.source}: tokenizer.ggml.merges: {error}") from None
    inner = tokenizers.Tokenizer(model)
    if kind in _GPT2:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if kind == "smollm" else []
        inner.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    else:
        split = pre_tokenizers.Split(Regex(_WORDS.replace("DIGITS", _DIGITS[kind])), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if kind == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    return inner


def _add_special(inner: tokenizers.Tokenizer, fields: Fields, tokens: tuple[str, ...]) -> None:
    """Control tokens are special; user-defined ones (`<think>` …) are matched whole but are ordinary text."""
    kinds = fields.integers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens):
        raise CheckpointError(f"{fields.source}: tokenizer.ggml.token_type: {len(kinds)} for {len(tokens)} tokens")
    for special, wanted in ((True, TokenType.CONTROL), (False, TokenType.USER_DEFINED)):
        found = [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]
        added = [AddedToken(token, special=special, normalized=False) for token in found]
        inner.add_special_tokens(added) if special else inner.add_tokens(added)
