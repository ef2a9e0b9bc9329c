"""Names of the formats in which models write tool calls and reasoning, as model cards and settings have them.

They are those of vLLM's parsers, `--tool-call-parser` and `--reasoning-parser`. A name once given stays.
"""

from __future__ import annotations

from typing import NamedTuple

NONE = "none"
"""The name of no format: outputs are content."""

TOOL_CALL_PARSERS: dict[str, str] = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "glm45": "glm45",
    "glm47": "glm45",
    "hermes": "hermes",
    "llama3_json": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "mistral": "mistral",
    "openai": "openai",
    "pythonic": "pythonic",
    "qwen3_coder": "qwen3_coder",
    "qwen3_xml": "qwen3_coder",
    "seed_oss": "seed_oss",
}
"""Names of parsers of tool calls, and of the format that a request's record has for each."""

REASONING_PARSERS = ("deepseek_r1", "deepseek_v3", "glm45", "mistral", "openai_gptoss", "qwen3", "seed_oss")
"""Names of parsers of reasoning."""


class OutputParsers(NamedTuple):
    """Which parsers read a model's outputs; an empty name leaves it to the chat template."""

    tool_call_parser: str = ""
    reasoning_parser: str = ""

    def over(self, others: OutputParsers) -> OutputParsers:
        """Return these, and where one is not named the other's."""
        return OutputParsers(
            self.tool_call_parser or others.tool_call_parser, self.reasoning_parser or others.reasoning_parser
        )

    def fault(self) -> tuple[str, str] | None:
        """Return the member that has an unknown name, and what was expected; None where both are known."""
        for member, known in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            name = getattr(self, member)
            if name and name != NONE and name not in known:
                return member, f"{name[:60]!r} was given, one of {', '.join([*known, NONE])} is expected"
        return None


BY_TEMPLATE = OutputParsers()
"""As the chat template says."""
