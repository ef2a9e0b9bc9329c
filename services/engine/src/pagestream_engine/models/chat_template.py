"""The chat template in a model's folder, and the special tokens that it names, as `transformers` reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagestream_engine.errors import ModelFileError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Those that `transformers` gives to templates."""
TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
PROCESSOR_FILES = ("chat_template.json", "processor_config.json")
"""Of models that take more than text; older ones have their template there."""
_DEFAULT = "default"
_CHOICES = (("tool_use", "tools"), ("rag", "documents"))
"""Named templates, and the value of a request for which each is taken."""


def folder_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """Return the chat template of a model's folder; empty where it has none.

    As in `transformers`, files go before tokenizer_config.json, and of named templates `tool_use` is taken where there
    are tools; `rag` is taken where there are documents. Where nothing else has one, a processor's is taken.

    Raises:
        ModelFileError: a file can't be read, or has something else.
    """
    named = _named(tokenizer_config.get("chat_template"), "tokenizer_config.json")
    try:
        files = {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
        if (folder / TEMPLATE_FILE).is_file():
            files[_DEFAULT] = folder / TEMPLATE_FILE
        if _DEFAULT in files:
            named = {}
        named |= {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        for name in PROCESSOR_FILES:
            if not named and (folder / name).is_file():
                content = json.loads((folder / name).read_text(encoding="utf-8"))
                named = _named(content.get("chat_template") if isinstance(content, dict) else content, name)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{folder}: its chat template can't be read: {error}") from error
    return _of_named(named)


def _named(given: Any, file: str) -> dict[str, str]:
    """Return templates by name: a text is the default, a list has objects of name and template."""
    if isinstance(given, str):
        return {_DEFAULT: given} if given else {}
    if isinstance(given, list) and all(isinstance(each, Mapping) for each in given):
        given = {each.get("name"): each.get("template") for each in given}
    if not given:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for pair in given.items() for each in pair):
        raise ModelFileError(
            f"{file}: chat_template: given {given!r:.80}, expected a text, or a list of objects with name and template"
        )
    return dict(given)


def _of_named(named: Mapping[str, str]) -> str:
    """Return one template that does what each named one would do where it is taken."""
    others = [(named[name], value) for name, value in _CHOICES if name in named]
    default = named.get(_DEFAULT, next(iter(named.values()), ""))
    if not others or (_DEFAULT not in named and len(named) == 1):
        return default
    # Jinja drops a line end behind a block and at the end of a template, and with `+` keeps blanks before a block.
    parts = [f"if {value} %}}\n{_ended(text)}{{%+ " for text, value in others]
    return f"{{% {'el'.join(parts)}else %}}\n{_ended(default)}{{%+ endif %}}"


def _ended(text: str) -> str:
    """Return a template without its last line end."""
    text = text.replace("\r\n", "\n")
    return text.removesuffix("\n")


def special_tokens(tokenizer_config: Mapping[str, Any], special_tokens_map: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by the names that templates have for them.

    Args:
        tokenizer_config: of tokenizer_config.json.
        special_tokens_map: of special_tokens_map.json, which older tokenizers have beside it or in its place.
    """
    found: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        for tokens in (tokenizer_config, special_tokens_map):
            token = tokens.get(name)
            if isinstance(token, dict):  # a serialised AddedToken
                token = token.get("content")
            if token and name not in found:
                found[name] = str(token)
    return found
