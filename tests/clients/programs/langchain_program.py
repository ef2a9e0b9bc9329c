"""LangChain's chat model against a gateway: `langchain_program.py URL`, with the results as JSON on stdout."""

import json
import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "Who lives in the lighthouse?"


class Villager(BaseModel):
    """What is asked for as structured output."""

    name: Literal["Mara", "Otto"]
    is_keeper: bool


@tool
def get_weather(city: Literal["Oslo", "Bergen"]) -> str:
    """Weather of a city."""
    return city


def main(url: str) -> dict[str, object]:
    """Make the calls; return what they brought."""
    model = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model="demo",
        temperature=0,
        max_tokens=200,
        max_retries=0,
        stream_usage=True,
    )
    whole = model.invoke(QUESTION)
    chunks = list(model.stream(QUESTION))
    forced = model.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(
        "What is the weather in Oslo?"
    )
    structured = model.with_structured_output(Villager, method="json_schema").invoke(QUESTION)
    return {
        "text": whole.content,
        "tokens": whole.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in chunks),
        "num_chunks": len(chunks),
        "calls": [[call["name"], sorted(call["args"])] for call in forced.tool_calls],
        "structured": sorted(structured.model_dump()),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
