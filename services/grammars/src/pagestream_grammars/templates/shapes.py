"""Bring a conversation into the shapes that a chat template was written for.

Callers send OpenAI's messages: a content is a text, a list of text parts or null, arguments of calls are JSON text, and
a system message may stand anywhere. Templates were each written for some of that. What they are given beyond it they
refuse, or leave out of the prompt without a word.
"""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
Message = Mapping[str, Any]
Chat = list[dict[str, Any]]
Content = str | list[dict[str, Any]] | None
_CALLS = "tool_calls"
_INSTRUCTING = ("system", "developer")
_BETWEEN_INSTRUCTIONS = "\n\n"


class SystemPlace(IntEnum):
    """Where a template shows messages of the system."""

    ANYWHERE = 0
    FIRST = 1
    """One, at the front: later ones are joined to it."""
    NOWHERE = 2
    """In no message of its own: the first message of the user begins with it."""


class TextBesideCalls(IntEnum):
    """What a template makes of an assistant's message with a text and calls."""

    KEPT = 0
    """It shows the calls. Some leave the text out, as they were written to."""
    BEFORE = 1
    """It leaves out the calls: the text becomes a message before theirs."""
    LEFT_OUT = 2
    """Likewise, and takes no such message."""


@dataclass(frozen=True)
class ChatShapes:
    """The shapes that a template takes. The defaults are of one that takes what most do."""

    parts_only: frozenset[str] = frozenset()
    """Roles whose content is shown as a part, and is not as a text."""
    takes_part: frozenset[str] = frozenset()
    """Roles whose content may be a list of one part."""
    takes_parts: frozenset[str] = frozenset()
    """Roles whose content may be a list of several, all of which are shown."""
    text_arguments: bool = False
    """Whether arguments of calls are JSON text, not objects."""
    null_beside_calls: bool = False
    """Whether a content beside calls may be null."""
    no_blank_beside_calls: bool = False
    """Whether calls are shown beside null alone, and not beside an empty text."""
    text_beside_calls: TextBesideCalls = TextBesideCalls.KEPT
    one_call: bool = False
    """Whether a message has one call, which its result follows."""
    named_results: bool = False
    """Whether it shows the name of the function in the message of its result."""
    system: SystemPlace = SystemPlace.ANYWHERE
    alternates: bool = False
    """Whether neighbours of one role are refused."""
    no_user_after_result: bool = False
    """Whether a user's message is refused right after the result of a call."""
    refused_efforts: frozenset[str] = frozenset()
    """Values of `reasoning_effort` that it refuses."""
    no_developer: bool = False
    """Whether messages of the role `developer` are not shown."""


def text_of(content: Any) -> str:
    """Return the text of a content; parts are joined as lines."""
    if isinstance(content, list | tuple):
        return "\n".join(str(part.get("text") or "") for part in content)
    return str(content or "")


def shaped(messages: Sequence[Message], shapes: ChatShapes) -> Chat:
    """Return a conversation in the shapes of its template.

    Args:
        messages: OpenAI's; arguments of calls may be objects as well.
        shapes: of the template.
    """
    chat = [dict(message) for message in messages]
    if shapes.system is not SystemPlace.ANYWHERE:
        chat = _with_system_first(chat)
    if shapes.system is SystemPlace.NOWHERE:
        chat = _with_system_in_user(chat)
    if shapes.alternates:
        chat = _merged(chat)
    if shapes.no_user_after_result:
        chat = _with_users_in_results(chat)
    if shapes.named_results:
        chat = _with_names(chat)
    if shapes.one_call:
        chat = _one_call_each(chat)
    return [each for message in chat for each in _of_message(message, shapes)]


def _with_system_first(chat: Chat) -> Chat:
    found = [each for each in chat if each.get("role") in _INSTRUCTING]
    if not found or (len(found) == 1 and chat[0] is found[0]):
        return chat
    others = [each for each in chat if each.get("role") not in _INSTRUCTING]
    content = found[0].get("content") if len(found) == 1 else _joined(found)
    return [{**found[0], "content": content}, *others]


def _joined(messages: Chat) -> str:
    texts = [text_of(each.get("content")) for each in messages]
    return _BETWEEN_INSTRUCTIONS.join(text for text in texts if text)


def _with_system_in_user(chat: Chat) -> Chat:
    """Write the system's message, which is the first one, at the beginning of the user's."""
    if not chat or chat[0].get("role") != "system":
        return chat
    system, *others = chat
    if not others or others[0].get("role") != "user":
        return [{**system, "role": "user"}, *others]
    return [{**others[0], "content": _joined([system, others[0]])}, *others[1:]]


