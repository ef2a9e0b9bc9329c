"""Tool calls and reasoning are found in an output, however its text is cut into pieces."""

import json
from collections.abc import Collection, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.records_pb2 import OutputForm
from pagestream_gateway.output_formats import FORMATS, parser_of, reasoning_format, record_types
from pagestream_grammars.output_formats.parts import (
    MOST_BLANKS,
    Arguments,
    BlanksAtOnce,
    CallBegin,
    Content,
    OutputParser,
    Part,
    PlainText,
    Reasoning,
    joined,
)
from pagestream_grammars.output_formats.registry import tool_format

SCHEMAS = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": ["null", "array"]}}},
    "add": {"properties": {"a": {"$ref": "#/$defs/n"}, "b": {"enum": [True, 5]}}, "$defs": {"n": {"type": "integer"}}},
}


def parser(
    form: str, *, reasoning: str = "", opening: str = "", tools: Collection[str] = tuple(SCHEMAS), **more: str
) -> OutputParser:
    reasoning = reasoning or ("openai_gptoss" if form == "openai" else "")
    record = OutputForm(tool_format=form, reasoning_format=reasoning, opening=opening, **more)  # type: ignore[arg-type]
    record.tool_names.extend(["add"] if form == "named" else tools)
    record_types(record, SCHEMAS)
    return parser_of(record)


def parts_of(parser: OutputParser, pieces: Iterable[str]) -> list[Part]:
    return joined([*(part for piece in pieces for part in parser.feed(piece)), *parser.end()])


def call(name: str, arguments: str) -> list[Part]:
    return [CallBegin(name), Arguments(arguments)]


