"""The record that a request becomes for engines: its prompt, its sampling parameters, and how its output is divided.

No engine serves these models: requests are accepted and stay queued, and their records are read from Redis.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from typing import Any

import httpx
import pytest
import pytest_asyncio
from llguidance import LLMatcher, LLTokenizer
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.records_pb2 import ModelCard, RequestSpec
from pagestream_gateway import Settings
from pagestream_grammars import TokenTable, grammar_tokenizer, limits, rules_grammar, source
from pagestream_streams import Broker, StreamsSettings
from support.clients.gateway_clients import Address, gateway_settings, grpc_stub
from support.engines.synthetic_engine import REASONING_MARKS, synthetic_card, tokenizer_of
from support.protocol.chat_templates import DEEPSEEK_R1, DEEPSEEK_V31, GLM, GPT_OSS, QWEN_CODER, SEED_OSS
from tokenizers import Tokenizer

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TOOLS = {"tools": [WEATHER]}
NAMED = {**TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
USER = {"role": "user", "content": "Weather?"}
CALL: dict[str, Any] = {
    "id": "1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
OTHER = {**CALL, "id": "2", "function": {"name": "get_weather", "arguments": '{"city": "Bergen"}'}}
FORM = {"structured_outputs": {"json": {"type": "object"}}}


class Records:
    """Publishes models, and asks for answers of them that never come."""

    def __init__(self, http: httpx.AsyncClient, broker: Broker) -> None:
        self._http = http
        self._broker = broker

    async def published(self, card: ModelCard, name: str = "model") -> str:
        """Make a model known, in place of the one before with this name; return the name."""
        card.name = name
        await self._broker.publish_model(card, partitions=1)
        return card.name

    async def refusal(self, path: str, body: dict[str, Any]) -> dict[str, str]:
        """Return the error of a request that is refused."""
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        return dict(answer.json()["error"])

    async def of(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> RequestSpec:
        """Return the record of a request that is accepted."""
        body = {**body, "stream": True, "on_disconnect": "continue"}
        async with self._http.stream("POST", path, json=body, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            return await self._broker.spec(answer.headers["X-Request-Id"], "default")

    async def of_chat(
        self, template: str | ModelCard, messages: list[dict[str, Any]] | None = None, **more: Any
    ) -> RequestSpec:
        """Return the record of a chat with a model that has this template."""
        return await self.of("/v1/chat/completions", await self.chat(template, messages, **more))

    async def chat(self, template: str | ModelCard, messages: Any = None, **more: Any) -> dict[str, Any]:
        """Return the body of a chat with a model that has this template."""
        card = template if isinstance(template, ModelCard) else card_with(template)
        return {"model": await self.published(card), "messages": messages or [USER], "max_tokens": 5, **more}


def card_with(template: str, *, parsers: tuple[str, str] = ("", ""), **more: Any) -> ModelCard:
    """Return a card with a chat template and names of parsers."""
    card = synthetic_card(max_model_len=8192, chat_template=template, **more)
    card.tool_call_parser, card.reasoning_parser = parsers
    return card


def prompt_of(spec: RequestSpec) -> str:
    """Return the text of a record's only prompt."""
    text: str = tokenizer_of(synthetic_card()).decode(list(spec.prompts[0].ids), skip_special_tokens=False)
    return text


@pytest.fixture(scope="module")
def settings(redis_url: str) -> Settings:
    """Settings of a gateway that looks for new models each time."""
    return replace(gateway_settings(redis_url), broker=StreamsSettings(directory_ttl_s=0.0))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def records(shared_http: httpx.AsyncClient, redis_url: str) -> AsyncIterator[Records]:
    async with await Broker.connect(redis_url) as broker:
        yield Records(shared_http, broker)


@pytest.mark.parametrize(
    ("template", "parsers", "expected"),
    [
        (GPT_OSS, ("", ""), ("openai", "openai_gptoss")),
        (QWEN_CODER, ("", ""), ("qwen3_coder", "")),
        (GLM, ("", ""), ("glm45", "think")),
        (DEEPSEEK_R1, ("", ""), ("deepseek_v3", "open")),
        (DEEPSEEK_V31, ("", ""), ("deepseek_v3", "think")),
        (QWEN_CODER, ("hermes", "deepseek_r1"), ("hermes", "open")),
        (GLM, ("qwen3_xml", "none"), ("qwen3_coder", "")),
        ("{{ messages }}", ("llama4_pythonic", "qwen3"), ("pythonic", "think")),
        (GPT_OSS, ("none", "none"), ("", "")),
        ("{% if tools %}<tool_call>{% endif %}{{ messages }}", ("", ""), ("hermes", "")),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]{{ messages }}", ("", ""), ("mistral", "")),
        ("{{ tools }}<|python_tag|>ipython{{ messages }}", ("", ""), ("llama3_json", "")),
        ("{{ tools }} [func_name1(params_name1=params_value1)]{{ messages }}", ("", ""), ("pythonic", "")),
    ],
)
async def test_the_format_is_that_of_the_template_or_the_one_that_is_named(
    records: Records, template: str, parsers: tuple[str, str], expected: tuple[str, str]
) -> None:
    output = (await records.of_chat(card_with(template, parsers=parsers), **TOOLS)).answer.output
    assert (output.tool_format, output.reasoning_format) == expected
    typed = {tool.name: [each.name for each in tool.parameters] for tool in output.typed_tools}
    assert typed == ({"get_weather": ["days"]} if expected[0] in ("qwen3_coder", "glm45") else {})


