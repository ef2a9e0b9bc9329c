"""Prompts as callers give them, texts, token ids or messages, and their token ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar

from pagestream_grammars.templates import ChatShapes, probe, shaped
from tokenizers import Tokenizer

from pagestream_engine.errors import InvalidRequest
from pagestream_engine.models.chat_template import folder_template

_NAMES = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
T = TypeVar("T")


class TextPrompt(TypedDict, total=False):
    """A text, which the model's tokenizer encodes."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, and the text that they came from, which is only shown."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, object]
"""Text, token ids, or vLLM's dictionaries. Prompts share the prefix cache with those of the same `cache_salt` alone."""


class EncodedPrompt(NamedTuple):
    """A prompt in tokens."""

    text: str | None
    token_ids: list[int]
    cache_salt: bytes = b""


class _Parsed(NamedTuple):
    text: str | None
    token_ids: list[int] | None
    cache_salt: bytes


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts; a list of token ids is one prompt."""
    if isinstance(prompts, (str, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer | None, *, add_special_tokens: bool = True
) -> list[EncodedPrompt]:
    """Return prompts in tokens.

    Raises:
        InvalidRequest: one has a wrong form, or is a text for a model without a tokenizer.
    """
    parsed = [_parse(prompt) for prompt in prompts]
    texts = [each.text for each in parsed if each.token_ids is None and each.text is not None]
    if texts and tokenizer is None:
        raise InvalidRequest(
            "prompt: given text, expected prompt_token_ids; text needs a tokenizer.json in the model folder"
        )
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens) if tokenizer and texts else ())
    return [
        EncodedPrompt(each.text, next(encoded).ids if each.token_ids is None else each.token_ids, each.cache_salt)
        for each in parsed
    ]


def one_for_each(name: str, num_prompts: int, given: T | Sequence[T], kind: type[T]) -> list[T]:
    """Return one value for all prompts, or one for each, as a list.

    Raises:
        InvalidRequest: there are more or fewer, or one is of another kind.
    """
    if isinstance(given, kind):
        return [given] * num_prompts
    if not isinstance(given, Sequence) or not all(isinstance(each, kind) for each in given):
        raise InvalidRequest(
            f"{name}: given {given!r:.80}, expected {getattr(kind, '__name__', kind)}, or a list of them"
        )
    if len(given) != num_prompts:
        raise InvalidRequest(f"{name}: given {len(given)}, expected one, or one for each of {num_prompts} prompts")
    return list(given)


def _parse(prompt: Prompt) -> _Parsed:
    if isinstance(prompt, str):
        return _Parsed(prompt, None, b"")
    if isinstance(prompt, Mapping):
        text, ids, salt = (prompt.get(name) for name in ("prompt", "prompt_token_ids", "cache_salt"))
        is_known = not prompt.keys() - _NAMES and isinstance(salt, str | None) and isinstance(text, str | None)
        if is_known and (isinstance(ids, (list, tuple)) or (ids is None and text is not None)):
            token_ids = None if ids is None else list(ids)
            return _Parsed(text, token_ids, str(salt or "").encode())  # type: ignore[arg-type]
    elif isinstance(prompt, (list, tuple)):
        return _Parsed(None, list(prompt), b"")
    raise InvalidRequest(
        f"prompt: given {prompt!r:.80}, expected a string, token ids, {{'prompt': str}} or "
        "{'prompt_token_ids': list of int}, either with a 'cache_salt'"
    )


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