QWEN_RESPONSES = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        }
    },
}
"""How transformers reads Qwen3-Coder's calls."""


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
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]abcdef123[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]000000000[ARGS]{}',
        [*call("add", '{"a": 1}'), *call("get_weather", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]add[CALL_ID]a b[ARGS]", [Content("add[CALL_ID]a b[ARGS]")]),
    ("mistral", 'add{"a": 1}add{"a": 2}', [*call("add", '{"a": 1}'), *call("add", '{"a": 2}')]),
    ("mistral", "address [1, 2] of get_weather", [Content("address [1, 2] of get_weather")]),
    ("mistral", "[1, 2]", [Content("[1, 2]")]),
    (
        "pythonic",
        "[add(a=1, b=\"x)]\"), get_weather(city='Oslo', days=[1, {'x': None}])]",
        [*call("add", '{"a": 1, "b": "x)]"}'), *call("get_weather", '{"city": "Oslo", "days": [1, {"x": null}]}')],
    ),
    ("pythonic", "[add(a=true, b=[null, False])]", call("add", '{"a": true, "b": [null, false]}')),
    ("pythonic", "[add(a='\\ud83d')]\n so", [*call("add", '{"a": "\\ud83d"}'), Content("so")]),
    (
        "qwen3_coder",
        'I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nO"s\nlo\n</parameter>\n<parameter=days>'
        "\n[1, 2]\n"
        "</parameter>\n</function>\n</tool_call>\n<function=add>\n<parameter=a>\n5\n</parameter>\n<parameter=b>true</parameter>"
        "<parameter=a>6</parameter></function>\n</tool_call>",
        [
            Content("I look."),
            *call("get_weather", '{"city": "O\\"s\\nlo", "days": [1, 2]}'),
            *call("add", '{"a": 5, "b": true}'),
        ],
    ),
    ("qwen3_coder", "<tool_call> b", [Content("<tool_call> b")]),
    ("qwen3_coder", "a <function=\nx", [Content("a <function=\nx")]),
    ("qwen3_coder", "<function=now></function>\n done", [*call("now", "{}"), Content("\n done")]),
    ("qwen3_coder", "<function=add><parameter=a>x</parameter>", call("add", '{"a": "x"')),
    ("qwen3_coder", "<function=f><parameter=a>\nb\n\n</parameter></tool_call>", call("f", '{"a": "b\\n"}')),
    # Without </parameter>: the next argument or the call's end ends a value, as in vLLM's parser.
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n5\n<parameter=b>\ntrue\n</function>\n</tool_call>",
        call("add", '{"a": 5, "b": true}'),
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=x>Bern<parameter=y>a</function></tool_call> Done",
        [*call("f", '{"x": "Bern", "y": "a"}'), Content(" Done")],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=x>\nBern\n</tool_call>\n<tool_call>\n<function=now>\n<parameter=x>\na"
        "\n</function>\n",
        [*call("f", '{"x": "Bern"}'), *call("now", '{"x": "a"}')],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=x>\na </function> b <parameter=y> c\n<parameter=x>\nd\n</parameter>\n</function>",
        call("f", '{"x": "a </function> b <parameter=y> c\\n<parameter=x>\\nd"}'),
    ),
    # Of a file that mentions tags, and of tags that are misspelled.
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=x>\nr'<parameter=y>(.*)</parameter>' ends with </parameter> or "
        "</tool_call>.\n</parameter>\n</function>\n</tool_call>",
        call("f", '{"x": "r\'<parameter=y>(.*)</parameter>\' ends with </parameter> or </tool_call>."}'),
    ),
    (
        "qwen3_coder",
        "<function=add>\n<parameter=a>\n1\n</parameter/>\n<parameter=b>\n5\n</parameter_function>\n</tool_call>",
        call("add", '{"a": 1, "b": 5}'),
    ),
    ("qwen3_coder", "<function=f><parameter=x>a</param", call("f", '{"x": "a')),
    (
        "seed_oss",
        "I look.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n<parameter=days>[1]"
        "</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call><function=now></function></seed:tool_call>",
        [Content("I look."), *call("get_weather", '{"city": "Oslo", "days": [1]}'), *call("now", "{}")],
    ),
    ("seed_oss", "<tool_call>so", [Content("<tool_call>so")]),
    (
        "glm45",
        "\nSo.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n</arg_value>\n<arg_key>days</arg_key>"
        "<arg_value>null</arg_value>\n</tool_call><tool_call>now\n</tool_call>",
        [Content("\nSo."), *call("get_weather", '{"city": "Oslo\\n", "days": null}'), *call("now", "{}")],
    ),
    ("glm45", "<tool_call>a b c", [Content("<tool_call>a b c")]),
    ("glm45", "<tool_call>add<arg_key>b</arg_key><arg_value>[</arg_value></tool_call>", call("add", '{"b": "["}')),
    (
        "deepseek_v3",
        "Well.\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "}"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [Content("Well."), *call("get_weather", '{"city": "}"}'), *call("add", '{"a": 1}')],
    ),
    (
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": {}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        call("add", '{"a": {}}'),
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜> so", [Content("<｜tool▁calls▁begin｜> so")]),
    (
        "openai",
        "<|channel|>analysis<|message|>Look < it up.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
        [Reasoning("Look < it up."), Content("I look."), *call("add", '{"a": 1}')],
    ),
    (
        "openai",
        " to=functions.get_weather<|channel|>commentary json<|message|><|call|>"
        "<|start|>assistant<|channel|>final<|message|>A<|end|>"
        "<|start|>assistant<|channel|>final<|message|>B<|return|>",
        [*call("get_weather", "{}"), Content("A\nB")],
    ),
    ("openai", "<|channel|>analysis to=browser.search<|message|>{}<|call|>", [Reasoning("{}")]),
    ("openai", "no <|channel|>header", [Content("no ")]),
    ("openai", " tomorrow", [Content(" tomorrow")]),
    ("openai", "<|channel|>" + "x" * 600, [Content("<|channel|>" + "x" * 600)]),
    ("pythonic", "[]", [Content("[]")]),
    ("pythonic", "[add(1)]", [Content("[add(1)]")]),
    ("pythonic", "[open(a=1)]", [Content("[open(a=1)]")]),
    ("pythonic", "[1, 2]", [Content("[1, 2]")]),
    (
        "granite",
        'I look.\n<|tool_call|>[{"name": "get_weather", "arguments": {"city": "]"}}, {"name": "add", "arguments": {}}]',
        [Content("I look."), *call("get_weather", '{"city": "]"}'), *call("add", "{}")],
    ),
    ("granite", '<tool_call> [{"name":"add","arguments":{"a":1}}]\n', call("add", '{"a":1}')),
    ("granite", "<|tool_call|>[]", [Content("<|tool_call|>[]")]),
    ("granite", "<|tool_call|>[1] so", [Content("<|tool_call|>[1] so")]),
    (
        "phi4_mini_json",
        '<|tool_call|>[{"name":"add","arguments":{"a":1}},\n{"name":"now"}]<|/tool_call|> Done',
        [*call("add", '{"a":1}'), *call("now", "{}"), Content(" Done")],
    ),
    ("phi4_mini_json", 'functools[{"name": "add", "arguments": {"a": 1}}]', call("add", '{"a": 1}')),
    ("phi4_mini_json", "from functools import [x", [Content("from functools import [x")]),
    ("phi4_mini_json", "functools[lru_cache]", [Content("functools[lru_cache]")]),
    (
        "hunyuan_a13b",
        'So.\n<tool_calls>\n[{"name": "add", "arguments": {"a": 1}},{"name": "now", "arguments": {}}]\n</tool_calls>\n',
        [Content("So."), *call("add", '{"a": 1}'), *call("now", "{}")],
    ),
    ("hunyuan_a13b", "<tool_calls>[so", [Content("<tool_calls>[so")]),
    ("hunyuan_a13b", '<tool_calls>[{"name": "add", "arguments": {"a"', call("add", '{"a"')),
    (
        "internlm",
        'I look.<|action_start|><|plugin|>\n{"name": "add", "parameters": {"a": 1}}<|action_end|>\n',
        [Content("I look."), *call("add", '{"a": 1}')],
    ),
    ("internlm", "<|action_start|><|plugin|>x", [Content("<|action_start|><|plugin|>x")]),
    ("internlm", "<|action_start|>x", [Content("<|action_start|>x")]),
    (
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        [*call("add", '{"a": 1}'), *call("now", "{}")],
    ),
    ("cohere_command3", '<|START_ACTION|>[{"name": 1}]', [Content('<|START_ACTION|>[{"name": 1}]')]),
    (
        "longcat",
        'I.<longcat_tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</longcat_tool_call>',
        [Content("I."), *call("add", '{"a": 1}')],
    ),
    (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "}"}<|tool_call_end|><|tool_call_begin|>add:12 <|tool_call_argument_begin|> {}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        [
            Content("I look."),
            CallBegin("get_weather", "functions.get_weather:0"),
            Arguments('{"city": "}"}'),
            CallBegin("add", "add:12"),
            Arguments("{}"),
        ],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{}",
        [Content("<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{}")],
    ),
    (
        "minimax_m2",
        'I look.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">O"s\nlo</parameter>\n'
        "<parameter name=\"days\">[1, 2]</parameter>\n</invoke>\n<invoke name=add>\n<parameter name='a'> 5</parameter>"
        "\n</invoke>\n</minimax:tool_call>\nDone",
        [
            Content("I look."),
            *call("get_weather", '{"city": "O\\"s\\nlo", "days": [1, 2]}'),
            *call("add", '{"a": 5}'),
            Content("\nDone"),
        ],
    ),
    ("minimax_m2", "<minimax:tool_call>so", [Content("<minimax:tool_call>so")]),
    ("minimax_m2", "an <invoke name=\n", [Content("an <invoke name=\n")]),
    (
        "gemma4",
        'I look.<|tool_call>call:get_weather{city:<|"|>O}"slo<|"|>,days:[1,{x:null,<|"|>y z<|"|>:-2.5}],u:true,v:m}'
        "<tool_call|><|tool_call>call:now{}<tool_call|>",
        [
            Content("I look."),
            *call("get_weather", '{"city": "O}\\"slo", "days": [1, {"x": null, "y z": -2.5}], "u": true, "v": "m"}'),
            *call("now", "{}"),
        ],
    ),
    ("gemma4", "<|tool_call>:add{a:1}<tool_call|> so", [*call("add", '{"a": 1}'), Content(" so")]),
    ("gemma4", "<|tool_call>add{a:1}", [Content("<|tool_call>add{a:1}")]),
    ("gemma4", "<|tool_call>call:add{a}<tool_call|>", [Content("<|tool_call>call:add{a}<tool_call|>")]),
    ("gemma4", "<|tool_call>call:add{a:1", [Content("<|tool_call>call:add{a:1")]),
    ("gemma4", "<|tool_call>call:add{a:1e999}", [Content("<|tool_call>call:add{a:1e999}")]),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>O,slo<escape>,days:[]}<end_function_call>",
        call("get_weather", '{"city": "O,slo", "days": []}'),
    ),
    (
        "olmo3",
        "I look.\n<function_calls>\nadd(a=1, b=\"x)\")\nget_weather(city='Oslo')\n</function_calls>\nDone",
        [
            Content("I look."),
            *call("add", '{"a": 1, "b": "x)"}'),
            *call("get_weather", '{"city": "Oslo"}'),
            Content("\nDone"),
        ],
    ),
    ("olmo3", "<function_calls>open(a=1)</function_calls>", [Content("<function_calls>open(a=1)</function_calls>")]),
    ("olmo3", "<function_calls>add(a=1)", call("add", '{"a": 1}')),
    (
        "lfm2",
        "<|tool_call_start|>[add(a=1), add(a=2)]<|tool_call_end|>Done",
        [*call("add", '{"a": 1}'), *call("add", '{"a": 2}'), Content("Done")],
    ),
    ("lfm2", "<|tool_call_start|>[1]", [Content("<|tool_call_start|>[1]")]),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_calls_are_found_at_any_cut(form: str, text: str, expected: list[Part]) -> None:
    assert parts_of(parser(form), [text]) == expected
    assert parts_of(parser(form), text) == expected
    for place in range(len(text)):
        assert parts_of(parser(form), [text[:place], text[place:]]) == expected


