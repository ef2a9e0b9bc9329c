"""Tool calls and reasoning are found in an output, however its text is cut into pieces."""

import time
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.records_pb2 import AnswerForm, OutputForm, RequestSpec
from pagestream_gateway.api.openai.chat.parts import ChoiceParts
from pagestream_gateway.core.output.formats import FORMATS, parser_of_calls
from pagestream_gateway.core.output.parts import (
    Arguments,
    CallBegin,
    Content,
    OutputParser,
    Part,
    PlainText,
    Reasoning,
    joined,
)
from pagestream_gateway.core.output.reasoning import Think
from pagestream_gateway.core.output.select import reasoning_format, tool_format

TOOLS = frozenset({"get_weather", "add"})


def parts_of(parser: OutputParser, pieces: Iterable[str]) -> list[Part]:
    return joined([*(part for piece in pieces for part in parser.feed(piece)), *parser.end()])


def call(name: str, arguments: str) -> list[Part]:
    return [CallBegin(name), Arguments(arguments)]


CASES: list[tuple[str, str, list[Part]]] = [
    (
        "hermes",
        'Hi there.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "O\\"slo }"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1, "b": [2, {"c": "]"}]}, "name": "add"}\n</tool_call>\nDone.',
        [
            Content("Hi there."),
            *call("get_weather", '{"city": "O\\"slo }"}'),
            *call("add", '{"a": 1, "b": [2, {"c": "]"}]}'),
            Content("\nDone."),
        ],
    ),
    ("hermes", "a <tool_call> b", [Content("a <tool_call> b")]),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', [Content('<tool_call>{"x": 1}</tool_call>')]),
    ("hermes", "an end <tool_ca", [Content("an end <tool_ca")]),
    ("hermes", '<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call>', call("add", '{"a": 1}')),
    ("hermes", '<tool_call>{"name":"add","arguments":null}</tool_call>', call("add", "{}")),
    ("hermes", '<tool_call>{"name":"add","arguments":{"a":', call("add", '{"a":')),
    (
        "hermes",
        '<tool_call>{"name":"add","arguments":{"a":1}}\n{"name":"add","arguments":{"a":2}}</tool_call>',
        [*call("add", '{"a":1}'), *call("add", '{"a":2}')],
    ),
    (
        "hermes",
        '<tool_call>{"name":"add","arguments":{"a":1},"arguments":{"b":1}}</tool_call> x',
        [*call("add", '{"a":1}'), Content(" x")],
    ),
    ("hermes", '<tool_call>{"name":"add","arguments":{"a":"1\n\x01"}}', call("add", '{"a":"1\\n\\u0001"}')),
    ("hermes", '<tool_call>{"name":"add\\ud83d","arguments":"\\ud83d"}', call("add\ufffd", "\ufffd")),
    (
        "llama3_json",
        '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 2}}',
        [*call("add", '{"a": 1}'), *call("add", '{"a": 2}')],
    ),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {}}', call("add", "{}")),
    ("llama3_json", '{"name": "Mara", "parameters": {}}', [Content('{"name": "Mara", "parameters": {}}')]),
    ("llama3_json", 'So: {"name": "add"}', [Content('So: {"name": "add"}')]),
    (
        "required",
        '[{"name":"add","parameters":{"a":1}}, {"name":"get_weather","parameters":{}}]',
        [*call("add", '{"a":1}'), *call("get_weather", "{}")],
    ),
    ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', call("add", '{"a": 1}')),
    (
        "mistral",
        'Well. [TOOL_CALLS]add[ARGS]{"a": "}"}[TOOL_CALLS]get_weather{"city": "x"}',
        [Content("Well."), *call("add", '{"a": "}"}'), *call("get_weather", '{"city": "x"}')],
    ),
    ("mistral", 'add{"a": 1}add{"a": 2}', [*call("add", '{"a": 1}'), *call("add", '{"a": 2}')]),
    ("mistral", "address [1, 2] of get_weather", [Content("address [1, 2] of get_weather")]),
    ("mistral", "[1, 2]", [Content("[1, 2]")]),
    (
        "pythonic",
        "[add(a=1, b=\"x)]\"), get_weather(city='Oslo', days=[1, {'x': None}])]",
        [*call("add", '{"a": 1, "b": "x)]"}'), *call("get_weather", '{"city": "Oslo", "days": [1, {"x": null}]}')],
    ),
    ("pythonic", "[add(a='\\ud83d')]\n so", [*call("add", '{"a": "\\ud83d"}'), Content("so")]),
    ("pythonic", "[]", [Content("[]")]),
    ("pythonic", "[add(1)]", [Content("[add(1)]")]),
    ("pythonic", "[open(a=1)]", [Content("[open(a=1)]")]),
    ("pythonic", "[1, 2]", [Content("[1, 2]")]),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_are_found_at_any_cut(form: str, text: str, expected: list[Part]) -> None:
    assert parts_of(parser_of_calls(form, TOOLS), [text]) == expected
    assert parts_of(parser_of_calls(form, TOOLS), text) == expected
    for place in range(len(text)):
        assert parts_of(parser_of_calls(form, TOOLS), [text[:place], text[place:]]) == expected


