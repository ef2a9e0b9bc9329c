"""LangChain's chat model against a gateway: `langchain_program.py URL`, with the results as JSON on stdout."""

import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "Who lives in the lighthouse?"
WEATHER_QUESTION = "What is the weather in Paris, and what is 17 + 25?"
RESULTS = {"get_weather": "rain, 12 degrees", "add": "42"}


class Villager(BaseModel):
    """What is asked for as structured output."""

    name: str
    job: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return city


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


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
    forced = model.bind_tools([get_weather], tool_choice="get_weather", strict=True).invoke(WEATHER_QUESTION)
    able = model.bind_tools([get_weather, add])
    chosen = able.invoke(WEATHER_QUESTION)
    results = [ToolMessage(RESULTS[call["name"]], tool_call_id=call["id"]) for call in chosen.tool_calls]
    answer = able.invoke([HumanMessage(WEATHER_QUESTION), chosen, *results])
    structured = model.with_structured_output(Villager, method="json_schema").invoke("Who is Mara?")
    return {
        "text": whole.content,
        "tokens": whole.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in chunks),
        "num_chunks": len(chunks),
        "forced": [[call["name"], call["args"]] for call in forced.tool_calls],
        "calls": [[call["name"], call["args"]] for call in chosen.tool_calls],
        "answer": answer.content,
        "structured": structured.model_dump(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
