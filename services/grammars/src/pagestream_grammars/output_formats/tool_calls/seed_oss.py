"""Tool calls as Seed-OSS writes them: Qwen3-Coder's within another mark."""

from pagestream_grammars.output_formats.declaration import Spelling, ToolFormat
from pagestream_grammars.output_formats.tool_calls.qwen_coder import QwenCoder, coder_rules

SEED_CALL, SEED_CALL_END = "<seed:tool_call>", "</seed:tool_call>"


class SeedOss(QwenCoder):
    """`<seed:tool_call><function=NAME><parameter=KEY>value</parameter></function></seed:tool_call>`: Seed-OSS."""

    MARKERS = (SEED_CALL, SEED_CALL_END)
    call_begin, call_end = SEED_CALL, SEED_CALL_END
    begins = (SEED_CALL, QwenCoder.FUNCTION)
    call_ends = (QwenCoder.FUNCTION_END, SEED_CALL_END)


FORMAT = ToolFormat(
    name="seed_oss",
    parsers=("seed_oss",),
    spellings=(Spelling("Seed-OSS", "`<seed:tool_call>`, then as Qwen3-Coder's", "`seed_oss_tool_parser.py`"),),
    is_taught=lambda template: SEED_CALL in template,
    parser=SeedOss,
    parser_within=SeedOss,
    markers=SeedOss.MARKERS,
    needs_types=True,
    rules=lambda writer: coder_rules(writer, SeedOss),
)
