"""Chat templates with what published ones do with the shapes of messages, and shapes to try them with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from pagestream_grammars.templates import Template, shaped, shapes_of

Messages = list[dict[str, Any]]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

_CALLS_OF_DEEPSEEK = (
    "{% for c in m['tool_calls'] %}<call>{{ c['type'] + '<sep>' + c['function']['name'] + '\\n```json\\n'"
    " + c['function']['arguments'] + '\\n```' }}</call>{% endfor %}"
)
_LAST_SYSTEM = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set ns.system = m['content'] %}{% endif %}{% endfor %}{{ bos_token + ns.system }}"
)
DEEPSEEK_V3 = (
    _LAST_SYSTEM + "{% for m in messages %}{% if m['role'] == 'user' %}<user>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' and 'tool_calls' in m %}<assistant>{{ m['content'] or '' }}"
    + _CALLS_OF_DEEPSEEK
    + "{{ eos_token }}{% elif m['role'] == 'assistant' %}<assistant>{{ m['content'] + eos_token }}"
    "{% elif m['role'] == 'tool' %}<output>{{ m['content'] }}</output>{% endif %}{% endfor %}<assistant>"
)
R1_DISTILLED = (
    _LAST_SYSTEM + "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<user>' + m['content'] }}"
    "{% elif m['role'] == 'assistant' and m['content'] is none %}<assistant>"
    + _CALLS_OF_DEEPSEEK
    + "{% elif m['role'] == 'assistant' %}{{ '<assistant>' + m['content'].split('</think>')[-1] + eos_token }}"
    "{% elif m['role'] == 'tool' %}{{ '<output>' + m['content'] + '</output>' }}{% endif %}{% endfor %}<assistant>"
)
_ALTERNATES = (
    "{% if (m['role'] == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('Conversation roles must alternate') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}"
)
LLAMA_GUARD = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}" + _ALTERNATES + "{{ '\\n\\n' + m['role'] + ': ' }}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}"
    "{% endfor %}"
)
SMOLVLM = (
    "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% set ns = namespace(n=0) %}{% for m in messages %}" + _ALTERNATES + "<start_of_turn>{{ m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
GEMMA_3 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}"
    "{% set prefix = messages[0]['content'] + '\\n\\n' %}{% else %}"
    "{% set prefix = messages[0]['content'][0]['text'] + '\\n\\n' %}{% endif %}{% set rest = messages[1:] %}"
    "{% else %}{% set prefix = '' %}{% set rest = messages %}{% endif %}{% set ns = namespace(n=0) %}"
    "{% for m in rest %}" + _ALTERNATES + "<start_of_turn>{{ m['role'] }}\n{{ prefix if loop.first }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% elif m['content'] is iterable %}"
    "{% for item in m['content'] %}{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}"
    "{% else %}{{ raise_exception('Invalid content type') }}{% endif %}<end_of_turn>\n{% endfor %}"
    "<start_of_turn>model\n"
)
_TURNS_OF_MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% set users = rest | selectattr('role', 'equalto', 'user') | list %}{% set ns = namespace(n=0) %}"
    "{% for m in rest %}{% if not (m.role == 'tool' or m.tool_calls) %}" + _ALTERNATES + "{% endif %}{% endfor %}"
)
MISTRAL = (
    _TURNS_OF_MISTRAL + "{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ system + '\\n\\n' if system is defined and m == users[-1] }}{{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined and m.tool_calls is not none %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ \',\' if not loop.last }}{% endfor %}]{{ eos_token }}'
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    '{% elif m.role == \'tool\' %}[TOOL_RESULTS]{"content": {{ m.content | string }}, "call_id": '
    '"{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}{% endfor %}"
)
_CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN_25 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}<|im_start|>assistant"
    "{% if m.content %}{{ '\\n' + m.content }}{% endif %}{% for c in m.tool_calls %}"
    '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% else %}" + _CHATML + "{% endif %}" + _END
)
QWEN_35 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% set ns = namespace(asked=false) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be at the beginning.') }}"
    "{% endif %}{% if m.role == 'user' %}{% set ns.asked = true %}{% endif %}{% endfor %}"
    "{% if not ns.asked %}{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% if reasoning_effort is defined and reasoning_effort not in ['low', 'medium', 'xhigh'] %}"
    "{{ raise_exception('Unexpected reasoning effort') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% elif m.content is iterable and m.content is not mapping %}{% for item in m.content %}"
    "{% if 'text' in item %}{{ item.text }}{% else %}{{ raise_exception('Unexpected item type') }}{% endif %}"
    "{% endfor %}{% elif m.content is none or m.content is undefined %}{{ '' }}{% endif %}"
    "{% for c in m.tool_calls or () %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for name, value in c.function.arguments | items %}<parameter={{ name }}>\n{{ value }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>{% endfor %}" + _END
)
LLAMA_31 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}<system>{{ system }}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|eot_id|>{% for m in messages %}"
    "{% if not (m.role == 'tool' or 'tool_calls' in m) %}<{{ m.role }}>{{ m.content | trim }}<|eot_id|>"
    "{% elif 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    '<assistant>{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>"
    "{% else %}<ipython>{{ m.content | tojson }}<|eot_id|>{% endif %}{% endfor %}<assistant>"
)
FUNCTION_GEMMA = (
    "{% for m in messages %}{% if m.role == 'tool' %}<result>{{ m.name }}{{ ':' + m.content }}</result>"
    "{% else %}<{{ m.role }}>{{ m.content or '' }}{% for c in m.tool_calls or () %}call:{{ c.function.name }}"
    "{% for name, value in c.function.arguments | items %} {{ name }}={{ value }}{% endfor %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
TEMPLATES: Mapping[str, str] = {
    "DeepSeek V3": DEEPSEEK_V3,
    "DeepSeek R1, distilled": R1_DISTILLED,
    "Llama Guard 3": LLAMA_GUARD,
    "SmolVLM": SMOLVLM,
    "Gemma 2": GEMMA_2,
    "Gemma 3": GEMMA_3,
    "Mistral Nemo": MISTRAL,
    "Qwen 2.5": QWEN_25,
    "Qwen 3.5": QWEN_35,
    "Llama 3.1": LLAMA_31,
    "FunctionGemma": FUNCTION_GEMMA,
}
"""Each is a published one's part that matters here, in fewer words."""


