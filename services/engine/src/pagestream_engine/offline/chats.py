"""Messages to the text of a prompt, by the chat template of a model's folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagestream_grammars.templates import ChatShapes, probe, shaped

from pagestream_engine.errors import InvalidRequest
from pagestream_engine.models.chat_template import folder_template

Message = Mapping[str, Any]
_PAIR_ROLES = tuple(re.compile(rf"""(['"]){role}\1""") for role in ("query", "document"))


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[list[Message]]:
    """Return a list of conversations; a list of messages is one.

    Raises:
        InvalidRequest: it is neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidRequest(f"messages: given {messages!r:.80}, expected a list of messages, or a list of such lists")
    if isinstance(messages[0], Mapping):
        return [list(messages)]  # type: ignore[arg-type]
    return [list(conversation) for conversation in messages]  # type: ignore[arg-type]


class ChatTemplate:
    """The tokenizer of a folder as `transformers` reads it, whose templates it renders."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's files.

        Raises:
            InvalidRequest: they make no tokenizer.
        """
        from transformers import PreTrainedTokenizerFast

        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            if not self._tokenizer.chat_template:
                self._tokenizer.chat_template = folder_template(folder, {}) or None
        except Exception as error:
            raise InvalidRequest(f"messages: given for a model without a readable tokenizer: {error!s:.200}") from error
        self._shapes: dict[str | None, ChatShapes] = {}

    @property
    def has_pair_roles(self) -> bool:
        """Whether the template has roles for a query and a document, by which models that score pairs read them."""
        template = self._tokenizer.chat_template
        return isinstance(template, str) and all(role.search(template) for role in _PAIR_ROLES)

    def render(self, messages: Sequence[Message], *, template: str | None = None, **options: Any) -> str:
        """Return the text of a conversation.

        Args:
            messages: of one conversation.
            template: in place of the model's own.
            options: of `transformers`' `apply_chat_template`.

        Raises:
            InvalidRequest: a message has a part that is no text, or the template can't render it.
        """
        plain = [_plain(message) for message in messages]
        if template is None and not self._tokenizer.chat_template:
            raise InvalidRequest(
                "messages: given for a model without a chat template, expected chat_template, or `generate` with a text"
            )
        try:
            text = self._apply(shaped(plain, self._shapes_of(template)), template, **options)
        except Exception as error:  # a template may raise anything
            raise InvalidRequest(f"messages: given what the chat template can't render: {error!s:.200}") from error
        return str(text)

    def _shapes_of(self, template: str | None) -> ChatShapes:
        """Try which shapes of messages a template takes, once."""
        if template not in self._shapes:

            def render(messages: Sequence[Message], tools: Sequence[Any], arguments: Mapping[str, Any]) -> str:
                tools_or_none = list(tools) or None
                return self._apply(messages, template, tools=tools_or_none, add_generation_prompt=True, **arguments)

            self._shapes[template] = probe(render)
        return self._shapes[template]

    def _apply(self, messages: Sequence[Message], template: str | None, **options: Any) -> str:
        return str(
            self._tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **options)
        )


def _plain(message: Message) -> dict[str, Any]:
    """Return a message whose content is a text, parts of text, or none."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages: given {message!r:.80}, expected a role and a content")
    found = dict(message)
    content = found.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        found["content"] = [{"type": "text", "text": _text_of(part)} for part in content]
    return found


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(f"messages: given a part {part!r:.80}, expected text; models are of text alone")
