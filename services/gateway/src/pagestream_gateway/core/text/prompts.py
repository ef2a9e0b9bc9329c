"""From a prompt, as its caller spelled it, to the texts that are to be encoded, and to its tokens."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pagestream_grammars.templates import ChatShapes, shaped, text_of

from pagestream_gateway.core.drafts import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt, must_fit
from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.output.call_ids import with_short_ids
from pagestream_gateway.core.output.form import set_output_form
from pagestream_gateway.core.output.history import INSTRUCTING, harmony_messages, with_system_first
from pagestream_gateway.core.output.select import is_harmony, reasoning_arguments, tool_format
from pagestream_gateway.core.text.encoder import EncodingJob
from pagestream_gateway.errors import InvalidRequest, PromptTooLong, UnsupportedField

EFFORT = "reasoning_effort"
"""The value by which a chat template knows how much reasoning to ask for."""
DOCUMENTS = "documents"
"""Likewise what to answer from."""


def begin(prompt: Prompt, draft: Draft, model: LoadedModel, scope: bytes, limit: int) -> EncodingJob | Sequence[int]:
    """Return a prompt's token ids, at most `limit`, or the text that has to be encoded for them."""
    prompt_field, max_fitting = draft.prompt_field, None
    match prompt:
        case TokenPrompt(token_ids):
            return _checked_ids(token_ids, prompt_field, model, limit)
        case TextPrompt(text, add_special_tokens):
            if not text and not draft.is_counted:
                raise InvalidRequest(prompt_field, "must not be empty")
        case ChatPrompt(add_special_tokens=add_special_tokens):
            text = _render(prompt, prompt_field, model)
            text += set_output_form(draft, prompt, model, text)
            max_fitting = model.max_model_len - 1 if must_fit(draft) else None
    return model.check(EncodingJob(text, add_special_tokens, limit, prompt_field, scope, max_fitting))


def _checked_ids(token_ids: Sequence[int], prompt_field: str, model: LoadedModel, limit: int) -> list[int]:
    if len(token_ids) > limit >= model.max_model_len:
        raise PromptTooLong(prompt_field, f"has {len(token_ids)} tokens, at most {limit} are read")
    if len(token_ids) > limit:
        raise model.too_long(prompt_field, len(token_ids))
    vocab_size = model.card.vocab_size
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(prompt_field, f"{token_id} is not a token of the model (0 to {vocab_size - 1})")
    return list(token_ids)


def _render(chat: ChatPrompt, prompt_field: str, model: LoadedModel) -> str:
    if not chat.messages:
        raise InvalidRequest(prompt_field, "must not be empty")
    if model.chat_template is None:
        raise UnsupportedField(
            prompt_field,
            f"model {model.name} has no chat template; give its engines one (--chat-template FILE, or chatTemplate in "
            "an EnginePool), or use the completions API",
        )
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest("continue_final_message", "excludes add_generation_prompt")
    opens = not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    messages: Sequence[Mapping[str, Any]] = [_with_both_names(each) for each in chat.messages]
    if is_harmony(model.card.chat_template):
        messages = harmony_messages(messages)
    elif model.shapes.no_developer or "developer" not in model.card.chat_template:
        messages = with_system_first(messages)
    if tool_format(model.card.chat_template) == "mistral":
        messages = with_short_ids(messages)
    render = partial(
        model.chat_template.render,
        add_generation_prompt=opens,
        continue_final_message=chat.continue_final_message,
        arguments=_arguments(chat, model),
        tools=chat.tools.definitions,
    )
    if not chat.continue_final_message and all(each.get("role") in INSTRUCTING for each in messages):
        return _instructed(messages, model.shapes, render)
    return render(shaped(messages, model.shapes))


def _instructed(messages: Sequence[Mapping[str, Any]], shapes: ChatShapes, render: Callable[..., str]) -> str:
    """Return the prompt of instructions alone. Many templates show those with a user's message only, or refuse them.

    They are the user's then. Raises InvalidRequest.
    """
    try:
        prompt = render(shaped(messages, shapes))
        if all(line.strip() in prompt for each in messages for line in text_of(each.get("content")).splitlines()):
            return prompt
    except InvalidRequest:
        pass
    return render(shaped([{**each, "role": "user"} for each in messages], shapes))


def _with_both_names(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message that has its reasoning under both names by which templates read it."""
    old, new = "reasoning_content", "reasoning"
    return {**message, new: message[old]} if old in message and new not in message else message


def _arguments(chat: ChatPrompt, model: LoadedModel) -> Mapping[str, Any]:
    return {**model.template_arguments, **_asked_arguments(chat, model)}


def _asked_arguments(chat: ChatPrompt, model: LoadedModel) -> Mapping[str, Any]:
    arguments, template = chat.arguments, model.card.chat_template
    if chat.documents:
        if DOCUMENTS not in template:
            raise UnsupportedField(
                DOCUMENTS, f"model {model.name}: its chat template takes none; write them in messages"
            )
        arguments = {**arguments, DOCUMENTS: list(chat.documents)}
    if chat.effort is not None:
        # A template that knows no effort may still be asked for none; the rest is advice that it can't take, as is an
        # effort that it refuses.
        switch = {} if is_harmony(template) else reasoning_arguments(template, reasons=chat.effort != "none")
        takes_effort = EFFORT in template and chat.effort not in model.shapes.refused_efforts
        effort = {EFFORT: chat.effort} if takes_effort else {}
        arguments = {**(switch or {}), **effort, **arguments}
    if chat.reasons is None:
        return arguments
    own = reasoning_arguments(model.card.chat_template, reasons=chat.reasons)
    if own is None and chat.reasons:
        return arguments  # agents ask for it by the model's name, and a model that doesn't reason costs nothing more
    if own is None:
        hint = f"model {model.name}: its chat template has no enable_thinking; leave it out"
        raise UnsupportedField("thinking.type", f"{hint}, or see what chat_template_kwargs the template knows")
    return {**arguments, **own}


def echo_of(prompt: Prompt, whole: Sequence[int], kept: Sequence[int], model: LoadedModel) -> str:
    """Return the text that an echo shows of a prompt: of one that was cut, what its kept tokens say.

    `whole`: its tokens; `kept`: those that are left. Raises UnsupportedField where it shows none.
    """
    match prompt:
        case TextPrompt(text) if len(kept) == len(whole):
            return text
        case TextPrompt(add_special_tokens=True):
            return model.decode(_without_frame(list(kept), model))
        case TextPrompt() | TokenPrompt():
            return model.decode(list(kept))
        case ChatPrompt():
            raise UnsupportedField("echo")


def _without_frame(ids: list[int], model: LoadedModel) -> list[int]:
    """Return a text's tokens without the special ones that the tokenizer has added, as far as they are there."""
    before, after = (list(part) for part in model.encoder.frame or ((), ()))
    if before and ids[: len(before)] == before:
        ids = ids[len(before) :]
    if after and ids[-len(after) :] == after:
        ids = ids[: -len(after)]
    return ids
