"""The bytes a single token stands for, whole characters or not."""

from __future__ import annotations

import json

import tokenizers


class TokenBytes:
    """Bytes per id of `inner`. Joined over the ids of a text they are its UTF-8, but for what the decoder strips at its ends."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        """Read from the decoder whether the vocabulary spells bytes as characters (byte-level BPE)."""
        self._inner = inner
        self._added = {number: token.content for number, token in inner.get_added_tokens_decoder().items()}
        decoder = "" if inner.decoder is None else json.dumps(json.loads(inner.decoder.__getstate__()))
        self._byte_level = '"ByteLevel"' in decoder

    def __call__(self, token: int) -> bytes:
        """The bytes of `token`; none for an id without text."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._inner.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return b"".join(_BYTES.get(character, character.encode()) for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()  # SentencePiece's visible space


def _byte_characters() -> dict[str, bytes]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    own = {chr(byte): bytes([byte]) for byte in printable}
    return own | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTES = _byte_characters()