def test_one_named_tool_has_all_of_the_text_as_its_arguments() -> None:
    assert parts_of(parser("named"), ['{"a"', ": 1}"]) == call("add", '{"a": 1}')


WORDS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>"),
        *("<seed:tool_call>", "</seed:tool_call>", "[CALL_ID]", "<function=add>", "<parameter=a>", "<parameter=b>"),
        *('<tool_call>{"name": "add", "arguments": {}}', '<tool_call>{"name": "other", "arguments": {}}'),
        *(
            "<function=",
            "<parameter=",
            ">",
            "</parameter>",
            "</parameter",
            "</function>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
        ),
        *(
            "<|tool_call|>",
            "functools[",
            "<tool_calls>",
            "</tool_calls>",
            "<|action_start|><|plugin|>",
            "<|action_end|>",
        ),
        *("<|START_ACTION|>", "<|END_ACTION|>", '{"tool_name": "add"', "<|tool_call_begin|>add:0"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>", "<minimax:tool_call>"),
        *(
            '<invoke name="add">',
            '<parameter name="a">',
            "</invoke>",
            "</minimax:tool_call>",
            "<|tool_call>",
            "call:add{",
        ),
        *('<|"|>', "<tool_call|>", "a:", "<function_calls>", "</function_calls>", "add(a=1)", "<|tool_call_start|>"),
        *("</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁end｜>", "```json", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "to=functions.add"),
        *('{"name": "add"', '"arguments": ', '"parameters": ', '"name": "get_weather"', "add", "(", ")", "a=1"),
        *("[", "]", "{", "}", ", ", '"', " ", "\n", ":", "\\", "1", "null", "x", "'", "<", "é"),
    ]
)


