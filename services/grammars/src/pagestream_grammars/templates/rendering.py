"""Render a model's Jinja chat template into a prompt, in a sandbox, by the conventions of Hugging Face's tokenizers."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from pagestream_grammars.templates.bounds import BoundedEnvironment, bounded_text


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


class Template:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            source: its text.
            special_tokens: texts by the names that templates have for them, such as `bos_token`.

        Raises:
            jinja2.TemplateError: it is broken.
        """
        self.source = source
        self._environment = _environment()
        self._template = self._environment.compile_counted(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        limit_s: float | None = None,
    ) -> str:
        """Return the prompt's text. Rendering is pure Python and may take milliseconds.

        Args:
            messages: of the conversation, in the shapes that the template takes.
            add_generation_prompt: whether to open the assistant's turn.
            arguments: further values; they go before special tokens, and not before messages.
            tools: that the template shows to the model.
            limit_s: seconds that it may take.

        Raises:
            jinja2.TemplateError: the template refuses the messages, or reaches a bound.
            Exception: whatever a fault of the template raises.
        """
        values = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(arguments or {}),
            **({"tools": list(tools)} if tools else {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._environment.render_bounded(self._template, values, limit_s)


def template_fault(source: str) -> str | None:
    """Return why a text is no Jinja template; None where it is one."""
    try:
        Template(source, {})
    except jinja2.TemplateError as error:
        return error.message or type(error).__name__
    return None
