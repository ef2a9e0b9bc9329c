"""The bytes of tokens that are no text by themselves: parts of a character that is cut into several tokens."""

import json
import re

from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte-level tokens spell each byte by one character: these bytes by their own, all others from U+0100 on, in order.
_OWN = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(0x100) if byte not in _OWN]
_BYTE_LEVEL = {chr(byte): byte for byte in _OWN} | {chr(0x100 + place): byte for place, byte in enumerate(_OTHERS)}


class TokenBytes:
    """Finds bytes for byte-level tokenizers and for those that fall back to bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._kinds = _decoder_kinds(tokenizer)

    def get(self, token_id: int) -> bytes | None:
        """Return the bytes of a token; None where it does not spell them."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return None
        if "ByteLevel" in self._kinds and all(letter in _BYTE_LEVEL for letter in token):
            return bytes(_BYTE_LEVEL[letter] for letter in token)
        if "ByteFallback" in self._kinds and (byte := _BYTE_FALLBACK.fullmatch(token)):
            return bytes((int(byte[1], 16),))
        return None


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """Return the types of the decoder and of the decoders inside it."""
    if tokenizer.decoder is None:
        return set()
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return {decoder.get("type", "")} | {inner.get("type", "") for inner in decoder.get("decoders", ())}