async def test_special_tokens_are_shown_where_they_tell_the_format(records: Records) -> None:
    async def skips(template: str, special: str, **more: Any) -> bool:
        spec = await records.of_chat(card_with(template, specials=[special]), **more)
        return spec.sampling.skip_special_tokens

    assert not await skips(GPT_OSS, "<|channel|>", **TOOLS)
    assert not await skips(GLM, "<think>")
    assert await skips(GLM, "<|user|>", **TOOLS)
    assert await skips(GLM, "<tool_call>", **NAMED)


async def test_the_channel_of_a_constrained_output_is_opened(records: Records) -> None:
    spec = await records.of_chat(GPT_OSS, **FORM)
    assert prompt_of(spec).endswith("<|start|>assistant<|channel|>final<|message|>")
    assert not spec.answer.HasField("output")
    spec = await records.of_chat(GPT_OSS, **NAMED)
    assert prompt_of(spec).endswith(
        "assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    )
    assert (spec.answer.output.tool_format, spec.answer.output.reasoning_format) == ("named", "")


async def test_a_message_that_is_continued_is_within_its_channel(records: Records) -> None:
    begun = [USER, {"role": "assistant", "content": "It is"}]
    asked = {**TOOLS, "continue_final_message": True, "add_generation_prompt": False}
    assert (await records.of_chat(GPT_OSS, begun, **asked)).answer.output.opening == "<|channel|>final<|message|>"


async def test_calls_and_results_are_given_to_a_template_that_takes_one_call_a_message(records: Records) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "I look.", "reasoning_content": "Two.", "tool_calls": [CALL, OTHER]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "tool", "tool_call_id": "2", "content": "9"},
    ]
    _, _, turns = prompt_of(await records.of_chat(GPT_OSS, messages, **TOOLS)).partition("Weather?<|end|>")
    assert turns == (
        "<|start|>assistant<|channel|>analysis<|message|>Two.\nI look.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"7"<|end|>'
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Bergen"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"9"<|end|>'
        "<|start|>assistant"
    )
    again = [{**each, "content": f"later {each['content']}"} for each in messages[1:]]
    shown = prompt_of(await records.of_chat(GPT_OSS, [*messages, USER, *again], **TOOLS))
    assert re.findall(r'message\|>"([^"]*)"', shown) == ["7", "9", "later 7", "later 9"]


MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% for c in m.tool_calls or () %}"
    "{% if c.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}"
    "{% else %}{{ m.content or '' }}{% endif %}{% endfor %}"
)


async def test_ids_of_other_servers_are_as_mistrals_templates_take_them(records: Records) -> None:
    """The last nine characters, as in vLLM; what these can't be depends on the id alone."""
    ids = ["abcdef123", "call_2f1babcdef123", "call_00000000ZY1234567", "functions.now:0", "1"]
    calls = [{**CALL, "id": each} for each in ids]
    results = [{"role": "tool", "tool_call_id": each, "content": "7"} for each in ids]
    text = prompt_of(await records.of_chat(MISTRAL, [USER, {"role": "assistant", "tool_calls": calls}, *results]))
    written, answered = (re.findall(rf"\[{name}\]([A-Za-z0-9]{{9}})\[", text) for name in ("CALL_ID", "TOOL_RESULTS"))
    assert written == answered
    assert len(set(written)) == len(ids)
    assert (written[0], written[2]) == ("abcdef123", "ZY1234567")


async def test_a_record_says_whose_calls_a_grammar_forces(records: Records) -> None:
    forced = (await records.of_chat(MISTRAL, **TOOLS, tool_choice="required")).answer.output
    assert (forced.tool_format, forced.own_format) == ("required", "mistral")
    forced = (await records.of_chat(QWEN_CODER, **NAMED)).answer.output
    assert (forced.tool_format, forced.own_format) == ("named", "qwen3_coder")
    assert [tool.name for tool in forced.typed_tools] == ["get_weather"], "of calls within reasoning"


