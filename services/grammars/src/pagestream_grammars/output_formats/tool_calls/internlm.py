"""Tool calls as InternLM writes them: one object between marks."""

from pagestream_grammars.output_formats.declaration import CallWriter, Spelling, ToolFormat, call_schema, json_rule
from pagestream_grammars.output_formats.marked import MarkedCalls

BEGIN, PLUGIN, END = "<|action_start|>", "<|plugin|>", "<|action_end|>"


class InternLM(MarkedCalls):
    """`<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`: InternLM 2 and 3."""

    MARKS = ((f"{BEGIN}{PLUGIN}", END), (f"{BEGIN} {PLUGIN}", END))


def _rules(writer: CallWriter) -> str:
    begin, plugin, end = map(writer.marker, (BEGIN, PLUGIN, END))
    body = json_rule(call_schema(writer.definitions, "parameters"))
    return f'calls: {begin} {plugin} "\\n"? body "\\n"? {end}\nbody: {body}\n'


FORMAT = ToolFormat(
    name="internlm",
    parsers=("internlm",),
    spellings=(
        Spelling(
            "InternLM 2 and 3",
            f'`{BEGIN}{PLUGIN}{{"name": ..., "parameters": ...}}`',
            "`internlm2_tool_parser.py`",
        ),
    ),
    is_taught=lambda template: PLUGIN in template,
    parser=lambda names, _: InternLM(names),
    parser_within=lambda names, _: InternLM(names),
    markers=(BEGIN, PLUGIN, END),
    rules=_rules,
)
