"""The body of an answer that is not streamed: JSON of any texts, and never more memory than it counts."""

import json
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    LogprobEntry,
    SamplingParams,
    TokenIds,
    TokenLogprobs,
    Usage,
)
from pagestream.v1.records_pb2 import (
    API_FORM_CHAT_COMPLETIONS,
    API_FORM_COMPLETIONS,
    AnswerForm,
    ApiForm,
    ChoiceFinish,
    LogEnd,
    LogEntry,
    RequestSpec,
)
from pagestream_gateway.api.openai.requests import writer_of
from pagestream_gateway.api.openai.whole_body import WholeBody
from pagestream_gateway.api.openai.writer import AnswerWriter
from pagestream_gateway.api.runs import Run, split_runs

USAGE = Usage(prompt_tokens=1, completion_tokens=2)
ENDED = ChoiceFinish(reason=FINISH_REASON_STOP, stop_reason='"')


def writer(
    api: ApiForm, *, n: int = 1, echo: list[str] | None = None, logprobs: int | None = None, model: str = 'm"x'
) -> AnswerWriter:
    form = AnswerForm(api=api, created=5, top_logprobs=logprobs or 0, echo_texts=echo or [])
    sampling = SamplingParams(n=n, logprobs=logprobs)
    prompts = [TokenIds(ids=[1])] * max(1, len(echo or []))
    return writer_of(RequestSpec(request_id="r", model=model, prompts=prompts, sampling=sampling, answer=form))


def logprobs_of(text: str, num_best: int) -> TokenLogprobs:
    best = [LogprobEntry(token_id=number, logprob=-1.234567 - number, rank=number, text=text) for number in range(21)]
    return TokenLogprobs(entries=best[: 1 + num_best])


def parsed(body: WholeBody) -> dict[str, object]:
    found: dict[str, object] = json.loads(b"".join(body.parts(LogEnd(usage=USAGE))))
    return found


@given(
    st.sampled_from([API_FORM_CHAT_COMPLETIONS, API_FORM_COMPLETIONS]),
    st.lists(st.tuples(st.integers(0, 2), st.text(max_size=8)), max_size=12),
    st.none() | st.integers(0, 3),
    st.text(max_size=5),
)
def test_any_texts_in_any_order(api: ApiForm, tokens: list[tuple[int, str]], logprobs: int | None, model: str) -> None:
    form = writer(api, n=3, logprobs=logprobs, model=model)
    body = WholeBody(form)
    texts, num_tokens = ["", "", ""], [0, 0, 0]
    for choice, text in tokens:
        found = [] if logprobs is None else [logprobs_of(text, logprobs)]
        body.add(Run(choice, 1, "d", text=text, token_ids=[1], logprobs=found))
        texts[choice] += text
        num_tokens[choice] += 1
    for choice in range(3):
        body.add(Run(choice, 1, "d", finish=ENDED))
    answer = parsed(body)
    assert {name: answer[name] for name in ("id", "created", "model")} == {"id": "r", "created": 5, "model": model}
    shared = ["created", "model", "system_fingerprint", "service_tier"]
    assert list(answer) == ["id", "object", *shared, "choices", "usage"]
    choices = answer["choices"]
    assert isinstance(choices, list)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    chat = api == API_FORM_CHAT_COMPLETIONS
    assert [choice["message"]["content"] if chat else choice["text"] for choice in choices] == texts
    assert {(choice["finish_reason"], choice["stop_reason"]) for choice in choices} == {("stop", '"')}
    for choice, count in zip(choices, num_tokens, strict=True):
        if logprobs is None:
            assert choice["logprobs"] is None
        elif chat:
            assert choice["logprobs"]["refusal"] is None
            assert [len(each["top_logprobs"]) for each in choice["logprobs"]["content"]] == [logprobs] * count
        else:
            assert {name: len(column) for name, column in choice["logprobs"].items()} == dict.fromkeys(
                ("text_offset", "token_logprobs", "tokens", "top_logprobs"), count
            )


def test_each_choice_begins_with_its_echo() -> None:
    body = WholeBody(writer(API_FORM_COMPLETIONS, n=2, echo=["one ", "two "]))
    assert body.num_bytes > 2 * len("one two ")
    body.add(Run(3, 1, "d", text="and", finish=ChoiceFinish(reason=FINISH_REASON_LENGTH)))
    answer = parsed(body)
    choices = answer["choices"]
    assert isinstance(choices, list)
    assert [choice["text"] for choice in choices] == ["one ", "one ", "two ", "two and"]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@settings(max_examples=20)
@given(st.sampled_from([API_FORM_CHAT_COMPLETIONS, API_FORM_COMPLETIONS]), st.text(max_size=20), st.integers(0, 20))
def test_the_size_is_known_before_the_body(api: ApiForm, text: str, num_best: int) -> None:
    of = writer(api, logprobs=num_best)
    body = WholeBody(of)
    empty = body.num_bytes
    run = Run(0, 1, "d", text=text, token_ids=[1], logprobs=[logprobs_of(text, num_best)])
    for _ in range(8):
        body.add(run)
    assert body.num_bytes - empty <= 8 * body.size_of(of, run)
    assert len(b"".join(body.parts(LogEnd(usage=USAGE)))) <= 2 * (empty + 8 * body.size_of(of, run))


def test_a_token_takes_bytes_not_objects() -> None:
    """One gateway process had 2,800 bytes for each of these tokens, and 5 are sent."""
    num_choices, num_steps = 128, 60
    body = WholeBody(writer(API_FORM_CHAT_COMPLETIONS, n=num_choices))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for step in range(num_steps):
            entries = [LogEntry(choice=choice, token_id=7, text=" word") for choice in range(num_choices)]
            for run in split_runs(step * num_choices, entries):
                body.add(run)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    num_tokens = num_choices * num_steps
    assert grown < 8 * num_tokens
    assert body.num_bytes >= grown - 4096