MAGISTRAL = "{% if tools %}[TOOL_CALLS]{% endif %}[THINK]Your thoughts[/THINK]{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("template", "parser", "expected"),
    [
        (SEED_OSS, "", ("seed_oss", "think", "seed_oss")),
        (SEED_OSS, "seed_oss", ("seed_oss", "open", "seed_oss")),
        (MAGISTRAL, "", ("mistral", "think", "mistral")),
        ("{{ tools }}[TOOL_CALLS]{{ messages[0].content }}", "mistral", ("mistral", "think", "mistral")),
        (MAGISTRAL, "qwen3", ("mistral", "think", "")),
    ],
)
async def test_reasoning_has_the_marks_of_its_model(
    records: Records, template: str, parser: str, expected: tuple[str, str, str]
) -> None:
    words = ["<seed:think>", "</seed:think>", "[THINK]", "[/THINK]", "<think>", "</think>"]
    card = card_with(template, parsers=("", parser), specials=words)
    spec = await records.of_chat(card, **TOOLS)
    output = spec.answer.output
    assert (output.tool_format, output.reasoning_format, output.reasoning_marks) == expected
    assert not spec.sampling.skip_special_tokens
    marks = (await records.of_chat(card, **FORM)).reasoning
    ends = {"seed_oss": "</seed:think>", "mistral": "[/THINK]", "": "</think>"}
    assert list(marks.end.ids) == [tokenizer_of(card).token_to_id(ends[expected[2]])]


async def test_no_effort_is_no_budget_for_seed_oss(records: Records) -> None:
    assert prompt_of(await records.of_chat(SEED_OSS, reasoning_effort="none")).endswith("<seed:think></seed:think>")
    assert prompt_of(await records.of_chat(SEED_OSS, reasoning_effort="high")).endswith("assistant\n")


async def test_effort_is_given_to_templates_that_know_it(records: Records) -> None:
    async def prompt(template: str, **more: Any) -> str:
        return prompt_of(await records.of_chat(template, **more))

    assert "Reasoning: high" in await prompt(GPT_OSS, reasoning_effort="high")
    plain = await prompt(GLM)
    assert await prompt(GLM, reasoning_effort="high") == plain == await prompt(GLM, reasoning_effort="minimal")
    off = await prompt(GLM, reasoning_effort="none")
    assert off == await prompt(GLM, chat_template_kwargs={"enable_thinking": False}) != plain
    own = {"chat_template_kwargs": {"enable_thinking": True}}
    assert await prompt(GLM, reasoning_effort="none", **own) == await prompt(GLM, **own)
    assert await prompt(QWEN_CODER, reasoning_effort="none") == await prompt(QWEN_CODER)


async def test_documents_are_given_to_a_template_that_takes_them(records: Records) -> None:
    documents = [{"title": "Mill", "text": "It turns."}, {"title": "River", "text": "It runs."}]
    template = (
        "{% for each in documents or [] %}{{ each.title }}: {{ each.text }};{% endfor %}{{ messages[0].content }}"
    )
    with_documents = prompt_of(await records.of_chat(template, documents=documents))
    assert with_documents == "Mill: It turns.;River: It runs.;Weather?"
    assert prompt_of(await records.of_chat(template)) == "Weather?"
    error = await records.refusal("/v1/chat/completions", await records.chat(GLM, documents=documents))
    assert "documents: is not supported" in error["message"]
    assert "its chat template takes" in error["message"]


async def test_instructions_of_a_developer_reach_a_template_that_knows_the_system_alone(records: Records) -> None:
    first, later = {"role": "system", "content": "Be kind."}, {"role": "developer", "content": "Speak Norwegian."}
    messages = [first, USER, {"role": "assistant", "content": "Yes?"}, later, USER]
    text = prompt_of(await records.of_chat(QWEN_CODER, messages))
    merged = [{"role": "system", "content": "Be kind.\n\nSpeak Norwegian."}, USER, messages[2], USER]
    assert text == prompt_of(await records.of_chat(QWEN_CODER, merged))
    assert "Speak Norwegian." in text
    known = "{% for each in messages %}{{ each.role }}:{{ each.content }};{% endfor %}{# developer #}"
    assert "developer:Speak Norwegian." in prompt_of(await records.of_chat(known, messages))


async def test_templates_find_earlier_reasoning_under_both_names(records: Records) -> None:
    template = "{{ messages[0].reasoning }} {{ messages[0].reasoning_content }}"
    said = [{"role": "assistant", "content": "", "reasoning_content": "why"}]
    assert prompt_of(await records.of_chat(template, said)) == "why why"


OPENED, MAY_BEGIN, ON_A_LINE, NONE = (1, 0), (1, 1), (1, 2), (0, 0)
"""Number of tokens of the end, and of openings."""


