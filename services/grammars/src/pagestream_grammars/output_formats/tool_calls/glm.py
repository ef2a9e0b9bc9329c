"""Tool calls as GLM-4.5 writes them, with each argument in tags of its own."""

from pagestream_grammars.output_formats.declaration import LINE, CallWriter, Spelling, ToolFormat, text_rule
from pagestream_grammars.output_formats.tagged import CALL, CALL_END, TaggedCalls, Values, up_to


class Glm(TaggedCalls):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>`: GLM-4.5 to 4.7."""

    KEY_END, VALUE = "</arg_key>", "<arg_value>"
    key_begin, value_end, call_ends = "<arg_key>", "</arg_value>", (CALL_END,)
    MARKERS = (CALL, CALL_END, key_begin, KEY_END, VALUE, value_end)

    def name_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        found = up_to("<", text, 0)
        if found is None or not found[0]:
            return found
        behind = text[found[1] - 1 :]
        follows = (self.key_begin, CALL_END)
        if behind.startswith(follows):
            return found[0], found[1] - 1
        return ("", 0) if any(each.startswith(behind) for each in follows) else None

    def key_in(self, text: str) -> tuple[str, int] | None:
        """See TaggedCalls."""
        found = up_to(self.KEY_END, text, 0)
        if found is None or not found[0]:
            return found
        behind = text[found[1] :]
        stripped = behind.lstrip()
        if stripped.startswith(self.VALUE):
            return found[0], len(text) - len(stripped) + len(self.VALUE)
        return ("", 0) if self.VALUE.startswith(stripped) else None


def _rules(writer: CallWriter) -> str:
    key_begin, key_end, value_begin = map(writer.marker, (Glm.key_begin, Glm.KEY_END, Glm.VALUE))
    values = Values(writer.marker(Glm.value_end), Glm.value_end)
    lines = []
    for rule, name, schema in writer.functions():
        arguments = values.arguments(
            rule, schema, lambda key: f"{key_begin} {text_rule(key)} {key_end} {LINE} {value_begin}"
        )
        free = f"({key_begin} KEY {key_end} {LINE} {value_begin} {values.text})*"
        lines.append(f"{rule}: {text_rule(name)} {LINE} {arguments or free}\n")
    call = f"call: {writer.marker(Glm.call_begin)} {writer.any_function()} {writer.marker(Glm.call_end)}\n"
    return f"calls: {writer.repeated('call')}\n{call}{''.join(lines)}{values.rules()}"


FORMAT = ToolFormat(
    name="glm45",
    parsers=("glm45", "glm47"),
    spellings=(
        Spelling(
            "GLM-4.5 to 4.7",
            "`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE...`",
            "`glm4_moe_tool_parser.py`",
        ),
    ),
    is_taught=lambda template: Glm.key_begin in template,
    generality=3,
    parser=Glm,
    parser_within=Glm,
    markers=Glm.MARKERS,
    needs_types=True,
    rules=_rules,
)