@pytest.mark.parametrize("value", ["5", "5.0", "5.5", "[1, {}]", "null", "Null", "true", "x", "{1}", ""])
@pytest.mark.parametrize("kind", ["integer", "number", "array", "object", "boolean", "string", ["null", "integer"]])
def test_values_have_the_types_that_transformers_gives_them(value: str, kind: str | list[str]) -> None:
    from transformers.utils.chat_parsing.response_parser import parse_response  # takes a second

    schema = {"type": "object", "properties": {"a": {"type": kind}}}
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    record = OutputForm(tool_format="qwen3_coder", tool_names=["f"])
    record_types(record, {"f": schema})
    [name, arguments] = parts_of(parser_of(record), text)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    [expected] = parse_response(text, QWEN_RESPONSES, prefix="", tools=[tool])["tool_calls"]
    assert isinstance(arguments, Arguments)
    assert (name, json.loads(arguments.text)) == (CallBegin("f"), expected["function"]["arguments"])


@given(
    words=st.lists(WORDS, max_size=12), cuts=st.lists(st.integers(0, 200), max_size=4), form=st.sampled_from([*FORMATS])
)
def test_any_text_has_the_same_parts_however_it_is_cut(words: list[str], cuts: list[int], form: str) -> None:
    text = "".join(words)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for reasoning in ("", "think", "open"):
        own = "qwen3_coder" if form in ("named", "required") else ""
        whole = parts_of(parser(form, reasoning=reasoning, own_format=own), [text])
        cut = [text[a:b] for a, b in pairwise(places)]
        assert parts_of(parser(form, reasoning=reasoning, own_format=own), cut) == whole
        assert parts_of(parser(form, reasoning=reasoning, own_format=own), text) == whole
        thought, end, answer = text.lstrip().removeprefix("<think>").partition("</think>")
        if reasoning == "open" and form != "openai" and end and answer.strip():
            thought = thought.strip()
            assert "".join(part.text for part in whole if isinstance(part, Reasoning)) == thought