@pytest.mark.parametrize(
    ("template", "more", "expected"),
    [
        (DEEPSEEK_R1, {}, OPENED),
        (DEEPSEEK_V31, {"chat_template_kwargs": {"thinking": True}}, OPENED),
        (DEEPSEEK_V31, {}, NONE),
        (GLM, {}, ON_A_LINE),
        (GLM, {"chat_template_kwargs": {"enable_thinking": False}}, NONE),
        (GLM, {"continue_final_message": True, "add_generation_prompt": False}, NONE),
        (QWEN_CODER, {}, NONE),
        (QWEN_CODER, {"parsers": ("hermes", "qwen3")}, MAY_BEGIN),
        (QWEN_CODER, {"parsers": ("hermes", "deepseek_r1")}, OPENED),
        (DEEPSEEK_R1, {"separate_reasoning": False}, NONE),
        (DEEPSEEK_R1, {"words": ()}, NONE),
        (DEEPSEEK_R1, {"constrains": False}, NONE),
        (GPT_OSS, {}, NONE),
    ],
)
async def test_reasoning_before_a_form_has_marks_where_it_may_come(
    records: Records, template: str, more: dict[str, Any], expected: tuple[int, int]
) -> None:
    more = {"words": REASONING_MARKS, "constrains": True, "parsers": ("", ""), **more}
    card = card_with(template, words=more.pop("words"), parsers=more.pop("parsers"))
    card.takes_output_constraints = more.pop("constrains")
    messages = [USER, {"role": "assistant", "content": "It"}] if "continue_final_message" in more else [USER]
    spec = await records.of_chat(card, messages, **FORM, **more)
    assert (len(spec.reasoning.end.ids), len(spec.reasoning.openings)) == expected
    form = {OPENED: "open", NONE: ""}.get(expected, "think")
    assert (spec.answer.output.reasoning_format, spec.answer.output.keeps_blanks) == (form, bool(form))


async def test_over_grpc_special_tokens_are_not_shown(records: Records, gateway: Address, redis_url: str) -> None:
    model = await records.published(card_with(GPT_OSS, specials=["<|channel|>"]))
    chat = api.ChatInput(messages=[api.ChatMessage(role="user", content="Weather?")])
    async with grpc_stub(gateway) as stub, await Broker.connect(redis_url) as broker:
        call = stub.Generate(
            api.GenerateRequest(model=model, chat=chat, on_disconnect=api.ON_DISCONNECT_CONTINUE), timeout=60
        )
        spec = await broker.spec((await call.read()).chunk.request_id, "default")
        call.cancel()
    assert spec.sampling.skip_special_tokens


ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ANSWERED = '{"a": 1}'
PLACE = {
    "type": "object",
    "properties": {"b": {"$ref": "#/$defs/n"}, "city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["b"],
    "$defs": {"n": {"type": "integer"}},
}
CALLED = [
    {"type": "function", "function": {"name": "f", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]
ARGUMENTS = '{"b": 2, "city": "<O", "unit": "c"}'
CALLS: dict[str, tuple[str, list[str]]] = {
    "hermes": (
        '<tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</tool_call>',
        [
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        ],
    ),
    "llama3_json": (
        '{"name": "f", "parameters": ARGUMENTS}',
        ['<|python_tag|>{"name": "now", "parameters": {"x": 1}}'],
    ),
    "mistral": (
        "[TOOL_CALLS]f[CALL_ID]abcdef123[ARGS]ARGUMENTS",
        ["[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}"],
    ),
    "mistral before [ARGS]": ('[TOOL_CALLS][{"name": "f", "arguments": ARGUMENTS}]', []),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [],
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\nARGUMENTS\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [],
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=f>\n<parameter=b>\n2\n</parameter>\n<parameter=city>\n<O\n</parameter>\n"
        "<parameter=unit>\nc\n</parameter>\n</function>\n</tool_call>",
        ["<tool_call>\n<function=now>\n<parameter=any>\nx\n</parameter>\n</function>\n</tool_call>"],
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=f>\n<parameter=b>2</parameter>\n<parameter=city><O</parameter>\n"
        "<parameter=unit>c</parameter>\n</function>\n</seed:tool_call>",
        ["<seed:tool_call><function=now></function></seed:tool_call>"],
    ),
    "glm45": (
        "<tool_call>f\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n<arg_key>city</arg_key>\n<arg_value><O"
        "</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>c</arg_value>\n</tool_call>",
        ["<tool_call>now</tool_call><tool_call>now\n<arg_key>any</arg_key><arg_value></arg_value></tool_call>"],
    ),
    "pythonic": ('[f(b=2, city="<O", unit="c")]', ['[f(b=2, unit="c"), now()]']),
    "openai": (
        "<|channel|>analysis<|message|>Hm <<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>ARGUMENTS",
        [" to=functions.f<|channel|>commentary json<|message|>ARGUMENTS"],
    ),
    "granite": (
        '<|tool_call|>[{"name": "f", "arguments": ARGUMENTS}]',
        ['<|tool_call|> [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'],
    ),
    "phi4_mini_json": (
        '<|tool_call|>[{"name": "f", "arguments": ARGUMENTS}]<|/tool_call|>',
        ['<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]<|/tool_call|>'],
    ),
    "hunyuan_a13b": (
        '<tool_calls>[{"name": "f", "arguments": ARGUMENTS}]</tool_calls>',
        ['<tool_calls>\n[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]\n</tool_calls>'],
    ),
    "internlm": (
        '<|action_start|><|plugin|>\n{"name": "f", "parameters": ARGUMENTS}<|action_end|>',
        ['<|action_start|><|plugin|>{"name": "now", "parameters": {}}\n<|action_end|>'],
    ),
    "cohere_command3": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": ARGUMENTS}]<|END_ACTION|>',
        ['<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>'],
    ),
    "longcat": ('<longcat_tool_call>\n{"name": "f", "arguments": ARGUMENTS}\n</longcat_tool_call>', []),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>ARGUMENTS"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>"
        ],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="b">2</parameter>\n'
        '<parameter name="city"><O</parameter>\n<parameter name="unit">c</parameter>\n</invoke>\n</minimax:tool_call>',
        [
            '<minimax:tool_call>\n<invoke name="now">\n</invoke>\n<invoke name="now">\n'
            '<parameter name="any">x</parameter>\n</invoke>\n</minimax:tool_call>'
        ],
    ),
    "olmo3": (
        '<function_calls>\nf(b=2, city="<O", unit="c")\n</function_calls>',
        ["<function_calls>now()\nf(b=2)</function_calls>"],
    ),
    "lfm2": (
        '<|tool_call_start|>[f(b=2, city="<O", unit="c")]<|tool_call_end|>',
        ["<|tool_call_start|>[now(), now()]<|tool_call_end|>"],
    ),
}
"""A call of f, and other calls, as models of each format write them."""
MARKERS = re.compile(r"</?(?:seed:|minimax:)?[a-z_]+>|<[|｜][^|｜]+[|｜]>|\[[A-Z_]+\]")


