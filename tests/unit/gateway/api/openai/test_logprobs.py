import json
from math import inf

import pytest
from pagestream.v1.inference_pb2 import LogprobEntry, SamplingParams, TokenIds, TokenLogprobs
from pagestream.v1.records_pb2 import (
    API_FORM_CHAT_COMPLETIONS,
    API_FORM_COMPLETIONS,
    AnswerForm,
    ApiForm,
    LogEntry,
    RequestSpec,
)
from pagestream_gateway.api.openai.logprobs import ChatLogprobs, CompletionLogprobs
from pagestream_gateway.api.openai.requests import writer_of
from pagestream_gateway.api.runs import Run, split_runs


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


def test_chat_without_rivals_lists_none() -> None:
    written = ChatLogprobs(spec(API_FORM_CHAT_COMPLETIONS, logprobs=0)).write(run("a", token(("a", -1.0))))
    assert written is not None
    assert written["content"][0]["top_logprobs"] == []


def test_a_part_of_a_character_has_its_own_bytes() -> None:
    writer = ChatLogprobs(spec(API_FORM_CHAT_COMPLETIONS, logprobs=1))
    half = run("", token(("\ufffd", -1.0), ("a", -2.0)))

    def shown() -> tuple[object, object]:
        written = writer.write(half)
        assert written is not None
        [content] = written["content"]
        return content["bytes"], content["top_logprobs"][0]["bytes"]

    assert shown() == (None, [97]), "unknown"
    writer.token_bytes = {0: b"\xc3"}.get
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


@pytest.mark.parametrize("echo", [[], ["prompt"]])
@pytest.mark.parametrize("sizes", [[1] * 6, [6], [2, 4], [4, 1, 1]])
@pytest.mark.parametrize("num_read", [0, 1, 3])
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


def test_nothing_is_shown_unasked() -> None:
    writer = CompletionLogprobs(spec(API_FORM_COMPLETIONS, logprobs=None))
    assert writer.write(run("a", token(("a", -1.0)))) is None
    assert writer.lists(None) == {}


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
