"""Writers of answers in OpenAI's form: any texts, however the log came and from wherever it is read."""

import json
import tracemalloc
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import (
    FINISH_REASON_DEADLINE,
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
    API_FORM_GRPC,
    AnswerForm,
    ApiForm,
    ChoiceFinish,
    LogEnd,
    LogEntry,
    OutputForm,
    RequestSpec,
)
from pagestream_gateway.openai.generation import AnswerWriter, ChatLogprobs, CompletionLogprobs, WholeBody
from pagestream_gateway.openai.responses.answer import ResponseOutput
from pagestream_gateway.streams.events import Position, Run, split_runs
from pagestream_gateway.streams.requests import writer_of
from pagestream_grammars import TokenTable
from tokenizers import AddedToken, Tokenizer, decoders, models


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
    for api in (API_FORM_CHAT_COMPLETIONS, API_FORM_COMPLETIONS):
        before, after = writer(api).around_text(choice) or ("", "")
        assert f'{before}{json.dumps(text)}{after}1/d"}}' == writer(api).chunk(run)


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
    answer = json.loads(b"".join(body.serialize(LogEnd())))
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
        answer = json.loads(b"".join(body.serialize(end)))
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


def spec(api: ApiForm, *, logprobs: int | None, n: int = 1, echo: list[str] | None = None) -> RequestSpec:
    form = AnswerForm(api=api, top_logprobs=logprobs or 0, echo_texts=echo or [])
    sampling = SamplingParams(n=n, logprobs=logprobs)
    return RequestSpec(request_id="r", prompts=[TokenIds(ids=[1])], sampling=sampling, answer=form)


def token(*entries: tuple[str, float]) -> TokenLogprobs:
    return TokenLogprobs(
        entries=[LogprobEntry(token_id=i, text=text, logprob=logprob) for i, (text, logprob) in enumerate(entries)]
    )


def run(text: str, *tokens: TokenLogprobs, choice: int = 0) -> Run:
    return Run(choice, 1, "d", text=text, token_ids=[0] * len(tokens), logprobs=list(tokens))


def test_chat_lists_tokens_with_their_rivals() -> None:
    writer = ChatLogprobs(spec(API_FORM_CHAT_COMPLETIONS, logprobs=2))
    written = writer.write(run("\u00e9", token(("\u00e9", -0.5), ("\u00e9", -0.5), ("b", -inf))))
    assert written == {
        "content": [
            {
                "token": "\u00e9",
                "logprob": -0.5,
                "bytes": [0xC3, 0xA9],
                "top_logprobs": [
                    {"token": "\u00e9", "logprob": -0.5, "bytes": [0xC3, 0xA9]},
                    {"token": "b", "logprob": -9999.0, "bytes": [98]},
                ],
            }
        ],
        "refusal": None,
    }