def either(parser: str, *, answer: Any = None, parameters: Any = PLACE, **more: Any) -> tuple[ModelCard, Any]:
    """Return the card of a model with a format, and what asks for an answer of a form or calls."""
    template = "{{ tools }}```json{{ messages }}" if parser == "deepseek_v3" else "{{ messages }}{{ tools }}"
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}, *CALLED[1:]]
    return card_with(template, parsers=(parser, ""), **more), {
        "tools": tools,
        "structured_outputs": answer or {"json": ANSWER},
    }


@cache
def tokens_of(tokenizer: str) -> tuple[LLTokenizer, TokenTable]:
    made = Tokenizer.from_str(tokenizer)
    table = TokenTable(made)
    return grammar_tokenizer(made, made.get_vocab_size(), [1], table), table


def matches(text: str, rules: str, tokenizer: Tokenizer) -> bool:
    """Whether an output may be a text: each token is looked for in the mask of its place, as an engine does."""
    tokens, table = tokens_of(tokenizer.to_str())
    matcher = LLMatcher(tokens, source(rules_grammar(rules), table), log_level=0, limits=limits())
    for token_id in tokenizer.encode(text, add_special_tokens=False).ids:
        mask = matcher.compute_bitmask()
        if not mask[token_id // 8] >> token_id % 8 & 1 or not matcher.consume_token(token_id):
            return False
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        *((form, "words") for form in CALLS),
        *((form, "text") for form in CALLS if form != "mistral"),  # whose tokenizers are told by the token [ARGS]
        ("deepseek_v31", "specials"),
        ("mistral", "specials"),
    ],
)
async def test_an_answer_of_a_form_or_calls_have_a_grammar(records: Records, form: str, kind: str) -> None:
    """A marker may be an added token, a special one of these, or text."""
    call, others = CALLS[form]
    markers = sorted(set(MARKERS.findall("".join([call, *others]))) - {"<O"})
    card, asked = either(form.partition(" ")[0], **({} if kind == "text" else {kind: markers}))
    tokenizer = tokenizer_of(card)
    rules = (await records.of_chat(card, **asked)).sampling.structured_outputs.grammar
    final = "<|channel|>final<|message|>" if form == "openai" else ""
    blanks = "" if form == "openai" else "\n\n"
    for text in (final + ANSWERED, blanks + final + ANSWERED, call, blanks + call + blanks, *others):
        if kind != "text" or "python_tag" not in text:
            assert matches(text.replace("ARGUMENTS", ARGUMENTS), rules, tokenizer), text
    whole = call.replace("ARGUMENTS", ARGUMENTS)
    wrong = [whole.replace("2", '"x"'), re.sub(r'(["\n>])c(["\n<])', r"\1x\2", whole), "So: ", final + '{"a": "1"}']
    assert whole not in wrong
    assert not [text for text in wrong if matches(text, rules, tokenizer)]


