"""Render a model's chat template for a request.

A conversation becomes the messages that a kind of template takes; what the template refuses is an error of the
request's messages.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from pagestream_grammars.templates import ChatShapes, Template, results_of_calls, shapes_of, text_of

from pagestream_gateway.errors import InvalidRequest

# Appended to the message that the model continues, so that its end is found in the rendered text whatever the template
# puts after it.
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """A compiled chat template. Rendering is pure Python and may take milliseconds: call it in a thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template. Raises jinja2.TemplateError where it is broken."""
        self._template = Template(source, special_tokens)

    def shapes(self, arguments: Mapping[str, Any]) -> ChatShapes:
        """Try which shapes of messages the template takes, with values that it always gets; 10 to 60 ms."""
        return shapes_of(self._template, arguments)

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
            chat[-1]["content"] = _tagged(chat[-1].get("content"))
        try:
            text = self._template.render(
                chat, add_generation_prompt=add_generation_prompt, arguments=arguments, tools=tools
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error.message}") from error
        except Exception as error:
            raise InvalidRequest(
                "messages", f"the model's chat template fails on them: {type(error).__name__}"
            ) from error
        return _cut_at_tag(text) if continue_final_message else text


def _tagged(content: Any) -> Any:
    """Return a content with the tag at the end of its last text."""
    if not isinstance(content, list) or not content:
        return f"{content or ''}{_CONTINUE_TAG}"
    *before, last = content
    return [*before, {**last, "text": f"{last.get('text') or ''}{_CONTINUE_TAG}"}]


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


Message = Mapping[str, Any]
INSTRUCTING = ("system", "developer")
"""Roles of instructions."""


def with_system_first(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages for a template that knows no `developer`: instructions are of the system then.

    All of the system's become one message at the front, where templates look for it. Without such a message nothing
    changes. Most templates leave out a role that they don't know, and with it what was asked of the model.
    """
    if not any(each.get("role") == "developer" for each in messages):
        return messages
    is_instruction = [each.get("role") in INSTRUCTING for each in messages]
    found = [each for each, is_one in zip(messages, is_instruction, strict=True) if is_one]
    others = [each for each, is_one in zip(messages, is_instruction, strict=True) if not is_one]
    text = "\n\n".join(text_of(each["content"]) for each in found if each.get("content"))
    return [{"role": "system", "content": text}, *others]


def harmony_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as the template of gpt-oss takes them.

    Reasoning is the member `thinking`. A message has one call, which its result follows: further calls become messages
    of their own. Beside a call the template takes one text, so that what was said is added to the reasoning.
    """
    results = results_of_calls(messages)
    moved: set[int] = set()
    found: list[dict[str, Any]] = []
    for place, given in enumerate(messages):
        if place in moved:
            continue
        message = dict(given)
        if isinstance(message.get("content"), list):
            message["content"] = text_of(message["content"])
        thinking = message.pop("reasoning_content", None)
        message.pop("reasoning", None)
        calls = message.get("tool_calls") or ()
        if calls:
            thinking = "\n".join(each for each in (thinking, message.get("content")) if each)
            message["content"] = ""
        if thinking:
            message["thinking"] = thinking
        if len(calls) < 2:
            found.append(message)
            continue
        for number, call in enumerate(calls):
            found.append({**(message if not number else {"role": "assistant", "content": ""}), "tool_calls": [call]})
            if (result := results.get((place, number))) is not None:
                found.append(dict(messages[result]))
                moved.add(result)
    return found
