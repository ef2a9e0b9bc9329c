"""What options say of a model's chat template, and the shapes of messages that it takes, for the card."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pagestream.v1.records_pb2 import ChatShapes as ChatShapesMessage

logger = logging.getLogger(__name__)

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
    from pagestream_grammars.templates import template_fault

    if (fault := template_fault(text)) is not None:
        raise ChatTemplateError(f"{given!r:.200} was given, which is no Jinja template: {fault}")
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


def shapes_message(template: str, tokens: Mapping[str, str], arguments: str) -> ChatShapesMessage | None:
    """Return the shapes of messages that a template takes; None for one that is broken, which gateways will say."""
    from pagestream_grammars.templates import ChatShapes, Template, shapes_of, template_fault

    if (fault := template_fault(template)) is not None:
        logger.warning("the model's chat template is broken: %s", fault)
        return None
    shapes = shapes_of(Template(template, tokens), json.loads(arguments or "{}"))
    message = ChatShapesMessage()
    for name in (each.name for each in fields(ChatShapes)):
        value = getattr(shapes, name)
        if isinstance(value, frozenset):
            getattr(message, name).extend(sorted(value))
        else:
            setattr(message, name, value)
    return message