async def test_the_form_of_each_api_leaves_room_for_calls(records: Records) -> None:
    call, _ = CALLS["qwen3_coder"]
    markers = MARKERS.findall(call)
    card = card_with("{{ messages }}{{ tools }}", parsers=("qwen3_coder", ""), words=markers)
    form = {"type": "json_schema", "schema": ANSWER}
    common = {"model": await records.published(card)}
    function = {"name": "f", "parameters": PLACE}
    for path, body in (
        (
            "/v1/chat/completions",
            {
                "messages": [USER],
                "tools": [{"type": "function", "function": function}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}},
            },
        ),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "function", **function}], "text": {"format": {**form, "name": "a"}}},
        ),
        (
            "/v1/messages",
            {
                "messages": [USER],
                "max_tokens": 9,
                "tools": [{"name": "f", "input_schema": PLACE}],
                "output_config": {"format": form},
            },
        ),
    ):
        spec = await records.of(path, {**common, **body})
        rules = spec.sampling.structured_outputs.grammar
        assert matches(call, rules, tokenizer_of(card)), path
        assert matches(ANSWERED, rules, tokenizer_of(card)), path
        assert spec.answer.output.tool_format == "qwen3_coder"


async def test_one_call_where_parallel_ones_are_not_wanted(records: Records) -> None:
    for form in ("hermes", "mistral", "glm45", "pythonic", "granite", "hunyuan_a13b", "kimi_k2", "minimax_m2", "olmo3"):
        _, [several] = CALLS[form]
        card, asked = either(form, words=MARKERS.findall("".join(CALLS[form][0] + several)))
        rules = (await records.of_chat(card, **asked, parallel_tool_calls=False)).sampling.structured_outputs.grammar
        assert not matches(several, rules, tokenizer_of(card)), form


async def test_a_form_within_a_message_of_gpt_oss_is_of_the_answer_alone(records: Records) -> None:
    """Its channel is open there; and without reasoning apart there would be no channel."""
    begun = [USER, {"role": "assistant", "content": "It is"}]
    asked = {**TOOLS, "structured_outputs": {"json": ANSWER}}
    spec = await records.of_chat(GPT_OSS, begun, **asked, continue_final_message=True, add_generation_prompt=False)
    assert spec.sampling.structured_outputs.json
    spec = await records.of_chat(GPT_OSS, **asked, separate_reasoning=False)
    assert prompt_of(spec).endswith("<|start|>assistant<|channel|>final<|message|>")
    spec = await records.of_chat(GPT_OSS, **asked)
    assert prompt_of(spec).endswith("<|start|>assistant")
    assert (spec.answer.output.tool_format, spec.answer.output.reasoning_format) == ("openai", "openai_gptoss")


async def test_a_marker_that_is_a_special_token_is_that_token_in_the_grammar(records: Records) -> None:
    card, asked = either("hermes", specials=["<tool_call>"])
    rules = (await records.of_chat(card, **asked)).sampling.structured_outputs.grammar
    assert f'call: <[{tokenizer_of(card).token_to_id("<tool_call>")}]> "\\n" body' in rules


@pytest.mark.parametrize(
    ("parser", "given", "reason"),
    [
        ("none", {}, "have no grammar here"),
        ("hermes", {"answer": {"regex": "a"}}, "only JSON"),
        ("hermes", {"answer": {"json": {"multipleOf": 1e9}}}, "multipleOf"),
        ("hermes", {"parameters": {"multipleOf": 1e9}}, "multiple"),
    ],
)
async def test_what_has_no_grammar_is_refused(records: Records, parser: str, given: Any, reason: str) -> None:
    card, asked = either(parser, **given)
    error = await records.refusal("/v1/chat/completions", await records.chat(card, **asked))
    assert reason in error["message"]


@pytest.mark.parametrize("asked", [{"allowed_token_ids": [30]}, {"bad_words": ["a"]}])
async def test_constraints_that_an_older_engine_would_skip_are_refused(records: Records, asked: dict[str, Any]) -> None:
    card = synthetic_card()
    assert (await records.of("/v1/completions", {"model": await records.published(card), "prompt": "x", **asked})).model
    card.takes_output_constraints = False
    error = await records.refusal("/v1/completions", {"model": await records.published(card), "prompt": "x", **asked})
    assert "are of an earlier version" in error["message"]
    # Its number stays, whatever the name: cards are read by gateways of other versions.
    assert ModelCard.DESCRIPTOR.fields_by_name["takes_output_constraints"].number == 16


async def test_what_begins_the_reasoning_is_not_cut_off(records: Records) -> None:
    card = synthetic_card()
    cut = {"messages": [{"role": "user", "content": "abcdefgh" * 9}], "truncate_prompt_tokens": 20}
    assert await records.of_chat(card, **cut, truncation_side="right")
    card.chat_template += "<think>\n"
    assert await records.of_chat(card, **cut, truncation_side="left")
    error = await records.refusal("/v1/chat/completions", await records.chat(card, **cut, truncation_side="right"))
    assert (error["param"], "begins the reasoning" in error["message"]) == ("truncation_side", True)


