"""What a tokenizer's definition says for certain about the tokens of any text.

Only parts whose behaviour is known are trusted. A tokenizer with any other part has no bound: nothing that would fit
may be refused.
"""

from collections.abc import Mapping
from typing import Any

Part = Mapping[str, Any] | None

# Characters that canonical composition can join into one: U+1F82 is an alpha with three marks.
_COMPOSED = 4
_COMPOSING = ("NFC", "NFKC")
_KEEPING_NORMALIZERS = ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel")
_SEPARABLE_NORMALIZERS = ("NFC", "NFKC", "NFD", "NFKD", "Lowercase")
_KEEPING_SPLITTERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Punctuation", "Split")
_NUM_BYTES = 256


def most_chars_per_token(definition: Mapping[str, Any]) -> int | None:
    """Return how many characters of a text one token can stand for at most; None where there is no such bound.

    `definition` is a tokenizer.json. There is no bound where a part drops characters, strips them, or replaces a run of
    unknown ones by a single token.
    """
    shrink = _shrink(definition.get("normalizer"))
    added = definition.get("added_tokens") or []
    if shrink is None or not _keeps_text(definition.get("pre_tokenizer")) or not _knows_every_byte(definition):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    longest = max(map(len, _vocabulary(definition)), default=1)
    longest_added = max((len(token["content"]) for token in added), default=1)
    return max(longest, longest_added) * shrink


def is_separable(definition: Mapping[str, Any]) -> bool:
    """Return whether the tokens before and after a border of the pre-tokenizer depend on nothing beyond it.

    This holds for borders between a letter and a character that is neither letter nor mark, outside of added tokens.
    """
    splitters = parts_of(definition.get("pre_tokenizer"), "pretokenizers")
    normalizers = parts_of(definition.get("normalizer"), "normalizers")
    model = definition["model"]
    return (
        bool(splitters)
        and all(_is_local(part) for part in splitters)
        and all(part["type"] in _SEPARABLE_NORMALIZERS for part in normalizers)
        and model.get("type", "BPE") == "BPE"
        and not model.get("dropout")
        and all(_is_local_token(token) for token in definition.get("added_tokens") or [])
    )


def parts_of(part: Part, members: str) -> list[Mapping[str, Any]]:
    """Return a part's members where it is a sequence, which its definition lists under `members`, else the part."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [found for member in part[members] for found in parts_of(member, members)]
    return [part]


def _shrink(normalizer: Part) -> int | None:
    """Return how many characters the normalizer can turn into one at most; None where there is no bound."""
    shrink = 1
    for part in parts_of(normalizer, "normalizers"):
        kind = part["type"]
        if kind in _COMPOSING:
            shrink *= _COMPOSED
        elif kind == "Replace" and "String" in part["pattern"] and part["content"]:
            shrink *= -(-len(part["pattern"]["String"]) // len(part["content"]))
        elif kind not in _KEEPING_NORMALIZERS:
            return None
    return shrink


def _keeps_text(pre_tokenizer: Part) -> bool:
    return all(
        part["type"] in _KEEPING_SPLITTERS and part.get("behavior") != "Removed"
        for part in parts_of(pre_tokenizer, "pretokenizers")
    )


def _knows_every_byte(definition: Mapping[str, Any]) -> bool:
    """Return whether each byte has a token, so that no character is unknown."""
    model = definition["model"]
    if model.get("type", "BPE") not in ("BPE", "Unigram"):
        return False
    vocabulary = _vocabulary(definition)
    if model.get("byte_fallback"):
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))
    all_parts = (
        *parts_of(definition.get("pre_tokenizer"), "pretokenizers"),
        *parts_of(definition.get("normalizer"), "normalizers"),
    )
    if not any(part["type"] == "ByteLevel" for part in all_parts):
        return False
    return sum(len(token) == 1 for token in vocabulary) >= _NUM_BYTES


def _vocabulary(definition: Mapping[str, Any]) -> set[str]:
    vocabulary = definition["model"]["vocab"]
    return set(vocabulary) if isinstance(vocabulary, Mapping) else {entry[0] for entry in vocabulary}


def _is_local(splitter: Mapping[str, Any]) -> bool:
    """Return whether what is before a border has no say in where later ones are."""
    kind = splitter["type"]
    if kind == "ByteLevel":
        return True
    if kind == "Split":
        pattern = splitter["pattern"]
        looks_back = "(?<" in str(pattern) or "\\b" in str(pattern)
        return splitter["behavior"] == "Isolated" and not splitter.get("invert") and not looks_back
    return bool(kind == "Digits")


def _is_local_token(token: Mapping[str, Any]) -> bool:
    """Return whether the text around an added token has no say in whether it is one."""
    return not (token.get("lstrip") or token.get("rstrip") or token.get("single_word"))