@pytest.mark.parametrize("form", FORMATS)
def test_a_long_run_of_blanks_has_the_same_parts_however_it_is_cut(form: str) -> None:
    for head, tail in (("Hi", "<tool_call>"), ("", "there"), ('<tool_call>\n{"name": "add", ', "}"), ("[add(a=1)", "")):
        text = head + 700 * "\n" + tail
        whole = parts_of(parser(form), [text])
        assert parts_of(parser(form), text) == whole
        for cut in (len(head), len(head) + 255, len(head) + 257, len(head) + 600):
            assert parts_of(parser(form), [text[:cut], text[cut:]]) == whole


def test_a_parser_reads_a_long_run_of_blanks_once() -> None:
    """Pieces that it only holds would cost the square of the run's length."""

    class Counting(PlainText):
        num_fed = 0

        def feed(self, text: str) -> list[Part]:
            self.num_fed += 1
            return super().feed(text)

    inner = Counting()
    blanks = BlanksAtOnce(inner)
    assert parts_of(blanks, ["a", *(100_000 * ["\n"]), "b", "c"]) == [Content("a" + 100_000 * "\n" + "bc")]
    assert inner.num_fed == 1 + MOST_BLANKS + 2


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
    reasoning = "open" if is_open else "think"
    assert parts_of(parser("", reasoning=reasoning), [text]) == expected
    assert parts_of(parser("", reasoning=reasoning), text) == expected


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CALL_PARTS = call("add", '{"a": 1}')
QWEN_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
THOUGHT: list[Part] = [Reasoning("I need it.")]


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", f"I need it.\n{CALL}", [*THOUGHT, *CALL_PARTS]),
        ("hermes", f"<think>\nI need it.\n{CALL}\nDone.", [*THOUGHT, *CALL_PARTS, Content("\nDone.")]),
        ("hermes", CALL, CALL_PARTS),
        ("hermes", f"I need it.{CALL[:-15]}", [*THOUGHT, *call("add", '{"a": 1')]),
        ("hermes", f"A {CALL} B </think> C", [Reasoning(f"A {CALL} B"), Content("C")]),
        ("hermes", f"A {CALL}</think>{CALL}", [Reasoning(f"A {CALL}"), *CALL_PARTS]),
        ("hermes", f"I need it.\n{CALL}\n</think>\n", [*THOUGHT, *CALL_PARTS]),
        ("qwen3_coder", f"I need it.{QWEN_CALL}{QWEN_CALL}</think>", [*THOUGHT, *CALL_PARTS, *CALL_PARTS]),
        ("hermes", f"A {CALL} B</think>\n", [Reasoning(f"A {CALL} B")]),
        ("hermes", f"A {CALL[:-15]}</think>", [Reasoning(f"A {CALL[:-15]}")]),
        ("hermes", "Should I <tool_call>?", [Reasoning("Should I <tool_call>?")]),
        (
            "qwen3_coder",
            f"Some use <function=...>, so {QWEN_CALL.replace('add', 'other')} I need it.{QWEN_CALL}",
            [Reasoning(f"Some use <function=...>, so {QWEN_CALL.replace('add', 'other')} I need it."), *CALL_PARTS],
        ),
        ("hermes", f"A {CALL.replace('add', 'other')} B", [Reasoning(f"A {CALL.replace('add', 'other')} B")]),
        ("qwen3_coder", f"I need it.\n{QWEN_CALL}", [*THOUGHT, *CALL_PARTS]),
        (
            "glm45",
            "I need it.<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
            [*THOUGHT, *CALL_PARTS],
        ),
        ("mistral", 'I need it.[TOOL_CALLS]add[ARGS]{"a": 1}', [*THOUGHT, *CALL_PARTS]),
        (
            "deepseek_v3",
            'I need it.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
            [*THOUGHT, *CALL_PARTS],
        ),
        ("required", f"I need it.\n{QWEN_CALL}", [*THOUGHT, *CALL_PARTS]),
        ("named", f"I need it.\n{QWEN_CALL}", [*THOUGHT, *CALL_PARTS]),
        ("named", '{"a": 1', [Reasoning('{"a": 1')]),
        ("llama3_json", f"I need it.\n{CALL}", [Reasoning(f"I need it.\n{CALL}")]),
    ],
)
def test_calls_begun_within_reasoning_that_is_never_closed(form: str, text: str, expected: list[Part]) -> None:
    """Reasoning that is closed may only consider a call."""

    def made() -> OutputParser:
        return parser(form, reasoning="open", own_format="qwen3_coder")

    assert parts_of(made(), [text]) == expected
    assert parts_of(made(), text) == expected


