"""Render a model's Jinja chat template into a prompt, in a sandbox, by the conventions of Hugging Face's tokenizers."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from pagestream_gateway.core.template_bounds import BoundedEnvironment, bounded_text
from pagestream_gateway.errors import InvalidRequest

# Appended to the message that the model continues, so that its end is found in the rendered text whatever the template
# puts after it.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's filter, which escapes HTML: no model was trained on that."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return encoder.encode(value) if indent is None else bounded_text(encoder.iterencode(value))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.add_filter("tojson", _tojson)
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


class ChatTemplate:
    """A compiled chat template. Rendering is pure Python and may take milliseconds: call it in a thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template. Raises jinja2.TemplateError where it is broken."""
        self._environment = _environment()
        self._template = self._environment.compile_counted(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the prompt's text. Raises InvalidRequest for "messages" where the template refuses them."""
        chat = [dict(message) for message in messages]
        if continue_final_message:
            chat[-1]["content"] = f"{chat[-1].get('content') or ''}{_CONTINUE_TAG}"
        values = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(arguments or {}),
            **({"tools": list(tools)} if tools else {}),
            "messages": chat,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._environment.render_bounded(self._template, values)
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error.message}") from error
        except Exception as error:
            raise InvalidRequest(
                "messages", f"the model's chat template fails on them: {type(error).__name__}"
            ) from error
        return _cut_at_tag(text) if continue_final_message else text


def _cut_at_tag(text: str) -> str:
    place = text.rfind(_CONTINUE_TAG.strip())
    if place < 0:
        raise InvalidRequest(
            "continue_final_message",
            "the model's chat template leaves out the final message, so nothing can be continued",
        )
    if text.startswith(_CONTINUE_TAG, place):
        return text[:place]
    return text[:place].rstrip()
