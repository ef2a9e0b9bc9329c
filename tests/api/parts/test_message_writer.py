"""The events of a message: one answer, however the log is cut and from wherever it is read."""

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from jiter import from_json
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FinishReason,
    SamplingParams,
    TokenIds,
    Usage,
)
from pagestream.v1.records_pb2 import AnswerForm, ChoiceFinish, LogEnd, OutputForm, RequestSpec
from pagestream_gateway.anthropic.answer import MessageWriter, WholeMessage
from pagestream_gateway.streams.events import START, Run, position_after

FORM = OutputForm(tool_format="hermes", tool_names=["f"], reasoning_format="think")
SPEC = RequestSpec(
    request_id="r",
    model="m",
    prompts=[TokenIds(ids=[1, 2, 3])],
    sampling=SamplingParams(stop=["end"]),
    answer=AnswerForm(output=FORM),
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "b"]}}\n</tool_call>'
TEXTS = st.lists(st.sampled_from([CALL, CALL[:-20], "text ", "<", "\n", "é", "{"]), max_size=5).map("".join)


def runs_of(pieces: list[str], *, reason: FinishReason = FINISH_REASON_STOP, stop: str = "") -> list[Run]:
    runs = [Run(0, number, "", text=piece) for number, piece in enumerate(pieces, 1)]
    return [*runs, Run(0, len(runs) + 1, "", finish=ChoiceFinish(reason=reason, stop_reason=stop))]


def end_of(reason: FinishReason = FINISH_REASON_STOP) -> LogEnd:
    return LogEnd(reason=reason, usage=Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=2))


def whole(runs: list[Run], end: LogEnd | None = None) -> dict[str, Any]:
    body = WholeMessage(MessageWriter(SPEC))
    for run in runs:
        body.add(run)
    found: dict[str, Any] = json.loads(b"".join(body.serialize(end or end_of())))
    return found


def lines(writer: MessageWriter, runs: list[Run], *, opening: bool = True) -> list[dict[str, Any]]:
    shown = [writer.opening() if opening else None, *map(writer.chunk, runs)]
    shown.append(writer.usage(end_of(), position_after(Run(0, len(runs) + 1, ""))))
    return [json.loads(line) for each in shown if each is not None for line in each.split("\n")]


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the message as a client does."""
    message: dict[str, Any] = events[0]["message"]
    texts: list[str] = []
    for event in events[1:-2]:
        assert event["index"] == len(message["content"]) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            message["content"].append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            texts[-1] += event["delta"].get("partial_json") or event["delta"].get("text") or event["delta"]["thinking"]
    for block, text in zip(message["content"], texts, strict=True):
        if block["type"] == "tool_use":
            with suppress(ValueError):  # a model may write arguments that are no JSON
                block["input"] = from_json(text.encode(), partial_mode=True)
        else:
            block[block["type"]] = text
    assert events[-1]["type"] == "message_stop"
    message |= events[-2]["delta"]
    message["usage"] |= events[-2]["usage"]
    return message


@given(st.booleans(), TEXTS, st.lists(st.integers(0, 300), max_size=8), st.integers(0, 8))
def test_a_stream_is_the_whole_answer_wherever_it_is_cut(
    has_reasoning: bool, text: str, cuts: list[int], resumed_at: int
) -> None:
    text = f"<think>why</think>{text}" if has_reasoning else text
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    runs = runs_of([text[begin:end] for begin, end in pairwise(places)])
    expected = whole(runs_of([text]))
    assert whole(runs) == expected
    events = lines(MessageWriter(SPEC), runs)
    positions = [event.pop("stream_position", None) for event in events]
    assert folded(json.loads(json.dumps(events))) == expected
    known = [number for number, position in enumerate(positions) if position]
    number = known[min(resumed_at, len(known) - 2)]
    assert positions[0] == START.event_id("r")
    index = int(str(positions[number]).split("/")[1])
    again = MessageWriter(SPEC)
    for run in runs[:index]:
        again.skip(run)
    rest = lines(again, runs[index:], opening=False)
    for event in rest:
        event.pop("stream_position", None)
    assert rest == events[number + 1 :]


def test_why_an_answer_ends() -> None:
    call = [CALL]
    found = [
        whole(runs_of(pieces, reason=reason, stop=stop))
        for pieces, reason, stop in (
            (["a"], FINISH_REASON_STOP, ""),
            (["a"], FINISH_REASON_STOP, "17"),
            (["a"], FINISH_REASON_STOP, "end"),
            (["a"], FINISH_REASON_LENGTH, ""),
            (call, FINISH_REASON_STOP, ""),
            ([CALL[:-20]], FINISH_REASON_STOP, "end"),
            (call, FINISH_REASON_LENGTH, ""),
        )
    ]
    found.append(whole([], end_of(FINISH_REASON_CANCELLED)))
    assert [(each["stop_reason"], each["stop_sequence"]) for each in found] == [
        ("end_turn", None),
        ("end_turn", None),
        ("stop_sequence", "end"),
        ("max_tokens", None),
        ("tool_use", None),
        ("stop_sequence", "end"),
        ("max_tokens", None),
        ("cancelled", None),
    ]


def test_usage_tells_what_was_cached_apart() -> None:
    usage = whole(runs_of(["a"]))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (5, 4, 2)


def test_a_call_that_was_cut_off_has_the_arguments_so_far() -> None:
    named = RequestSpec(answer=AnswerForm(output=OutputForm(tool_format="named", tool_names=["f"])))
    for text, expected in (('{"a": [1, {"b": ', {"a": [1, {}]}), ('{"a": tru', {}), ("", None), ("[1]", {})):
        body = WholeMessage(MessageWriter(named))
        for run in runs_of([text], reason=FINISH_REASON_LENGTH):
            body.add(run)
        content = json.loads(b"".join(body.serialize(end_of())))["content"]
        assert [block["input"] for block in content] == ([] if expected is None else [expected])


def test_ids_are_as_the_models_template_takes_them() -> None:
    """Nine letters and digits for Mistral's, also where an earlier version's record doesn't say whose calls it has."""
    for form, own, is_short in (
        ("required", "mistral", True),
        ("named", "mistral", True),
        ("required", "", True),
        ("required", "hermes", False),
    ):
        output = OutputForm(tool_format=form, tool_names=["f"], own_format=own)
        body = WholeMessage(MessageWriter(RequestSpec(answer=AnswerForm(output=output))))
        for run in runs_of(['[{"name": "f", "parameters": {}}]']):
            body.add(run)
        [block] = json.loads(b"".join(body.serialize(end_of())))["content"]
        assert (len(block["id"]) == 9 and block["id"].isalnum()) is is_short
        assert block["id"].startswith("call_") is not is_short