async def test_sampling_takes_vllms_defaults_and_those_of_the_model(records: Records) -> None:
    body = {"model": await records.published(synthetic_card()), "prompt": "x"}
    found = (await records.of("/v1/completions", body)).sampling
    assert (found.n, found.temperature, found.top_p, found.top_k, found.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (found.repetition_penalty, found.skip_special_tokens, found.HasField("logprobs")) == (1.0, True, False)
    card = synthetic_card()
    defaults = {
        "temperature": 0.5,
        "top_k": 20,
        "top_p": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 2.0,
        "max_tokens": 7,
    }
    card.default_sampling.MergeFrom(api.SamplingParams(**defaults))
    body = {"model": await records.published(card), "prompt": "x"}
    found = (await records.of("/v1/completions", body)).sampling
    assert {name: getattr(found, name) for name in defaults} == defaults
    found = (await records.of("/v1/completions", {**body, "top_k": 3})).sampling
    assert (found.temperature, found.top_k, found.max_tokens) == (0.5, 3, 7)
    found = (await records.of("/v1/completions", {**body, "use_beam_search": True, "n": 2, "beam_width": 4})).sampling
    assert (found.temperature, found.top_p, found.top_k, found.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert (found.beam_width, found.max_tokens) == (4, 7)


async def test_what_is_asked_for_is_in_the_record(records: Records) -> None:
    asked = {
        "presence_penalty": -2.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logprobs": 0,
        "seed": -(2**63),
        "temperature": 0.0,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "min_tokens": 2,
    }
    body = {"model": await records.published(synthetic_card()), "prompt": "x", **asked}
    spec = await records.of("/v1/completions", {**body, "logit_bias": {"5": -100, "99": 3.5}, "stop": "end"})
    assert {name: getattr(spec.sampling, name) for name in asked} == asked
    assert (dict(spec.sampling.logit_bias), list(spec.sampling.stop)) == ({5: -100.0, 99: 3.5}, ["end"])
    best = {"n": 2, "best_of": 3, "logprobs": None}
    assert (await records.of("/v1/completions", {**body, **best})).sampling.best_of == 3
    assert not (await records.of("/v1/completions", {**body, **best, "best_of": 2})).sampling.HasField("best_of")


async def test_seeds_are_chosen_once_for_each_request_or_key(records: Records) -> None:
    body = {"model": await records.published(synthetic_card()), "prompt": "x"}

    async def seed(key: str = "", **more: Any) -> int:
        headers = {"Idempotency-Key": key} if key else None
        return (await records.of("/v1/completions", {**body, **more}, headers)).sampling.seed

    seeds = [await seed() for _ in range(4)] + [await seed("k"), await seed("other"), await seed("third", max_tokens=3)]
    assert len(set(seeds)) == 7
    assert all(0 <= each < 2**63 for each in seeds)
    assert await seed("k") == seeds[4]
    assert await seed("fourth", seed=9) == 9


@pytest.mark.parametrize(
    ("lengths", "asked", "expected"),
    [
        ([30], 70, (70, 0)),
        ([30], 100, (70, 0)),
        ([10, 20], 30, (30, 0)),
        ([10, 20], 75, (75, 0)),
        ([10, 80], 30, (30, 100)),
        ([10, 80], 95, (90, 100)),
        ([31], None, (69, 0)),
    ],
)
async def test_outputs_end_with_the_context(
    records: Records, lengths: list[int], asked: int | None, expected: tuple[int, int]
) -> None:
    """A chat has no default of its own."""
    card = synthetic_card(max_model_len=100)
    if asked is None:
        card.chat_template = "{{ messages[0].content }}"
        spec = await records.of_chat(card, [{"role": "user", "content": "x" * lengths[0]}], max_tokens=None)
    else:
        prompts = [[20] * length for length in lengths]
        body = {"model": await records.published(card), "prompt": prompts, "max_tokens": asked}
        spec = await records.of("/v1/completions", body)
    assert [len(prompt.ids) for prompt in spec.prompts] == lengths
    assert (spec.sampling.max_tokens, spec.max_total_tokens) == expected


@pytest.mark.parametrize(
    ("field", "asked"),
    [("best_of", {"best_of": 100}), ("beam_width", {"use_beam_search": True, "beam_width": 60}), ("n", {"n": 100})],
)
async def test_all_sequences_of_a_request_count(records: Records, field: str, asked: dict[str, Any]) -> None:
    body = {"model": await records.published(synthetic_card()), "prompt": [[20]] * 5, **asked}
    error = await records.refusal("/v1/completions", body)
    assert (error["param"], f"prompts times {field} is" in error["message"]) == (field, True)


BEAMS = {"use_beam_search": True}
RANGES: list[tuple[dict[str, Any], str]] = [
    ({**BEAMS, "temperature": 0.7}, "temperature"),
    ({**BEAMS, "top_k": 5}, "top_k"),
    ({**BEAMS, "presence_penalty": 0.5}, "presence_penalty"),
    ({**BEAMS, "logit_bias": {"3": 1.0}}, "logit_bias"),
    ({**BEAMS, "stop": ["x"]}, "stop"),
    ({**BEAMS, "n": 3, "beam_width": 2}, "beam_width"),
    ({**BEAMS, "length_penalty": 11}, "length_penalty"),
    ({**BEAMS, "beam_width": 65}, "beam_width"),
    ({**BEAMS, "best_of": 65}, "best_of"),
    ({**BEAMS, "n": 65}, "n"),
    ({"beam_width": 2}, "beam_width"),
    ({"early_stopping": "never"}, "early_stopping"),
    ({"min_p": -0.1}, "min_p"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"prompt": [[20] * 10, [20] * 108], "max_tokens": 50, "min_tokens": 21}, "min_tokens"),
    ({"stop": ["x" * 2000]}, "stop"),
    ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"repetition_penalty": 1e-7}, "repetition_penalty"),
    ({"repetition_penalty": 2e6}, "repetition_penalty"),
    ({"logprobs": 21}, "logprobs"),
    ({"best_of": 129}, "best_of"),
    ({"seed": 2**63}, "seed"),
    ({"top_k": 2**40}, "top_k"),
]


