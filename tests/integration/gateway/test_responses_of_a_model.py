"""/v1/responses on a real engine with the demo model, whose processes are killed."""

from typing import Any

import httpx
import openai
import pytest
from support.processes.stack import Stack
from support.processes.waiting import wait_until

LIMIT_S = 60.0
ASKED: Any = {"model": "demo", "input": "Tell me a story.", "temperature": 0.8}
LONG: Any = {**ASKED, "max_output_tokens": 200, "extra_body": {"seed": 3, "min_tokens": 200}}


@pytest.mark.timeout(180)
def test_a_response_outlives_its_engine_and_its_gateway(demo_stack: Stack, demo_client: openai.OpenAI) -> None:
    undisturbed = demo_client.responses.create(**LONG)
    gateway = demo_stack.add_gateway()
    wait_until(gateway.has_become_ready, limit_s=LIMIT_S, what="a second gateway")
    other = demo_client.with_options(base_url=f"{gateway.url}/v1")
    events = []
    try:
        for event in other.responses.create(**LONG, background=True, stream=True):
            events.append(event.to_dict())
            if len(events) == 20:
                demo_stack.busiest_engine().kill()
                gateway.kill()
    except (openai.APIError, httpx.HTTPError):
        pass
    assert 20 <= len(events) < 200, "the engine was killed within the response"
    demo_stack.add_engine()
    response_id, seen = events[0]["response"]["id"], next(e for e in reversed(events) if "stream_position" in e)
    rest = demo_client.responses.retrieve(
        response_id,
        stream=True,
        starting_after=events[-1]["sequence_number"],
        extra_headers={"Last-Event-ID": seen["stream_position"]},
    )
    events += [event.to_dict() for event in rest]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert (events[-1]["type"], text) == ("response.incomplete", undisturbed.output_text)
    assert demo_client.responses.retrieve(response_id).output_text == text


def test_responses_are_kept_continued_cancelled_and_deleted(demo_client: openai.OpenAI) -> None:
    first = demo_client.responses.create(**ASKED, max_output_tokens=8)
    second = demo_client.responses.create(
        model="demo", input="And then?", previous_response_id=first.id, max_output_tokens=8
    )
    items = demo_client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
    running = demo_client.responses.create(**LONG, background=True)
    ended = demo_client.responses.cancel(running.id)
    assert ended.status == "cancelled"
    demo_client.responses.delete(ended.id)
    with pytest.raises(openai.NotFoundError):
        demo_client.responses.retrieve(ended.id)
