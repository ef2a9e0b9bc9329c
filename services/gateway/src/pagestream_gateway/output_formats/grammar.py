"""The grammar of an output that is an answer of a form, or calls of tools, in each format."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pagestream.v1.inference_pb2 import StructuredOutputs
from pagestream_grammars import GrammarError, TokenTable, json_grammar, stripped
from pagestream_grammars.output_formats.json_calls import JsonCalls
from pagestream_grammars.output_formats.tagged import STRING, Glm, QwenCoder, SeedOss, types_of
from pagestream_grammars.output_formats.tool_calls import deepseek, harmony
from pagestream_grammars.output_formats.tool_calls.hermes import Hermes
from pagestream_grammars.output_formats.tool_calls.mistral import Mistral

from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.models import LoadedModel
from pagestream_gateway.output_formats.formats import HARMONY, tool_format
from pagestream_gateway.output_formats.tools import Tools, call_schema, moved_schema
from pagestream_gateway.sampling import schema_text

_WHITESPACE = r"[ \n\r\t]{0,16}"
"""Between the parts of JSON, as of other constraints in engines: without a bound a model may write blanks forever."""
LINE = '"\\n"?'
"""A line's end that models write, or leave out."""
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class CallWriter:
    """What the rules of a model's calls depend on."""

    tools: Tools
    tokens: TokenTable
    template: str
    """The model's chat template."""

    def marker(self, text: str) -> str:
        """Return what matches a marker: its token, where it has one, since no text matches special ones.

        Models write it so. Engines of earlier versions take other added tokens for special ones as well.
        """
        token_id = self.tokens.added_id(text)
        return text_rule(text) if token_id is None else f"<[{token_id}]>"

    def repeated(self, call: str, separator: str = LINE) -> str:
        """Return one call, or several where they are wanted."""
        return call if self.tools.one_call else f"{call} ({separator} {call})*"

    def functions(self) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
        """Yield a name for a rule, the tool's name and its schema."""
        for number, tool in enumerate(self.tools.definitions):
            function = tool["function"]
            yield f"tool_{number}", function["name"], function.get("parameters") or _ANY_OBJECT

    def any_function(self) -> str:
        """Return the alternative of all tools' rules."""
        return f"({' | '.join(rule for rule, _, _ in self.functions())})"


def call_rules(name: str, writer: CallWriter) -> str | None:
    """Return the rule `calls`, and those that it needs; None for a format that has none here."""
    write = _BY_FORMAT.get(name)
    return None if write is None else write(writer)


