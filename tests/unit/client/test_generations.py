"""Chunks as dataclasses, and answers put together from them."""

from pagestream.v1 import inference_pb2 as api
from pagestream_client import Choice, Chunk, FinishReason, Logprob, Usage, put_together
from pagestream_client.grpc.messages import chunk_of, finish_reason_from_proto


def chunk(choice: int, ids: list[int], text: str, **fields: object) -> Chunk:
    return chunk_of(api.TokenChunk(request_id="id", choice=choice, token_ids=ids, text=text, **fields))  # type: ignore[arg-type]


def test_a_message_keeps_all_its_fields() -> None:
    entry = api.LogprobEntry(token_id=3, logprob=-0.5, rank=1, text="x")
    made = chunk(1, [3], "x", next_index=4, digest="d", logprobs=[api.TokenLogprobs(entries=[entry])], stop_reason="s")
    assert made.logprobs == ((Logprob(3, -0.5, 1, "x"),),)
    assert (made.next_index, made.digest, made.stop_reason, made.usage, made.error) == (4, "d", "s", None, None)


def test_every_reason_of_the_wire_contract_has_a_word() -> None:
    words = [finish_reason_from_proto(value) for value in api.FinishReason.values()]
    assert words == [None, *FinishReason]
    assert finish_reason_from_proto(77) is FinishReason.ERROR


def test_choices_are_separated_and_the_end_belongs_to_none() -> None:
    answer = put_together(
        [
            chunk(1, [7], "B"),
            chunk(0, [5, 6], "ab"),
            chunk(1, [], "", finish_reason=api.FINISH_REASON_STOP, stop_reason="x"),
            chunk(0, [8], "c", finish_reason=api.FINISH_REASON_LENGTH),
            chunk(0, [], "", usage=api.Usage(prompt_tokens=1, completion_tokens=4, cached_tokens=1)),
        ]
    )
    assert answer.choices == (
        Choice(0, (5, 6, 8), "abc", (), FinishReason.LENGTH, ""),
        Choice(1, (7,), "B", (), FinishReason.STOP, "x"),
    )
    assert (answer.request_id, answer.text, answer.usage) == ("id", "abc", Usage(1, 4, 1))


def test_an_answer_without_chunks_is_empty() -> None:
    answer = put_together([])
    assert (answer.request_id, answer.text, answer.choices, answer.usage) == ("", "", (), None)
