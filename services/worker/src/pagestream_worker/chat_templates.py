"""The chat template of a model's card: from its folder or an option, with what it takes."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pagestream.v1.records_pb2 import ChatShapes as ChatShapesMessage

logger = logging.getLogger(__name__)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Those that `transformers` gives to templates."""
TEMPLATE_FILE, TEMPLATE_JSON, TEMPLATE_FOLDER = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
_DEFAULT = "default"
_CHOICES = (("tool_use", "tools"), ("rag", "documents"))
"""Named templates, and the value of a request for which each is taken."""
_OF_JINJA = ("{{", "{%", "{#", "\n")


class ChatTemplateError(ValueError):
    """A chat template can't be read, or is broken."""


@dataclass(frozen=True)
class ChatTemplateOptions:
    """What options say of a model's chat template."""

    text: str = ""
    """In place of the folder's; empty for that."""
    arguments: str = ""
    """Values that it gets where a request gives none, as a JSON object; empty for none."""


def given_template(given: str) -> str:
    """Return the text of a template, given as a file or, as in vLLM, as the text itself.

    Raises:
        ChatTemplateError: it is neither, or no template.
    """
    text = given
    if not any(mark in given for mark in _OF_JINJA):
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ChatTemplateError(f"{given!r:.200} was given, a file with a Jinja template is expected") from error
    _compiled(text, given)
    return text


def given_arguments(given: str) -> str:
    """Return values for templates as they were given. Raises ChatTemplateError where they are no JSON object."""
    try:
        is_object = isinstance(json.loads(given), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise ChatTemplateError(
            f'{given!r:.200} was given, a JSON object like {{"enable_thinking": false}} is expected'
        )
    return given


def folder_template(folder: Path, tokenizer_config: Mapping[str, Any]) -> str:
    """Return the chat template of a model's folder; empty where it has none.

    As in `transformers`, files go before tokenizer_config.json, and of named templates `tool_use` is taken where there
    are tools; `rag` is taken where there are documents. Where nothing else has one, a processor's is taken.

    Raises:
        ChatTemplateError: a file can't be read, or has something else.
    """
    named = _named(tokenizer_config.get("chat_template"), "tokenizer_config.json")
    try:
        files = {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
        if (folder / TEMPLATE_FILE).is_file():
            files[_DEFAULT] = folder / TEMPLATE_FILE
        if _DEFAULT in files:
            named = {}
        named |= {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        if not named and (folder / TEMPLATE_JSON).is_file():
            content = json.loads((folder / TEMPLATE_JSON).read_text(encoding="utf-8"))
            named = _named(content.get("chat_template") if isinstance(content, dict) else content, TEMPLATE_JSON)
    except (OSError, ValueError) as error:
        raise ChatTemplateError(f"{folder}: its chat template can't be read: {error}") from error
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
        raise ChatTemplateError(
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


def shapes_message(template: str, tokens: Mapping[str, str], arguments: str) -> ChatShapesMessage | None:
    """Return the shapes of messages that a template takes; None for one that is broken, which gateways will say."""
    from pagestream_grammars.templates import ChatShapes, shapes_of

    try:
        compiled = _compiled(template, "", tokens)
    except ChatTemplateError as error:
        logger.warning("the model's chat template is broken: %s", error)
        return None
    shapes = shapes_of(compiled, json.loads(arguments or "{}"))
    message = ChatShapesMessage()
    for name in (each.name for each in fields(ChatShapes)):
        value = getattr(shapes, name)
        if isinstance(value, frozenset):
            getattr(message, name).extend(sorted(value))
        else:
            setattr(message, name, value)
    return message


def _compiled(text: str, given: str, tokens: Mapping[str, str] | None = None) -> Any:
    """Return a compiled template. Raises ChatTemplateError where it is broken."""
    from pagestream_grammars.templates import Template, TemplateError

    try:
        return Template(text, tokens or {})
    except TemplateError as error:
        raise ChatTemplateError(f"{given!r:.200} was given, which is no Jinja template: {error.message}") from error