def json_rule(schema: Any) -> str:
    """Return a terminal for JSON of a schema. One that is no object is true: anything."""
    options = {"x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return f"%json {json.dumps({**stripped(schema), **options} if isinstance(schema, dict) else options)}"


def text_rule(text: str) -> str:
    """Return a terminal for a text."""
    return json.dumps(text, ensure_ascii=False)


def _hermes(writer: CallWriter) -> str:
    begin, end = map(writer.marker, (Hermes.BEGIN, Hermes.END))
    body = json_rule(call_schema(writer.tools, "arguments"))
    line = text_rule("\n")
    return f"calls: {writer.repeated('call')}\ncall: {begin} {line} body {line} {end}\nbody: {body}\n"


def _llama(writer: CallWriter) -> str:
    token_id = writer.tokens.added_id(JsonCalls.MARKER)
    begin = "" if token_id is None else f"<[{token_id}]>? "
    call = json_rule(call_schema(writer.tools, "parameters"))
    calls = writer.repeated("call", text_rule("; "))
    return f"calls: {begin}{calls}\ncall: {call}\n"


def _mistral(writer: CallWriter) -> str:
    begin = writer.marker(Mistral.BEGIN)
    if writer.tokens.added_id(Mistral.ARGS) is not None:  # as vLLM tells tokenizers from version 11 on
        has_ids = writer.tokens.added_id(Mistral.CALL_ID) is not None
        call_id = f"({writer.marker(Mistral.CALL_ID)} /[a-zA-Z0-9]{{9}}/)? " if has_ids else ""
        lines = [
            f"{rule}: {text_rule(name)} {call_id}{writer.marker(Mistral.ARGS)} {json_rule(schema)}\n"
            for rule, name, schema in writer.functions()
        ]
        return f"calls: {writer.repeated('call', '')}\ncall: {begin} {writer.any_function()}\n{''.join(lines)}"
    item = call_schema(writer.tools, "arguments")
    definitions = {"$defs": item.pop("$defs")}
    most = {"maxItems": 1} if writer.tools.one_call else {}
    schema = {"type": "array", "minItems": 1, **most, "items": item, **definitions}
    return f'calls: {begin} " "? {json_rule(schema)}\n'


def _deepseek(writer: CallWriter) -> str:
    marker, lines = writer.marker, []
    separator = marker(deepseek.SEPARATOR)
    for rule, name, schema in writer.functions():
        if "```json" in writer.template:
            opened, closed = text_rule(f"{name}\n```json\n"), text_rule("\n```")
            call = f'"function" {separator} {opened} {json_rule(schema)} {closed}'
        else:
            call = f"{text_rule(name)} {separator} {json_rule(schema)}"
        lines.append(f"{rule}: {call}\n")
    one = f"{marker(deepseek.CALL_BEGIN)} {writer.any_function()} {marker(deepseek.CALL_END)}"
    calls = f"{marker(deepseek.CALLS_BEGIN)} {writer.repeated('call')} {marker(deepseek.CALLS_END)}"
    return f"calls: {calls}\ncall: {one}\n{''.join(lines)}"


def _qwen_coder(writer: CallWriter, form: type[QwenCoder] = QwenCoder) -> str:
    begin, end = writer.marker(form.call_begin), writer.marker(form.call_end)
    values = _Values(writer.marker(form.value_end), form.value_end)
    lines = []
    for rule, name, schema in writer.functions():
        head, tail = text_rule(f"{form.FUNCTION}{name}>"), writer.marker(form.FUNCTION_END)
        arguments = values.arguments(rule, schema, lambda key: text_rule(f"{form.key_begin}{key}>"))
        free = f'({text_rule(form.key_begin)} KEY ">" {values.text})*'
        lines.append(f"{rule}: {head} {LINE} {arguments or free} {tail}\n")
    call = f"call: {begin} {LINE} {writer.any_function()} {LINE} {end}\n"
    return f"calls: {writer.repeated('call')}\n{call}{''.join(lines)}{values.rules()}"


def _seed_oss(writer: CallWriter) -> str:
    return _qwen_coder(writer, SeedOss)


def _glm(writer: CallWriter) -> str:
    key_begin, key_end, value_begin = map(writer.marker, (Glm.key_begin, Glm.KEY_END, Glm.VALUE))
    values = _Values(writer.marker(Glm.value_end), Glm.value_end)
    lines = []
    for rule, name, schema in writer.functions():
        arguments = values.arguments(
            rule, schema, lambda key: f"{key_begin} {text_rule(key)} {key_end} {LINE} {value_begin}"
        )
        free = f"({key_begin} KEY {key_end} {LINE} {value_begin} {values.text})*"
        lines.append(f"{rule}: {text_rule(name)} {LINE} {arguments or free}\n")
    call = f"call: {writer.marker(Glm.call_begin)} {writer.any_function()} {writer.marker(Glm.call_end)}\n"
    return f"calls: {writer.repeated('call')}\n{call}{''.join(lines)}{values.rules()}"


def harmony_rules(writer: CallWriter, answer: str) -> str:
    """Return the rules of an output in gpt-oss' channels: its reasoning, then an answer or calls.

    `answer`: the terminal of the answer. What ends the output, `<|return|>` or `<|call|>`, is no part of it; so
    there is one call.
    """
    channel, message, constrain, end, start = map(
        writer.marker, (harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, harmony.END, harmony.START)
    )
    values = _Values(end, harmony.END)
    form = f'" "? ({constrain}? "json")?'
    lines = [
        "start: thought* (answer | (thought | said)* calls)\n",
        f'thought: {channel} "analysis" {message} {values.text} {start} "assistant"\n',
        f'said: {channel} "commentary" {message} {values.text} {start} "assistant"\n',
    ]
    lines.append(f'answer: {channel} "final" {form} {message} {answer}\n')
    lines.append(f"calls: {writer.any_function()}\n")
    for rule, name, schema in writer.functions():
        address = f"to={harmony.FUNCTIONS}{name}"
        behind = f"{channel} {text_rule(f'commentary {address}')}"
        before = f"{text_rule(f' {address}')} {channel} {text_rule('commentary')}"
        lines.append(f"{rule}: ({behind} | {before}) {form} {message} {json_rule(schema)}\n")
    return "".join([*lines, values.rules()])


class _Values:
    """Rules of arguments whose values stand before an end tag: text as it is, all else as JSON."""

    text, _tag = "text", "tag"
    """Rules of a text and the tag, and of the tag; each with the line's end behind."""

    def __init__(self, end: str, tag: str) -> None:
        """`end`: what matches the tag."""
        self._end, self._name = end, tag
        self._is_text = end == text_rule(tag)

    def rules(self) -> str:
        """Return the rules that all arguments share."""
        if self._is_text:  # a text ends where the tag is written, by whatever tokens
            value = f"any_text {LINE}\nany_text[suffix={self._end}]: /(.|\\n)*/"
        else:
            tag = re.escape(self._name).replace("/", r"\/")
            value = f"TEXT? {self._end} {LINE}\nTEXT: /(.|\\n)+/ & ~/(?s:.*){tag}(?s:.*)/"
        return f"{self.text}: {value}\n{self._tag}: {LINE} {self._end} {LINE}\nKEY: /[^<>\\n]{{1,128}}/\n"

    def arguments(self, rule: str, schema: Mapping[str, Any], head: Callable[[str], str]) -> str:
        """Return a tool's arguments in the schema's order; "" where it names none, so that they may be any.

        `head`: returns what comes before the value of an argument.
        """
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return ""
        required = schema.get("required")
        needed = required if isinstance(required, list) else ()
        types = types_of(schema)
        parts = []
        for key, each in properties.items():
            value = self._value(rule, schema, key, each, types.get(key, [STRING]))
            parts.append(f"({head(key)} {value}){'' if key in needed else '?'}")
        return " ".join(parts) or LINE

    def _value(self, rule: str, schema: Mapping[str, Any], key: str, given: Any, types: list[str]) -> str:
        if STRING not in types:
            return f"{LINE} {json_rule(_property(rule, schema, key, given))} {self._tag}"
        texts = given.get("enum", [given["const"]] if "const" in given else None) if isinstance(given, dict) else None
        if isinstance(texts, list) and texts and all(isinstance(each, str) for each in texts):
            return f"{LINE} ({' | '.join(map(text_rule, texts))}) {self._tag}"
        return self.text


def _property(rule: str, schema: Mapping[str, Any], key: str, given: Any) -> Any:
    """Return the schema of one argument, with what it refers to."""
    if '"$ref"' not in json.dumps(given):
        return given
    pointer = key.replace("~", "~0").replace("/", "~1")
    place = f"#/$defs/{rule}"
    return {"$ref": f"{place}/properties/{pointer}", "$defs": {rule: moved_schema(schema, place)}}


def _pythonic(writer: CallWriter) -> str:
    lines = []
    for rule, name, schema in writer.functions():
        lines.append(f"{rule}: {text_rule(f'{name}(')} {rule}_a0 {text_rule(')')}\n")
        lines += _keywords(rule, schema)
    calls = writer.repeated("call", '"," " "?')
    return f'calls: "[" {calls} "]"\ncall: {writer.any_function()}\n{"".join(lines)}'


def _keywords(rule: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield rules of a tool's arguments as keywords with values in JSON, which is Python but for three names.

    Rule `a<n>` is what may stand from the n-th argument on where none came before, `b<n>` where one did.
    """
    properties, required = schema.get("properties"), schema.get("required")
    given = properties if isinstance(properties, dict) else {}
    needed = required if isinstance(required, list) else ()
    for number, (key, each) in enumerate(given.items()):
        yield f"{rule}_v{number}: {text_rule(f'{key}=')} {json_rule(_property(rule, schema, key, each))}\n"
        for kind, separator in (("a", ""), ("b", '"," " "? ')):
            skipped = "" if key in needed else f" | {rule}_{kind}{number + 1}"
            yield f"{rule}_{kind}{number}: {separator}{rule}_v{number} {rule}_b{number + 1}{skipped}\n"
    for kind in ("a", "b"):
        yield f'{rule}_{kind}{len(given)}: ""\n'


_BY_FORMAT: dict[str, Callable[[CallWriter], str]] = {
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
    "deepseek_v3": _deepseek,
    "qwen3_coder": _qwen_coder,
    "seed_oss": _seed_oss,
    "glm45": _glm,
    "pythonic": _pythonic,
}


def with_calls(constraint: StructuredOutputs, tools: Tools, model: LoadedModel, field: str) -> StructuredOutputs:
    """Return what an output must match that is `constraint`'s, or calls of tools in the model's format.

    Either may have blanks before it, as models write them behind their reasoning, and calls may have some behind.
    Arguments are held to the tools' schemas. Raises UnsupportedField, with `field`, where the format of calls has no
    grammar here, and for constraints that are no JSON.
    """
    kind = constraint.WhichOneof("constraint")
    is_json = kind in ("json", "json_object")
    if is_json:
        answer = _schema(constraint.json, field) if kind == "json" else {"type": "object"}
        _schema(schema_text(call_schema(tools, "arguments"), "tools"), "tools")
    writer = CallWriter(tools, model.tokens, model.card.chat_template)
    name = tool_format(model.card.chat_template, model.parsers) or ""
    if is_json and name == HARMONY:
        return StructuredOutputs(grammar=harmony_rules(writer, json_rule(answer)))
    rules = call_rules(name, writer) if is_json else None
    if rules is None:
        reason = "its calls have no grammar here" if is_json else "only JSON can stand beside calls"
        raise UnsupportedField(
            field,
            f'with tools that may be called: model {model.name}: {reason}; use tool_choice "none" for the last '
            'answer, or "required"',
        )
    start = "start: BLANKS? (answer | calls BLANKS?)\nBLANKS: /[ \\t\\r\\n]{1,8}/"
    return StructuredOutputs(grammar=f"{start}\nanswer: {json_rule(answer)}\n{rules}")


def _schema(text: str, field: str) -> Any:
    """Return a schema that may be compiled. Raises InvalidRequest."""
    try:
        return json.loads(json_grammar(text).text)
    except GrammarError as error:
        raise InvalidRequest(field, str(error)) from error