def byte_table() -> TokenTable:
    """Return one of Llama 2's form, with a token for each byte of é."""
    tokenizer = Tokenizer(
        models.BPE({"<0xC3>": 0, "<0xA9>": 1, "<s>": 2, "▁": 3, "Caf": 4, "▁Caf": 5, "▁ok": 6, "</s>": 7}, [])
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return TokenTable(tokenizer)


BYTES = byte_table()


def test_a_part_of_a_character_has_its_own_bytes() -> None:
    writer = ChatLogprobs(spec(API_FORM_CHAT_COMPLETIONS, logprobs=1))
    half = run("", token(("\ufffd", -1.0), ("a", -2.0)))

    def shown() -> tuple[object, object]:
        written = writer.write(half)
        assert written is not None
        [content] = written["content"]
        return content["bytes"], content["top_logprobs"][0]["bytes"]

    assert shown() == (None, [97]), "unknown"
    writer.tokens = BYTES
    assert shown() == ([0xC3], [97])


def test_completions_tell_where_each_token_stands() -> None:
    writer = CompletionLogprobs(spec(API_FORM_COMPLETIONS, logprobs=1, n=2, echo=["prompt"]))
    first = writer.write(run("ab", token(("a", -1.0), ("x", -0.5)), token(("b", -2.0), ("b", -2.0))))
    assert first == {
        "text_offset": [6, 7],
        "token_logprobs": [-1.0, -2.0],
        "tokens": ["a", "b"],
        "top_logprobs": [{"x": -0.5, "a": -1.0}, {"b": -2.0}],
    }
    other = writer.write(run("c", token(("c", -3.0), ("c", -3.0)), choice=1))
    assert other is not None
    assert other["text_offset"] == [6]
    then = writer.write(run("d", token(("d", -3.0), ("d", -3.0))))
    assert then is not None
    assert then["text_offset"] == [8]


# Shown text and the token's own: bytes of a character over two tokens, and text held back while it may be a stop.
LOG = [("Caf", "Caf"), ("", "\ufffd"), ("\u00e9", "\ufffd"), (" ok", " ok"), ("", "\n"), ("\nB", "B")]


@pytest.mark.parametrize(
    ("echo", "sizes", "num_read"),
    [([], [1] * 6, 0), (["prompt"], [6], 0), (["prompt"], [2, 4], 1), ([], [4, 1, 1], 3), (["prompt"], [1] * 6, 3)],
)
def test_offsets_do_not_depend_on_how_the_log_came(echo: list[str], sizes: list[int], num_read: int) -> None:
    log = [LogEntry(token_id=1, text=shown, digest="d", logprobs=token((own, -1.0))) for shown, own in LOG]
    writer = writer_of(spec(API_FORM_COMPLETIONS, logprobs=0, echo=echo))
    for each in split_runs(0, log[:num_read]):
        writer.skip(each)
    offsets, index = [], num_read
    for size in sizes:
        for each in split_runs(index, log[index : index + size]):
            offsets += json.loads(writer.chunk(each))["choices"][0]["logprobs"]["text_offset"]
        index += size
    begin = len("".join(echo))
    assert offsets == [begin + offset for offset in (0, 3, 4, 5, 8, 9)][num_read:]


def offsets_of(token_ids: list[int], echo: str, *, hides: bool = True) -> list[int]:
    """Return the offsets of a prompt that is echoed, and then of an output of the same tokens."""
    entries = [
        LogprobEntry(token_id=each, logprob=-1.0, text=BYTES.spelled(each).decode(errors="replace"))
        for each in token_ids
    ]
    form = AnswerForm(api=API_FORM_COMPLETIONS, echo_texts=[echo], echo_logprobs=True, first_tokens=[entries[0].text])
    sampling = SamplingParams(logprobs=0, skip_special_tokens=hides)
    asked = RequestSpec(request_id="r", prompts=[TokenIds(ids=token_ids)], sampling=sampling, answer=form)
    writer = CompletionLogprobs(asked)
    writer.tokens = BYTES
    rows = [TokenLogprobs(entries=[each]) for each in entries]
    prompt = Run(0, 1, "d", prompt_logprobs=rows[1:], prompt_end=len(rows) - 1)
    parts = [writer.first(0), writer.echoed(prompt, 0), writer.write(run("", *rows))]
    return [offset for part in parts if part is not None for offset in part["text_offset"]]


@pytest.mark.parametrize(
    ("token_ids", "echo", "of_prompt", "of_output"),
    [
        # <s>, the space before a text, and the parts of é have no characters of their own.
        ([2, 5, 0, 1, 6], "Café ok", [0, 0, 3, 3, 4], [0, 0, 4, 4, 5]),
        ([2, 3, 4, 6], "Caf ok", [0, 0, 0, 3], [0, 0, 1, 4]),
        ([5, 7, 6], "Caf</s> ok", [0, 3, 7], [0, 4, 4]),
        ([2, 2, 4, 7], "<s>Caf", [0, 3, 3, 6], [0, 0, 0, 3]),
        ([4, 6], "CAF ok", [0, 3], [0, 3]),
        ([4, 6], "Caf\u00a0\u00a0 ok", [0, 5], [0, 3]),
    ],
)
def test_offsets_are_places_of_the_text_that_is_shown(
    token_ids: list[int], echo: str, of_prompt: list[int], of_output: list[int]
) -> None:
    assert offsets_of(token_ids, echo) == of_prompt + [len(echo) + offset for offset in of_output]


def test_special_tokens_that_are_shown_have_a_place() -> None:
    assert offsets_of([2, 4, 7, 6], "<s>Caf</s> ok", hides=False) == [0, 3, 6, 10, 13, 16, 19, 23]


def test_a_reader_that_comes_back_sees_the_same_offsets() -> None:
    asked = spec(API_FORM_COMPLETIONS, logprobs=0)
    runs = [run(text, token((text, -1.0))) for text in ("one", " two", " three")]
    through = writer_of(asked)
    chunks = [through.chunk(each) for each in runs]
    again = writer_of(asked)
    assert again.needs_history
    for each in runs[:2]:
        again.skip(each)
    assert again.chunk(runs[2]) == chunks[2]
    assert json.loads(chunks[2])["choices"][0]["logprobs"]["text_offset"] == [7]
    assert not writer_of(spec(API_FORM_CHAT_COMPLETIONS, logprobs=0)).needs_history


USAGE = Usage(prompt_tokens=1, completion_tokens=2)
QUOTED_END = ChoiceFinish(reason=FINISH_REASON_STOP, stop_reason='"')


def quoted_writer(
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
    found: dict[str, object] = json.loads(b"".join(body.serialize(LogEnd(usage=USAGE))))
    return found


@given(
    st.sampled_from([API_FORM_CHAT_COMPLETIONS, API_FORM_COMPLETIONS]),
    st.lists(st.tuples(st.integers(0, 2), st.text(max_size=8)), max_size=12),
    st.none() | st.integers(0, 3),
    st.text(max_size=5),
)
def test_any_texts_in_any_order(api: ApiForm, tokens: list[tuple[int, str]], logprobs: int | None, model: str) -> None:
    form = quoted_writer(api, n=3, logprobs=logprobs, model=model)
    body = WholeBody(form)
    texts, num_tokens = ["", "", ""], [0, 0, 0]
    for choice, text in tokens:
        found = [] if logprobs is None else [logprobs_of(text, logprobs)]
        body.add(Run(choice, 1, "d", text=text, token_ids=[1], logprobs=found))
        texts[choice] += text
        num_tokens[choice] += 1
    for choice in range(3):
        body.add(Run(choice, 1, "d", finish=QUOTED_END))
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


@settings(max_examples=20)
@given(st.sampled_from([API_FORM_CHAT_COMPLETIONS, API_FORM_COMPLETIONS]), st.text(max_size=20), st.integers(0, 20))
def test_the_size_is_known_before_the_body(api: ApiForm, text: str, num_best: int) -> None:
    of = quoted_writer(api, logprobs=num_best)
    body = WholeBody(of)
    empty = body.num_bytes
    run = Run(0, 1, "d", text=text, token_ids=[1], logprobs=[logprobs_of(text, num_best)])
    for _ in range(8):
        body.add(run)
    assert body.num_bytes - empty <= 8 * body.size_of(of, run)
    assert len(b"".join(body.serialize(LogEnd(usage=USAGE)))) <= 2 * (empty + 8 * body.size_of(of, run))


def test_a_token_takes_bytes_not_objects() -> None:
    """One gateway process had 2,800 bytes for each of these tokens, and 5 are sent."""
    num_choices, num_steps = 128, 60
    body = WholeBody(quoted_writer(API_FORM_CHAT_COMPLETIONS, n=num_choices))
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


REASONED = ("<think>", "Hm", ".", "</think>", "Yes", "!")


@pytest.mark.parametrize("hides", [False, True])
def test_reasoning_that_is_left_out_is_counted_and_leaves_no_log_probabilities(hides: bool) -> None:
    form = OutputForm(reasoning_format="think", hides_reasoning=hides)
    spec = RequestSpec(request_id="r", sampling=SamplingParams(logprobs=0), answer=AnswerForm(output=form))
    output = ResponseOutput(spec, ChatLogprobs(spec))
    for number, text in enumerate(REASONED, 1):
        logprobs = [TokenLogprobs(entries=[LogprobEntry(token_id=number, logprob=-1.0, text=text)])]
        output.feed(Run(0, number, "d", text, [number], logprobs))
    output.close_open_item()
    assert [item["type"] for item in output.items] == (["message"] if hides else ["reasoning", "message"])
    part = output.items[-1]["content"][0]
    assert part["text"] == "Yes!"
    assert [each["token"] for each in part["logprobs"]] == ["Yes", "!"]
    assert output.num_reasoning_tokens == 4


ENTRY = st.tuples(st.integers(0, 2), st.booleans())


def entry(number: int, choice: int, finishes: bool) -> LogEntry:
    if finishes:
        return LogEntry(choice=choice, digest=f"d{number}", text="!", finish=ChoiceFinish(reason=FINISH_REASON_STOP))
    return LogEntry(choice=choice, digest=f"d{number}", text=f"{number} ", token_id=number)


@given(st.integers(0, 1000), st.lists(ENTRY, max_size=30), st.booleans())
def test_runs_are_the_entries_in_order(first_index: int, kinds: list[tuple[int, bool]], ends: bool) -> None:
    entries = [entry(number, *kind) for number, kind in enumerate(kinds)]
    if ends:
        entries.append(LogEntry(digest="end", end=LogEnd(reason=FINISH_REASON_STOP)))
    runs = split_runs(first_index, entries)
    seen = first_index
    for run in runs:
        covered = entries[seen - first_index : run.next_index - first_index]
        assert covered
        assert run.digest == covered[-1].digest
        if run.end is not None:
            assert len(covered) == 1
        else:
            assert {each.choice for each in covered} == {run.choice}
            assert run.text == "".join(each.text for each in covered)
            assert run.token_ids == [each.token_id for each in covered if each.HasField("token_id")]
            assert [each.HasField("finish") for each in covered[:-1]] == [False] * (len(covered) - 1)
            assert (run.finish is not None) == covered[-1].HasField("finish")
        seen = run.next_index
    assert seen == first_index + len(entries)


def test_neighbours_of_one_choice_are_one_run() -> None:
    runs = split_runs(4, [entry(0, 1, False), entry(1, 1, False), entry(2, 1, True), entry(3, 0, False)])
    assert [(run.choice, run.text, run.next_index) for run in runs] == [(1, "0 1 !", 7), (0, "3 ", 8)]