async def test_a_models_own_defaults_come_before_ours_and_after_the_callers(records: Records) -> None:
    card = synthetic_card()
    own = {"temperature": 0.25, "min_p": 0.125, "top_k": 20, "top_p": 0.5, "repetition_penalty": 1.25, "max_tokens": 9}
    card.default_sampling.MergeFrom(api.SamplingParams(**own))
    spec = await records.of_chat(card, [{"role": "user", "content": "x"}], max_tokens=None)
    assert {name: getattr(spec.sampling, name) for name in own} == own
    model = spec.model
    for asked, expected in ((None, 9), (30, 30), (5, 5)):
        spec = await records.of("/v1/completions", {"model": model, "prompt": "x", "max_tokens": asked, "min_p": 0.5})
        assert (spec.sampling.max_tokens, spec.sampling.min_p, spec.sampling.top_k) == (expected, 0.5, 20)
    card.default_sampling.max_tokens = 40
    model = await records.published(card, "longer")
    assert (await records.of("/v1/completions", {"model": model, "prompt": "x"})).sampling.max_tokens == 16, "as vLLM"


async def test_values_out_of_range_are_named(records: Records) -> None:
    model = await records.published(synthetic_card())
    assert await records.of("/v1/completions", {"model": model, "prompt": "x", **BEAMS, "beam_width": 64})
    for asked, field in RANGES:
        error = await records.refusal("/v1/completions", {"model": model, "prompt": "x", **asked})
        assert error["param"] == field, (asked, error)


@pytest.mark.parametrize("change", [{"tokenizer_json_zlib": b"x"}, {"chat_template": "{% for %}"}])
async def test_a_broken_card_stops_no_other_model(
    records: Records, shared_http: httpx.AsyncClient, change: dict[str, Any]
) -> None:
    card = synthetic_card()
    card.MergeFrom(ModelCard(**change))
    name, good = await records.published(card, "broken"), await records.published(synthetic_card())
    answer = await shared_http.post("/v1/completions", json={"model": name, "prompt": "x"})
    assert answer.status_code == 500, answer.text
    assert (await records.of("/v1/completions", {"model": good, "prompt": "x"})).model == good
    assert json.loads((await shared_http.get("/v1/models")).text)["data"]


async def test_bounds_of_multiples_are_those_of_engines(records: Records) -> None:
    """What a gateway accepts no engine refuses: `tests/engine` has the same bounds."""
    model = await records.published(synthetic_card())
    for given, is_refused in (
        ([9999.9999], True),
        ([9973, 9967], True),
        ([0], True),
        ([10_000], False),
        ([10_001], True),
        ([1e-7, 9973], True),
        ([0.01, 0.25, 15, 1e3], False),
    ):
        schema = {"anyOf": [{"type": "number", "multipleOf": each} for each in given]}
        body = {"model": model, "prompt": "x", "structured_outputs": {"json": schema}}
        if is_refused:
            assert "multipleOf" in (await records.refusal("/v1/completions", body))["message"], given
        else:
            assert (await records.of("/v1/completions", body)).sampling.structured_outputs.json


async def test_callers_that_come_together_share_a_models_load_also_where_the_first_leaves(records: Records) -> None:
    body = {"model": await records.published(synthetic_card(), "new"), "prompt": "x"}
    callers = [asyncio.create_task(records.of("/v1/completions", body)) for _ in range(12)]
    await asyncio.sleep(0)
    callers[0].cancel()
    first, *others = await asyncio.gather(*callers, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    assert [each.model if isinstance(each, RequestSpec) else each for each in others] == [body["model"]] * 11
