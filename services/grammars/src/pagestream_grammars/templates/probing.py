"""Try a chat template on short conversations to find the shapes of messages that it takes, as llama.cpp does.

A word that a conversation has and the prompt has not was left out; a part of a message that is shown as Python spells
it was taken for something else. Where a template fails on a shape it may take another one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pagestream_grammars.templates.rendering import ChatShapes, Message, SystemPlace, Template, TextBesideCalls

Render = Callable[[Sequence[Message], Sequence[Mapping[str, Any]], Mapping[str, Any]], str]
"""Makes a prompt of messages, tools and further values; raises what it will."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort` that callers may send."""
EFFORT = "reasoning_effort"
_LIMIT_S = 2.0
"""Seconds for all tries: about 70 renderings of less than a millisecond each."""
_LEAK = "xqleak"
_FIRST, _SECOND, _NAME, _OTHER_NAME = "xqone", "xqtwo", "xqname", "xqother"
_KEY, _VALUE = "xqkey", "xqvalue"
_ARGUMENTS = {_KEY: _VALUE}
_NAMED, _WHOLE = 2, 3
"""How much of a call a prompt has: its name, its arguments."""
_AS_TEXT = f'{{"{_KEY}": "{_VALUE}"}}'
_IDS = ("abcdef123", "abcdef456")
"""As Mistral's templates take them."""
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Answers.",
            "parameters": {
                "type": "object",
                "properties": {"question": {"type": "string", "description": "What to answer."}},
                "required": ["question"],
            },
        },
    }
    for name in ("answers", "asks")
]


def shapes_of(
    template: Template, arguments: Mapping[str, Any] | None = None, *, limit_s: float = _LIMIT_S
) -> ChatShapes:
    """Return the shapes that a template takes; the defaults for one that takes too long to tell.

    Args:
        template: to be tried.
        arguments: further values that it always gets.
        limit_s: seconds for all tries.
    """
    ends_at = time.monotonic() + limit_s

    def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> str:
        left = ends_at - time.monotonic()
        if left < 0:
            raise TimeoutError
        return template.render(messages, tools=tools, arguments={**(arguments or {}), **more}, limit_s=left)

    found = probe(render, knows_effort=EFFORT in template.source)
    return found if time.monotonic() < ends_at else ChatShapes()


def probe(render: Render, *, knows_effort: bool = True) -> ChatShapes:
    """Return the shapes that a template takes, by the prompts that `render` makes; the defaults where it makes none.

    Args:
        render: makes prompts.
        knows_effort: whether the template reads `reasoning_effort`.
    """
    return _Tries(render).shapes(knows_effort=knows_effort)