def _merged(chat: Chat) -> Chat:
    """Make one message of neighbours of the user, and of the assistant, but for a text that follows calls."""
    found: Chat = []
    for message in chat:
        last, role = found[-1] if found else {}, message.get("role")
        if last.get("role") == role == "user":
            found[-1] = {**last, "content": _added(last.get("content"), message.get("content"))}
        elif last.get("role") == role == "assistant" and (not last.get("tool_calls") or message.get("tool_calls")):
            one = {**last, **message, "content": _added(last.get("content"), message.get("content"))}
            for name in ("reasoning", "reasoning_content"):
                if last.get(name) and message.get(name):
                    one[name] = f"{last[name]}\n{message[name]}"
            if calls := [*(last.get("tool_calls") or ()), *(message.get("tool_calls") or ())]:
                one["tool_calls"] = calls
            found[-1] = one
        else:
            found.append(message)
    return found


def _added(first: Any, second: Any) -> Content:
    """Return the parts of two contents; one alone stays as it is."""
    if not first or not second:
        return first or second  # type: ignore[no-any-return]
    return [*_parts_of(first), *_parts_of(second)]


def _parts_of(content: Any) -> list[dict[str, Any]]:
    return list(content) if isinstance(content, list | tuple) else [{"type": "text", "text": str(content)}]


def _with_users_in_results(chat: Chat) -> Chat:
    """Add what a user says right after results of calls to the last of these."""
    found: Chat = []
    for message in chat:
        last = found[-1] if found else {}
        if last.get("role") == "tool" and message.get("role") == "user":
            found[-1] = {**last, "content": _joined([last, message])}
        else:
            found.append(message)
    return found


def _with_names(chat: Chat) -> Chat:
    """Name the function in each result that has no name."""
    results = results_of_calls(chat)
    names = {place: _name_of(chat[of][_CALLS][number]) for (of, number), place in results.items()}
    return [
        {**each, "name": name} if not each.get("name") and (name := names.get(place)) else each
        for place, each in enumerate(chat)
    ]


def _name_of(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _one_call_each(chat: Chat) -> Chat:
    """Give each call a message of its own, which its result follows."""
    results = results_of_calls(chat)
    moved: set[int] = set()
    found: Chat = []
    for place, message in enumerate(chat):
        calls = message.get(_CALLS) or ()
        if place in moved:
            continue
        if len(calls) < 2:
            found.append(message)
            continue
        for number, call in enumerate(calls):
            found.append({**(message if not number else {"role": "assistant", "content": None}), _CALLS: [call]})
            if (result := results.get((place, number))) is not None:
                found.append(chat[result])
                moved.add(result)
    return found


def results_of_calls(messages: Sequence[Message]) -> dict[tuple[int, int], int]:
    """Return the places of the messages that are results, by the place of a message with calls and a call's number.

    Many servers number calls anew in each turn, or leave ids empty: a result is of the last call before it that has its
    id, and of calls of one message with the same id the first one without a result.
    """
    found: dict[tuple[int, int], int] = {}
    waiting: dict[Any, deque[tuple[int, int]]] = {}
    for place, message in enumerate(messages):
        own: dict[Any, deque[tuple[int, int]]] = {}
        for number, call in enumerate(message.get(_CALLS) or ()):
            if isinstance(call, dict):
                own.setdefault(call.get("id"), deque()).append((place, number))
        waiting |= own
        if message.get("role") == "tool" and (calls := waiting.get(message.get("tool_call_id"))):
            found[calls.popleft()] = place
    return found


def _of_message(message: dict[str, Any], shapes: ChatShapes) -> Chat:
    """Return a message in its shape, which may be two."""
    calls, role = message.get("tool_calls"), str(message.get("role"))
    if not calls:
        return [{**message, "content": _content(role, message.get("content"), shapes)}]
    message["tool_calls"] = [_call(each, as_text=shapes.text_arguments) for each in calls]
    text = text_of(message.get("content"))
    is_null = shapes.null_beside_calls and (message.get("content") is None or shapes.no_blank_beside_calls)
    blank = None if is_null else _content(role, "", shapes)
    if not text or shapes.text_beside_calls is TextBesideCalls.LEFT_OUT:
        return [{**message, "content": blank}]
    content = _content(role, message["content"], shapes)
    if shapes.text_beside_calls is TextBesideCalls.KEPT:
        return [{**message, "content": content}]
    said = {name: each for name, each in message.items() if name != "tool_calls"}
    return [{**said, "content": content}, {"role": role, "content": blank, "tool_calls": message["tool_calls"]}]


def _content(role: str, content: Any, shapes: ChatShapes) -> Content:
    if isinstance(content, list | tuple):
        taken = shapes.takes_parts if len(content) > 1 else shapes.takes_part if content else ()
        if role in taken:
            return list(content)
    text = text_of(content)
    return [{"type": "text", "text": text}] if role in shapes.parts_only else text


def _call(call: Any, *, as_text: bool) -> Any:
    """Return a call with its arguments as text or as an object; an empty one for what is none."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    arguments = (_as_text if as_text else _as_object)(function.get("arguments"))
    return {**call, "function": {**function, "arguments": arguments}}


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments if arguments is not None else {}, ensure_ascii=False)


def _as_object(arguments: Any) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        read = json.loads(arguments or "{}")
    except (TypeError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