def _call(number: int) -> dict[str, Any]:
    function = {"name": f"name{number}", "arguments": json.dumps({f"key{number}": f"value{number}"})}
    return {"id": f"abcdef12{number}", "type": "function", "function": function}


def _result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdef12{number}", "content": f"result{number}"}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


_TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Does.", "parameters": parameters}}
    for name in ("does", "gets")
    for parameters in ({"type": "object", "properties": {"where": {"type": "string", "description": "A place."}}},)
]
_SYSTEM, _USER = {"role": "system", "content": "system0"}, {"role": "user", "content": "user0"}
_LATER = {"role": "system", "content": "system1"}
_CALLED = {"role": "assistant", "content": None, "tool_calls": [_call(1)]}
_TWO = {**_CALLED, "tool_calls": [_call(1), _call(2)]}
_SAID, _MORE = {"role": "assistant", "content": "said1"}, {"role": "user", "content": "user1"}
_OF_CALL = ("name1", "key1", "value1")


class Shape(NamedTuple):
    """A conversation as callers send it, and the words of it that its prompt has to have."""

    messages: Messages
    words: tuple[str, ...]
    has_tools: bool = False
    arguments: Mapping[str, Any] = {}


def _calling(content: str | None) -> Shape:
    return Shape([_USER, {**_CALLED, "content": content}, _result(1)], (*_OF_CALL, "result1"), has_tools=True)


SHAPES: Mapping[str, Shape] = {
    "text": Shape([_USER], ("user0",)),
    "one part": Shape([{"role": "user", "content": _parts("user0")}], ("user0",)),
    "two parts": Shape([{"role": "user", "content": _parts("user0", "user1")}], ("user0", "user1")),
    "system": Shape([_SYSTEM, _USER], ("system0", "user0")),
    "system of parts": Shape(
        [{"role": "system", "content": _parts("system0", "system1")}, _USER], ("system0", "system1", "user0")
    ),
    "later system": Shape([_SYSTEM, _USER, _LATER], ("system0", "user0", "system1")),
    "system between": Shape([_SYSTEM, _USER, _SAID, _LATER, _MORE], ("system0", "user0", "said1", "system1", "user1")),
    "user twice": Shape([_USER, _MORE], ("user0", "user1")),
    "answer of parts": Shape([_USER, {"role": "assistant", "content": _parts("said1")}, _MORE], ("said1", "user1")),
    "call": _calling(content=None),
    "call, empty text": Shape([_USER, {**_CALLED, "content": ""}, _result(1)], (*_OF_CALL, "result1"), has_tools=True),
    "call and text": Shape(
        [_USER, {**_CALLED, "content": "said1"}, _result(1)], (*_OF_CALL, "result1"), has_tools=True
    ),
    "two calls": Shape(
        [_USER, _TWO, _result(1), _result(2)], (*_OF_CALL, "name2", "value2", "result1", "result2"), has_tools=True
    ),
    "user after result": Shape([_USER, _CALLED, _result(1), _MORE], (*_OF_CALL, "result1", "user1"), has_tools=True),
    "effort": Shape([_USER], ("user0",), arguments={"reasoning_effort": "high"}),
}
_TAKES_NO_CALLS = ("Llama Guard 3", "SmolVLM", "Gemma 2", "Gemma 3")