class _Tries:
    """What is known so far of a template."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._parts_only: set[str] = set()
        self._takes_part: set[str] = set()
        self._takes_parts: set[str] = set()
        self._offers: list[Sequence[Mapping[str, Any]]] = []
        """The tools beside which a conversation is tried: none and some, where they change the prompt."""

    def shapes(self, *, knows_effort: bool) -> ChatShapes:
        asked = [{"role": "user", "content": "Hi"}]
        self._find_offers(asked)
        if not self._offers:
            return ChatShapes()
        has_user = self._try_content("user", lambda content: [{"role": "user", "content": content}])
        asked = [self._said("user", "Hi")]
        self._try_content("assistant", lambda content: [*asked, {"role": "assistant", "content": content}, *asked])
        calls = self._calls(asked, has_user=has_user)
        has_system = self._try_content("system", lambda content: [{"role": "system", "content": content}, *asked])
        return ChatShapes(
            **calls,
            parts_only=frozenset(self._parts_only),
            takes_part=frozenset(self._takes_part),
            takes_parts=frozenset(self._takes_parts),
            system=self._system_place(has_system=has_system) if has_user else SystemPlace.ANYWHERE,
            alternates=has_user and self._refuses([self._said("user", _FIRST), self._said("user", _SECOND)]),
            no_developer=has_user and not self._shows([{"role": "developer", "content": _FIRST}, *asked], _FIRST),
            refused_efforts=self._refused_efforts(asked) if knows_effort else frozenset(),
        )

    def _find_offers(self, asked: Sequence[Message]) -> None:
        """Keep what a prompt can be made with: templates for tools alone fail without any."""
        found: dict[str, Sequence[Mapping[str, Any]]] = {}
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
        for tools in ((), _TOOLS):
            prompts = (self._prompt(messages, tools) for messages in (asked, parts))
            if (prompt := next((each for each in prompts if each is not None), None)) is not None:
                found.setdefault(prompt, tools)
        self._offers = list(found.values())

    def _prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Return the prompt; None where the template fails or spells what is no text."""
        try:
            text = self._render(messages, tools, arguments or {})
        except Exception:  # noqa: BLE001  a template may raise anything
            return None
        return None if _LEAK in text else text

    def _shows(self, messages: Sequence[Message], *words: str) -> bool:
        """Whether each word is in the prompt, whatever tools are offered."""
        prompts = [self._prompt(messages, tools) for tools in self._offers]
        return all(prompt is not None and all(word in prompt for word in words) for prompt in prompts)

    def _refuses(self, messages: Sequence[Message]) -> bool:
        return any(self._prompt(messages, tools) is None for tools in self._offers)

    def _said(self, role: str, text: str) -> dict[str, Any]:
        """Return a message in a shape that was found to be shown."""
        return {"role": role, "content": [{"type": "text", "text": text}] if role in self._parts_only else text}

    def _try_content(self, role: str, conversation: Callable[[Any], list[dict[str, Any]]]) -> bool:
        """Find how a role's content is shown. Returns whether it is at all."""
        parts = [{"type": "text", "text": word, _LEAK: _LEAK} for word in (_FIRST, _SECOND)]
        takes_text, takes_part = self._shows(conversation(_FIRST), _FIRST), self._shows(conversation(parts[:1]), _FIRST)
        if takes_part:
            self._takes_part.add(role)
            if self._shows(conversation(parts), _FIRST, _SECOND):
                self._takes_parts.add(role)
            if not takes_text:
                self._parts_only.add(role)
        return takes_text or takes_part

    def _calls(self, asked: list[dict[str, Any]], *, has_user: bool) -> dict[str, Any]:
        """Return what is found of calls and results; nothing where none are shown."""

        def called(content: Any, *names: str, as_text: bool) -> dict[str, Any]:
            arguments = _AS_TEXT if as_text else _ARGUMENTS
            calls = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for call_id, name in zip(_IDS, names or (_NAME,), strict=False)
            ]
            return {"role": "assistant", "content": content, "tool_calls": calls}

        blank = self._said("assistant", "")["content"]
        shown = {
            (content is None, as_text): self._shown_of_call([*asked, called(content, as_text=as_text)], asked)
            for content in (None, blank)
            for as_text in (False, True)
        }
        most = max(shown.values())
        if most < _NAMED:
            return {}
        as_text = most > max(shown[True, False], shown[False, False])
        takes_null, takes_blank = shown[True, as_text] == most, shown[False, as_text] == most
        if takes_null and takes_blank:
            # Some look into a content only where results, or another question, follow.
            result = {"role": "tool", "tool_call_id": _IDS[0], "content": _FIRST}
            tails = ([result], [result, self._said("assistant", "Hello"), *asked])
            null, empty_text = (
                [self._shows([*asked, called(content, as_text=as_text), *tail], _NAME) for tail in tails]
                for content in (None, blank)
            )
            takes_null = all(one or not other for one, other in zip(null, empty_text, strict=True))
            takes_blank = not takes_null or all(other or not one for one, other in zip(null, empty_text, strict=True))
        empty = None if takes_null else blank
        found: dict[str, Any] = {
            "text_arguments": as_text,
            "null_beside_calls": takes_null,
            "no_blank_beside_calls": not takes_blank,
        }
        said = self._said("assistant", _FIRST)
        if self._shown_of_call([*asked, called(said["content"], as_text=as_text)], asked) < most:
            divided = [*asked, said, called(empty, as_text=as_text)]
            is_shown = self._shows(divided, _FIRST, _NAME)
            found["text_beside_calls"] = TextBesideCalls.BEFORE if is_shown else TextBesideCalls.LEFT_OUT

        begun = [*asked, called(empty, as_text=as_text)]
        result = {"role": "tool", "tool_call_id": _IDS[0]}
        has_results = self._try_content("tool", lambda content: [*begun, {**result, "content": content}])
        if not has_results:
            return found
        first = {**self._said("tool", _FIRST), "tool_call_id": _IDS[0]}
        second = {**self._said("tool", _SECOND), "tool_call_id": _IDS[1]}
        named = [*begun, {**first, "name": _OTHER_NAME}]
        found["named_results"] = self._shows(named, _OTHER_NAME)
        found["no_user_after_result"] = has_user and not self._shows(
            [*begun, first, self._said("user", _SECOND)], _FIRST, _SECOND
        )
        two = [*asked, called(empty, _NAME, _OTHER_NAME, as_text=as_text), first, second]
        words = (_NAME, _OTHER_NAME, _FIRST, _SECOND)
        if not self._shows(two, *words):
            other = called(empty, _OTHER_NAME, as_text=as_text)
            other["tool_calls"][0]["id"] = _IDS[1]
            found["one_call"] = self._shows([*begun, first, other, second], *words)
        return found

    def _shown_of_call(self, messages: Sequence[Message], before: Sequence[Message]) -> int:
        """Return how much of a call the prompts have: 0 where one is refused, else 1, `_NAMED` or `_WHOLE`.

        Arguments are whole as JSON or in a spelling of the template's own. A null as Python spells it is a fault.

        Args:
            messages: with the call.
            before: those before it, whose prompt may have the word `None` for other reasons.
        """
        found = _WHOLE
        for tools in self._offers:
            prompt, plain = self._prompt(messages, tools), self._prompt(before, tools)
            if prompt is None or prompt.count("None") > (plain or "").count("None"):
                return 0
            is_misspelt = str(_ARGUMENTS) in prompt or f'\\"{_KEY}' in prompt
            if _KEY not in prompt or _VALUE not in prompt or is_misspelt:
                found = min(found, _NAMED if _NAME in prompt else 1)
        return found

    def _system_place(self, *, has_system: bool) -> SystemPlace:
        if not has_system:
            return SystemPlace.NOWHERE
        first, second, user = self._said("system", _FIRST), self._said("system", _SECOND), self._said("user", "Hi")
        later = [
            [first, user, self._said("assistant", "Hello"), second, user],
            [first, user, second],
            [first, second, user],
        ]
        is_anywhere = all(self._shows(each, _FIRST, _SECOND) for each in later)
        return SystemPlace.ANYWHERE if is_anywhere else SystemPlace.FIRST

    def _refused_efforts(self, asked: list[dict[str, Any]]) -> frozenset[str]:
        tools = self._offers[0]
        if self._prompt(asked, tools) is None:
            return frozenset()
        return frozenset(each for each in EFFORTS if self._prompt(asked, tools, {EFFORT: each}) is None)
