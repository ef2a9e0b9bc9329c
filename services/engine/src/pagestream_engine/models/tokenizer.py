"""A folder's tokenizer, with the tokens that its other files add to tokenizer.json or call special.

As in `transformers`: what tokenizer_config.json says of an added token counts, and a token that a file names, such as
eos_token, is a special one. Only tokens that have an id in the vocabulary, or the next free one, are taken: an
embedding has no row for others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pagestream_engine.errors import DOWNLOAD_AGAIN, ModelFileError
from pagestream_engine.models.defaults import read_if_there

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_SPELLED_BYTES = re.compile("[\u00a1-\u0143]")
"""Letters beyond ASCII that stand for bytes in vocabularies of bytes."""
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True)
class _Declared:
    """An added token by another file than tokenizer.json."""

    token_id: int | None
    flags: Mapping[str, bool] | None
    """None: a file names it, and says no more."""
    is_special: bool


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the folder's tokenizer, without padding and truncation; None where there is no tokenizer.json (tokens in,
    tokens out).

    Raises:
        ModelFileError: a file of it is malformed.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ModelFileError(f"{path}: unreadable, expected a tokenizer: {error}; {DOWNLOAD_AGAIN}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if changes := _changes(tokenizer, _declared(folder)):
        tokenizer.add_tokens(changes)
    return tokenizer


def tokenizer_json(folder: Path) -> bytes | None:
    """Return a definition of the folder's tokenizer, for programs without its other files: tokenizer.json, unless those
    change it; None where there is none.

    Raises:
        ModelFileError: as `load_tokenizer`.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    changed = changed_tokenizer(folder)
    return path.read_bytes() if changed is None else changed.to_str().encode()


def changed_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer where other files than tokenizer.json change its tokens; None where they don't.

    Raises:
        ModelFileError: as `load_tokenizer`.
    """
    path = folder / "tokenizer.json"
    declared = _declared(folder)
    if not declared or not path.is_file():
        return None
    known = _added_in(path)
    if known is not None and all(_agrees(each, known.get(content)) for content, each in declared.items()):
        return None
    tokenizer = load_tokenizer(folder)
    plain = Tokenizer.from_file(str(path))
    return tokenizer if tokenizer is not None and _changes(plain, declared) else None


def has_first_texts(folder: Path) -> bool:
    """Return whether version 2 of the numerics `text` gives each token of a folder the text that version 1 gave it, as
    far as tokenizer.json tells without its vocabulary: its bytes are spelled with GPT-2's letters, and no added token
    has any of those beyond ASCII.

    Raises:
        ModelFileError: as `load_tokenizer`.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return True
    added, decoder = _added_in(path), _part_of(path, "decoder", "{")
    is_byte_level = decoder is not None and decoder.get("type") == "ByteLevel"
    if added is None or not is_byte_level or changed_tokenizer(folder) is not None:
        return False
    return not any(_SPELLED_BYTES.search(content) for content in added)


def _changes(tokenizer: Tokenizer, declared: Mapping[str, _Declared]) -> list[AddedToken]:
    """Return the tokens that a tokenizer has to take, or to take anew."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    next_id = 1 + max(tokenizer.get_vocab().values(), default=-1)
    found = []
    for content, each in sorted(declared.items(), key=lambda item: (item[1].token_id is None, item[1].token_id or 0)):
        token = known.get(content)
        is_new = token is None and tokenizer.token_to_id(content) is None
        if is_new and each.token_id != next_id:
            continue
        next_id += is_new
        is_special = each.is_special or (token is not None and token.special)
        if each.flags is not None:
            wanted = AddedToken(content, special=is_special, **each.flags)
        elif token is None:
            wanted = AddedToken(content, special=is_special)
        else:
            continue
        if token is None or repr(wanted) != repr(token):
            found.append(wanted)
    return found


def _agrees(declared: _Declared, known: Mapping[str, Any] | None) -> bool:
    """Whether tokenizer.json says the same of a token."""
    if known is None:
        return False
    flags = declared.flags
    return flags is None or (
        declared.is_special <= bool(known.get("special")) and all(known.get(name) == flags[name] for name in _FLAGS)
    )


def _added_in(path: Path) -> dict[str, Mapping[str, Any]] | None:
    """Return the added tokens of a tokenizer.json by their content, without reading its vocabulary; None where they are
    not found so."""
    try:
        return {each["content"]: each for each in _part_of(path, "added_tokens", "[")}
    except (TypeError, KeyError):
        return None


def _part_of(path: Path, name: str, bracket: str) -> Any:
    """Return a part of a tokenizer.json that stands before the model, and begins with a bracket; None where it is not
    found so."""
    text = path.read_text(encoding="utf-8")
    place = text.find(f'"{name}"')
    begin = text.find(bracket, place) if 0 <= place < (text.find('"model"') % len(text)) else -1
    if begin < 0:
        return None
    try:
        return json.JSONDecoder().raw_decode(text, begin)[0]
    except ValueError:
        return None


def _declared(folder: Path) -> dict[str, _Declared]:
    """Return the added tokens of the other files, by their content."""
    config = read_if_there(folder / "tokenizer_config.json")
    entries = config.get("added_tokens_decoder")
    found: dict[str, _Declared] = {}
    if isinstance(entries, dict):
        for number, entry in entries.items():
            if not isinstance(entry, dict) or not isinstance(entry.get("content"), str) or not number.isdecimal():
                raise ModelFileError(
                    f"tokenizer_config.json: added_tokens_decoder: given {entry!r:.80}, expected tokens by their ids"
                )
            # A token that says nothing of it is normalized unless it is special, as for `tokenizers.AddedToken`.
            is_special = bool(entry.get("special"))
            defaults = dict.fromkeys(_FLAGS, False) | {"normalized": not is_special}
            flags = {name: bool(entry.get(name, defaults[name])) for name in _FLAGS}
            found[entry["content"]] = _Declared(int(number), flags, is_special)
        names = config
    else:
        names = {**config, **read_if_there(folder / "special_tokens_map.json")}
    for content in _named(names):
        found.setdefault(content, _Declared(None, None, True))
    return found


def _named(files: Mapping[str, Any]) -> Iterator[str]:
    values = [files.get(name) for name in _NAMED]
    for name in _LISTS:
        given = files.get(name)
        values += given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
    for value in values:
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str) and content:
            yield content
