import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import FINISH_REASON_DEADLINE, FINISH_REASON_STOP, SamplingParams, TokenIds, Usage
from pagestream.v1.records_pb2 import (
    API_FORM_CHAT_COMPLETIONS,
    API_FORM_COMPLETIONS,
    API_FORM_GRPC,
    AnswerForm,
    ApiForm,
    ChoiceFinish,
    LogEnd,
    RequestSpec,
)
from pagestream_gateway.api.openai.position import Position
from pagestream_gateway.api.openai.requests import writer_of
from pagestream_gateway.api.openai.writer import AnswerWriter
from pagestream_gateway.api.runs import Run


def writer(api: ApiForm, *, n: int = 1, include_usage: bool = False, echo: list[str] | None = None) -> AnswerWriter:
    form = AnswerForm(api=api, created=5, include_usage=include_usage, echo_texts=echo or [])
    return writer_of(
        RequestSpec(request_id="r", model='m"x', prompts=[TokenIds(ids=[1])], sampling=SamplingParams(n=n), answer=form)
    )


@given(st.text(), st.integers(0, 5))
def test_any_text_survives(text: str, choice: int) -> None:
    run = Run(choice, 1, "d", text=text, token_ids=[1])
    chat = json.loads(writer(API_FORM_CHAT_COMPLETIONS).chunk(run))
    assert chat["choices"] == [{"index": choice, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    assert chat["stream_position"] == "r/1/d"
    assert (chat["object"], chat["model"], chat["id"], chat["created"]) == ("chat.completion.chunk", 'm"x', "r", 5)
    completion = json.loads(writer(API_FORM_COMPLETIONS).chunk(run))
    assert completion["choices"] == [{"index": choice, "text": text, "logprobs": None, "finish_reason": None}]
    assert "usage" not in completion


def test_finishes() -> None:
    run = Run(0, 1, "d", finish=ChoiceFinish(reason=FINISH_REASON_STOP, stop_reason='"'))
    [choice] = json.loads(writer(API_FORM_CHAT_COMPLETIONS).chunk(run))["choices"]
    assert choice == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": '"'}
    run = Run(0, 1, "d", text="held", finish=ChoiceFinish(reason=FINISH_REASON_DEADLINE))
    [choice] = json.loads(writer(API_FORM_CHAT_COMPLETIONS).chunk(run))["choices"]
    assert (choice["delta"], choice["finish_reason"], choice["stop_reason"]) == ({"content": "held"}, "deadline", None)


@pytest.mark.parametrize(("given", "shown"), [("17", 17), ("18", "18"), ("end", "end"), ("", None)])
def test_a_stop_token_is_a_number_and_a_stop_string_a_string(given: str, shown: int | str | None) -> None:
    made = writer(API_FORM_COMPLETIONS)
    made.spec.sampling.stop.append("18")
    finish = ChoiceFinish(reason=FINISH_REASON_STOP, stop_reason=given)
    [choice] = json.loads(made.chunk(Run(0, 1, "d", finish=finish)))["choices"]
    assert choice["stop_reason"] == made.whole_choice(0, "", finish)["stop_reason"] == shown


def test_the_fingerprint_is_shown_once_it_is_known() -> None:
    made = writer(API_FORM_CHAT_COMPLETIONS)
    assert json.loads(made.opening() or "")["system_fingerprint"] is None
    made.set_fingerprint("f")
    chunks = [made.opening() or "", made.chunk(Run(0, 1, "d", text="x")), made.again().chunk(Run(0, 1, "d"))]
    assert {json.loads(chunk)["system_fingerprint"] for chunk in chunks} == {"f"}
    assert made.whole(Usage())["system_fingerprint"] == "f"


def test_usage_only_where_it_was_asked_for() -> None:
    end = LogEnd(usage=Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=2))
    assert writer(API_FORM_COMPLETIONS).usage(end, Position(5, "d")) is None
    asked = writer(API_FORM_COMPLETIONS, include_usage=True)
    body = json.loads(asked.usage(end, Position(5, "d")) or "")
    assert (body["choices"], body["stream_position"]) == ([], "r/5/d")
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert json.loads(asked.chunk(Run(0, 1, "d")))["usage"] is None


def test_openings() -> None:
    opening = json.loads(writer(API_FORM_CHAT_COMPLETIONS, n=2).opening() or "")
    assert opening["stream_position"] == "r/0/"
    roles = opening["choices"]
    assert [(choice["index"], choice["delta"]["role"]) for choice in roles] == [(0, "assistant"), (1, "assistant")]
    echo = json.loads(writer(API_FORM_COMPLETIONS, n=2, echo=["p"]).opening() or "")["choices"]
    assert [(choice["index"], choice["text"]) for choice in echo] == [(0, "p"), (1, "p")]
    assert writer(API_FORM_COMPLETIONS).opening() is None


def test_what_came_over_grpc_reads_as_a_completion() -> None:
    assert json.loads(writer(API_FORM_GRPC).chunk(Run(0, 1, "d", text="x")))["object"] == "text_completion"