def test_one_named_tool_has_all_of_the_text_as_its_arguments() -> None:
    assert parts_of(parser_of_calls("named", frozenset({"add"})), ['{"a"', ": 1}"]) == call("add", '{"a": 1}')


WORDS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
        *('{"name": "add"', '"arguments": ', '"parameters": ', '"name": "get_weather"', "add", "(", ")", "a=1"),
        *("[", "]", "{", "}", ", ", '"', " ", "\n", ":", "\\", "1", "null", "x", "'", "<", "é"),
    ]
)


@given(
    words=st.lists(WORDS, max_size=12), cuts=st.lists(st.integers(0, 200), max_size=4), form=st.sampled_from([*FORMATS])
)
def test_any_text_has_the_same_parts_however_it_is_cut(words: list[str], cuts: list[int], form: str) -> None:
    text = "".join(words)
    tools = frozenset({"add"}) if form == "named" else TOOLS
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for make in (
        lambda: parser_of_calls(form, tools),
        lambda: Think(parser_of_calls(form, tools), is_open=False),
        lambda: Think(parser_of_calls(form, tools), is_open=True),
    ):
        whole = parts_of(make(), [text])
        assert parts_of(make(), [text[a:b] for a, b in pairwise(places)]) == whole
        assert parts_of(make(), text) == whole


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nlong </thin\n</think>\n\nHi", False, [Reasoning("long </thin"), Content("Hi")]),
        ("so\n</think>\n\nHi", True, [Reasoning("so"), Content("Hi")]),
        ("Hi </think>", False, [Content("Hi </think>")]),
        ("<think>cut off", False, [Reasoning("cut off")]),
    ],
)
def test_reasoning_stands_apart(text: str, is_open: bool, expected: list[Part]) -> None:
    make: Callable[[], Think] = lambda: Think(PlainText(), is_open=is_open)  # noqa: E731
    assert parts_of(make(), [text]) == expected
    assert parts_of(make(), text) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>ipython", "llama3_json"),
        ("{{ tools }} [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}<tool_call><function=example>", None),
        ("{{ tools }}<tool_call>{name}<arg_key>", None),
        ("<tool_call>", None),
        ("", None),
    ],
)
def test_a_chat_template_names_its_format(template: str, expected: str | None) -> None:
    assert tool_format(template) == expected


def test_a_prompt_may_open_the_reasoning() -> None:
    assert reasoning_format("<think></think>", "x<think>\n") == "open"
    assert reasoning_format("<think></think>", "x") == "think"
    assert reasoning_format("", "x<think>") == ""
    assert reasoning_format("<think></think>", "x<think>Let me", continues=True) == "open"
    assert reasoning_format("<think></think>", "x<think>y</think>Let me", continues=True) == "think"


def test_many_markers_take_time_by_their_number() -> None:
    """What a model repeats must not hold up a gateway's event loop: 0.1 s by the square would be 10 s here."""
    spec = RequestSpec(request_id="r", answer=AnswerForm(output=OutputForm(tool_format="hermes")))
    for form, text in (("hermes", "<tool_call>x" * 40_000), ("pythonic", "[" + "add()," * 40_000)):
        spec.answer.output.tool_format = form
        spec.answer.output.tool_names[:] = ["add"]
        began = time.thread_time()
        ChoiceParts(spec, 0).delta(text, is_last=True)
        assert time.thread_time() - began < 8.0