class Cell(NamedTuple):
    """A shape's prompt here, and in `transformers`."""

    ours: str | None
    theirs: str | None
    """Of the messages as they are, but for objects as arguments and names in results, as it wants them; None where it
    is refused."""
    others: tuple[str, ...]
    """Of all spellings of the same messages that can be rendered."""

    def verdict(self, shape: Shape) -> str:
        """Return "=" for the same prompt, "+" where only ours has all, "~" for another one, "-" where ours has not."""
        if not has_all(self.ours, shape):
            return "-"
        if self.ours == self.theirs:
            return "="
        return "~" if has_all(self.theirs, shape) else "+"


def has_all(prompt: str | None, shape: Shape) -> bool:
    """Whether a prompt has all that it must, and nothing as Python spells it."""
    leaks = ("'type'", '"type": "text"', "{'key", "None", '\\"key')
    return prompt is not None and all(word in prompt for word in shape.words) and not any(e in prompt for e in leaks)


def renderer(source: str, tokens: Mapping[str, str]) -> Callable[[Shape], str | None]:
    """Return what renders a shape as a gateway does."""
    template = Template(source, tokens)
    shapes = shapes_of(template)

    def render(shape: Shape) -> str | None:
        refused = shape.arguments.get("reasoning_effort") in shapes.refused_efforts
        try:
            return template.render(
                shaped(shape.messages, shapes),
                tools=_TOOLS if shape.has_tools else (),
                arguments={} if refused else shape.arguments,
            )
        except Exception:  # noqa: BLE001  a template may raise anything
            return None

    return render


def compared(source: str, tokens: Mapping[str, str] = TOKENS) -> dict[str, Cell]:
    """Return a template's row: each shape's prompts."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second

    render = renderer(source, tokens)

    def of_transformers(messages: Messages, shape: Shape) -> str | None:
        try:
            values: dict[str, Any] = {**tokens, **shape.arguments, "tools": _TOOLS if shape.has_tools else None}
            found: Any = render_jinja_template([messages], chat_template=source, add_generation_prompt=True, **values)
        except Exception:  # noqa: BLE001  a template may raise anything
            return None
        return str(found[0][0])

    row = {}
    for name, shape in SHAPES.items():
        spelled = [of_transformers(each, shape) for each in _spellings(shape.messages)]
        others = tuple(each for each in spelled if has_all(each, shape))
        row[name] = Cell(render(shape), spelled[0], tuple(str(each) for each in others))
    return row


def _spellings(messages: Messages) -> Iterator[Messages]:
    """Yield messages with arguments as objects and as text, and contents as they are, as texts and as parts.

    The first is as `transformers` documents it.
    """
    for as_text, content in product((False, True), ("given", "text", "parts", "blank", "null")):
        yield [_spelled(each, content, as_text=as_text) for each in messages]


def _spelled(message: dict[str, Any], content: str, *, as_text: bool) -> dict[str, Any]:
    given = message["content"]
    text = given if isinstance(given, str) else "\n".join(part["text"] for part in given or ())
    found = {**message}
    if message["role"] == "tool":  # as `transformers` documents it
        found["name"] = f"name{message['content'][-1]}"
    if content == "text":
        found["content"] = text
    elif content == "parts" and given is not None:
        found["content"] = given if isinstance(given, list) else _parts(given)
    elif "tool_calls" in message and not text:
        found["content"] = {"blank": "", "null": None}.get(content, given)
    if "tool_calls" in message and not as_text:
        found["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
            for c in message["tool_calls"]
        ]
    return found


def takes(name: str, shape: Shape) -> bool:
    """Whether a template of `TEMPLATES` has a place for what a shape has."""
    return not (shape.has_tools and name in _TAKES_NO_CALLS)


__all__ = ["SHAPES", "TEMPLATES", "Cell", "Shape", "compared", "has_all", "renderer", "takes"]