@pytest.mark.parametrize(
    ("marks", "begin", "end"), [("seed_oss", "<seed:think>", "</seed:think>"), ("mistral", "[THINK]", "[/THINK]")]
)
def test_reasoning_between_other_marks(marks: str, begin: str, end: str) -> None:
    for reasoning in ("think", "open"):
        for text in (f"{begin}\nWhy? <think>{end}\n\nHi", f"{begin}Why? <think>"):
            expected = [Reasoning("Why? <think>"), *([Content("Hi")] if "Hi" in text else [])]
            assert parts_of(parser("", reasoning=reasoning, reasoning_marks=marks), text) == expected


@pytest.mark.parametrize(
    ("marks", "is_open", "text", "expected"),
    [
        ("gemma4", False, "<|channel>thought\nWhy?\n<channel|>Hi", [Reasoning("Why?"), Content("Hi")]),
        ("gemma4", False, "<|channel>thought\n<channel|>Hi", [Content("Hi")]),
        ("gemma4", False, "<|channel>thoughts", [Reasoning("thoughts")]),
        (
            "response",
            False,
            "<think>Why?</think>\n<response>\nHi < \n</response>",
            [Reasoning("Why?"), Content("Hi <")],
        ),
        ("response", False, "<response>Hi</resp", [Content("Hi</resp")]),
        ("answer", True, "Why?\n</think>\n<answer>\nHi\n</answer> x", [Reasoning("Why?"), Content("Hi x")]),
        ("answer", False, "Hi <answer>", [Content("Hi <answer>")]),
        (
            "cohere_command3",
            False,
            "<|START_THINKING|>Why?<|END_THINKING|><|START_RESPONSE|>Hi<|END_RESPONSE|>",
            [Reasoning("Why?"), Content("Hi")],
        ),
        ("cohere_command3", False, "<|START_TEXT|> <|END_TEXT|>", []),
        (
            "granite",
            False,
            "Here is my thought process: Why? Here is my response: Hi",
            [Reasoning("Why?"), Content("Hi")],
        ),
    ],
)
def test_marks_of_reasoning_and_of_the_answer(marks: str, is_open: bool, text: str, expected: list[Part]) -> None:
    def made() -> OutputParser:
        return parser("", reasoning="open" if is_open else "think", reasoning_marks=marks)

    for cut in range(len(text)):
        assert parts_of(made(), [text[:cut], text[cut:]]) == expected
    assert parts_of(made(), text) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}<|python_tag|>ipython", "llama3_json"),
        ("{{ tools }} [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools }}<tool_call><function=example>", "qwen3_coder"),
        ("{{ tools }}<tool_call>{name}<arg_key>", "glm45"),
        ("{{ tools }}<seed:tool_call><function=example>", "seed_oss"),
        ("{{ tools }}<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ("{{ tools }}<|channel|>final<|message|>", "openai"),
        ("{{ tools }}<|tool_call>call:", "gemma4"),
        ("{{ tools }}<start_function_call>", "functiongemma"),
        ("{{ tools }}<|tool_calls_section_begin|>", "kimi_k2"),
        ('{{ tools }}<minimax:tool_call><invoke name="', "minimax_m2"),
        ("{{ tools }} with <|tool_call|> followed by a JSON list", "granite"),
        ("{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json"),
        ("{{ tools }}<tool_calls>", "hunyuan_a13b"),
        ("{{ tools }}<|plugin|>", "internlm"),
        ("{{ tools }}<|START_ACTION|>", "cohere_command3"),
        ("{{ tools }}<longcat_tool_call>", "longcat"),
        ("{{ tools }}<function_calls>", "olmo3"),
        ("{{ tools }}<|tool_call_start|>", "lfm2"),
        ("{{ tools }}<tools_of_its_own>", None),
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
    assert reasoning_format("[THINK][/THINK]", "x[THINK]") == "open"
    assert reasoning_format("<seed:think>", "x") == "think"
