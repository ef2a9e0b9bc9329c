"""Reasoning that an answer doesn't show, in the signature of its block: clients send it back with the next turn.

Anthropic's signature has the whole reasoning, encrypted, so that a model goes on with what it thought between calls of
tools although its client shows nothing of it. Here it is plain base64: it is the caller's own.
"""

import base64
import binascii

_MARK = "pagestream."


def signature_of(reasoning: str) -> str:
    """Return the signature that carries a reasoning."""
    return _MARK + base64.b64encode(reasoning.encode("utf-8", "backslashreplace")).decode()


def reasoning_of(signature: object) -> str:
    """Return the reasoning that a signature carries; "" for one of another server, or one that was changed."""
    if not isinstance(signature, str) or not signature.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(signature[len(_MARK) :], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
