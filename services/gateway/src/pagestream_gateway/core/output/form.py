"""Says in a request's record how its output is divided, so that each reader divides it alike."""

from pagestream.v1.records_pb2 import AnswerForm

from pagestream_gateway.core.drafts import ChatPrompt
from pagestream_gateway.core.models import LoadedModel
from pagestream_gateway.core.output.select import reasoning_format, tool_format
from pagestream_gateway.errors import UnsupportedField


def set_output_form(answer: AnswerForm, chat: ChatPrompt, model: LoadedModel, prompt: str, *, is_free: bool) -> None:
    """Set `answer.output` for a chat with `prompt`, as its template has rendered it.

    `is_free`: whether no grammar holds the output, which would leave no room for reasoning. Raises UnsupportedField for
    tools where the model's template does not say how it writes calls.
    """
    tools, template = chat.tools, model.card.chat_template
    written = tools.forced_format or (tool_format(template) if tools.definitions else "")
    if written is None:
        raise UnsupportedField(
            "tools",
            f"model {model.name}: its chat template takes no tools, or in a format that is not known here "
            '(known are Hermes and Qwen, Llama 3, Mistral, Pythonic); tool_choice "required" works with any model',
        )
    reasoning = ""
    if is_free and chat.separate_reasoning:
        reasoning = reasoning_format(template, prompt, continues=chat.continue_final_message)
    answer.ClearField("output")
    if not written and not reasoning:
        return
    answer.output.reasoning_format = reasoning
    answer.output.tool_format = written
    if written:
        answer.output.tool_names.extend(tools.names)
        answer.output.one_call = tools.one_call
