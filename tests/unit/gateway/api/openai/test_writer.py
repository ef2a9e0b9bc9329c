import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_DEADLINE,
    FINISH_REASON_STOP,
    SamplingParams,
    TokenIds,
    TokenLogprobs,
    Usage,
)
from pagestream.v1.records_pb2 import (
    API_FORM_CHAT_COMPLETIONS,
    API_FORM_COMPLETIONS,
    API_FORM_GRPC,
    AnswerForm,
    ApiForm,
    ChoiceFinish,
    LogEnd,
    LogEntry,
    OutputForm,
    RequestSpec,
)
from pagestream_gateway.api.openai.position import Position
from pagestream_gateway.api.openai.requests import writer_of
from pagestream_gateway.api.openai.whole_body import WholeBody
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


ENDED = ChoiceFinish(reason=FINISH_REASON_STOP)
RUNS = [
    Run(0, 1, "d", text="a", token_ids=[11]),
    Run(1, 2, "d", text="b", token_ids=[21, 22]),
    Run(0, 3, "d", text="c", token_ids=[12], finish=ENDED),
    Run(1, 4, "d", finish=ENDED),
]
APIS = [API_FORM_CHAT_COMPLETIONS, API_FORM_COMPLETIONS]


def with_form(api: ApiForm, **form: object) -> AnswerWriter:
    answer = AnswerForm(api=api, include_usage=True, **form)  # type: ignore[arg-type]
    prompts = [TokenIds(ids=[7, 8, 9])]
    return writer_of(RequestSpec(request_id="r", prompts=prompts, sampling=SamplingParams(n=2), answer=answer))


def chunks(made: AnswerWriter, runs: list[Run]) -> list[dict[str, object]]:
    return [json.loads(made.chunk(run)) for run in runs]


@pytest.mark.parametrize("api", APIS)
def test_each_chunk_shows_the_usage_of_its_choice_also_for_who_reads_on(api: ApiForm) -> None:
    made = with_form(api, continuous_usage=True)
    shown = chunks(made, RUNS)
    usages = [{"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count} for count in (1, 2, 2, 2)]
    assert [chunk["usage"] for chunk in shown] == usages
    resumed = with_form(api, continuous_usage=True)
    assert resumed.needs_history
    for run in RUNS[:2]:
        resumed.skip(run)
    assert chunks(resumed, RUNS[2:]) == shown[2:]


@pytest.mark.parametrize("api", APIS)
def test_token_ids_are_shown_in_chunks_and_in_whole_answers(api: ApiForm) -> None:
    made = with_form(api, token_ids=True)
    opening = json.loads(made.opening() or "{}")
    shown = [chunk["choices"][0] for chunk in chunks(made, RUNS)]  # type: ignore[index]
    assert [choice["token_ids"] for choice in shown] == [[11], [21, 22], [12], []]
    body = WholeBody(with_form(api, token_ids=True))
    for run in RUNS:
        body.add(run)
    answer = json.loads(b"".join(body.parts(LogEnd())))
    assert [choice["token_ids"] for choice in answer["choices"]] == [[11, 12], [21, 22]]
    prompt = [7, 8, 9]
    if api == API_FORM_CHAT_COMPLETIONS:
        assert opening["prompt_token_ids"] == answer["prompt_token_ids"] == prompt
    else:
        assert [choice["prompt_token_ids"] for choice in shown] == [prompt, prompt, None, None]
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompt, prompt]
    assert "token_ids" not in str(chunks(with_form(api), RUNS))


def test_a_reader_that_has_read_of_the_prompt_alone_still_gets_its_ids() -> None:
    of_prompt = Run(0, 1, "d", prompt_logprobs=[TokenLogprobs()], prompt_end=2)
    made, resumed = (with_form(API_FORM_COMPLETIONS, token_ids=True, prompt_logprobs=0) for _ in range(2))
    made.chunk(of_prompt)
    resumed.skip(of_prompt)
    assert made.chunk(RUNS[0]) == resumed.chunk(RUNS[0])
    assert '"prompt_token_ids":[7,8,9]' in resumed.chunk(RUNS[1])


def test_tokens_of_reasoning_are_counted_and_reasoning_may_be_left_out() -> None:
    runs = [
        Run(0, 1, "d", text="<think>Hm", token_ids=[1, 2]),
        Run(0, 2, "d", text=".</think>", token_ids=[3, 4]),
        Run(0, 3, "d", text="Yes.", token_ids=[5]),
        Run(0, 4, "d", text="", finish=ENDED),
        Run(1, 5, "d", text="", finish=ENDED),
    ]
    end = LogEnd(usage=Usage(prompt_tokens=3, completion_tokens=5))
    for hides in (False, True):
        made = with_form(APIS[0], output=OutputForm(reasoning_format="think", hides_reasoning=hides))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks(made, runs)]  # type: ignore[index]
        usage = json.loads(made.usage(end, Position(5, "d")) or "")["usage"]
        body = WholeBody(made.again())
        for run in runs:
            body.add(run)
        answer = json.loads(b"".join(body.parts(end)))
        assert usage == answer["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}
        message = answer["choices"][0]["message"]
        assert "".join(delta.get("content", "") for delta in deltas) == message["content"] == "Yes."
        for name in ("reasoning", "reasoning_content"):
            assert "".join(delta.get(name, "") for delta in deltas) == message.get(name, "") == ("" if hides else "Hm.")


@pytest.mark.parametrize("texts", [["<think>", "Hm", ".", "</think>", "Yes", "."], ["\n\n", "Yes", "."]])
def test_tokens_of_reasoning_are_the_same_however_a_log_comes(texts: list[str]) -> None:
    entries = [LogEntry(digest="d", token_id=number, text=text) for number, text in enumerate(texts)]
    counts = set()
    for size in (1, 2, len(entries)):
        made = with_form(APIS[0], output=OutputForm(reasoning_format="think"))
        for first in range(0, len(entries), size):
            for run in made.split(first, entries[first : first + size]):
                made.chunk(run)
        counts.add(made.usage_body(Usage())["completion_tokens_details"]["reasoning_tokens"])
    assert counts == {4 if "Hm" in texts else 0}
