"""Tool calls as Llama 3 and 4 write them: JSON from an output's beginning."""

from pagestream_grammars.output_formats.declaration import (
    CallWriter,
    Spelling,
    ToolFormat,
    call_schema,
    json_rule,
    text_rule,
)
from pagestream_grammars.output_formats.json_calls import JsonCalls


def _rules(writer: CallWriter) -> str:
    token_id = writer.tokens.added_id(JsonCalls.MARKER)
    begin = "" if token_id is None else f"<[{token_id}]>? "
    call = json_rule(call_schema(writer.definitions, "parameters"))
    calls = writer.repeated("call", text_rule("; "))
    return f"calls: {begin}{calls}\ncall: {call}\n"


FORMAT = ToolFormat(
    name="llama3_json",
    parsers=("llama3_json", "llama4_json"),
    spellings=(Spelling("Llama 3.1 to 4", '`{"name": ..., "parameters": ...}`', "`llama_tool_parser.py`"),),
    is_taught=lambda template: JsonCalls.MARKER in template or ('"parameters"' in template and "ipython" in template),
    generality=6,  # of Llama's own, also where they show Python's form
    parser=lambda names, _: JsonCalls(names),
    markers=(JsonCalls.MARKER,),
    rules=_rules,
)
