"""Render a model's chat template for a request: what the template refuses is an error of the request's messages."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from pagestream_grammars.templates import ChatShapes, Template, shapes_of

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
