"""From a caller's arguments to what the engine is asked, and from chunks to an answer."""

from typing import Any

import pytest
from pagestream.v1 import inference_pb2 as api
from pagestream_client import (
    AsyncClient,
    Choice,
    Chunk,
    FinishReason,
    InvalidRequest,
    SamplingOptions,
    Usage,
    put_together,
)
from support.engines.synthetic_engine import MODEL, SyntheticEngine, byte_tokenizer

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]


async def test_every_sampling_field_of_the_wire_contract_has_an_option() -> None:
    assert set(SamplingOptions.__annotations__) == set(api.SamplingParams.DESCRIPTOR.fields_by_name)
    assert [reason.name for reason in FinishReason] == [
        name.removeprefix("FINISH_REASON_") for name in api.FinishReason.keys()[1:]
    ]


async def test_options_are_written_and_unset_ones_are_the_gateways(
    client: AsyncClient, engine: SyntheticEngine
) -> None:
    asked: dict[str, Any] = {"stop": "end", "stop_token_ids": [30, 40], "logit_bias": {5: -1.5}, "logprobs": 0}
    await client.generate(MODEL, "x", max_tokens=2, temperature=0.0, seed=None, **asked).collect()
    await client.generate(MODEL, "x", max_tokens=2, priority=1, client_request_id="mine").collect()
    first, second = engine.claimed
    sampling = first.sampling
    assert (sampling.temperature, sampling.HasField("logprobs"), sampling.top_p) == (0.0, True, 1.0)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["end"], [30, 40])
    assert dict(sampling.logit_bias) == {5: -1.5}
    assert (second.sampling.temperature, second.sampling.HasField("logprobs")) == (1.0, False)
    assert (second.priority, second.client_request_id) == (1, "mine")
    assert first.idempotency_key != second.idempotency_key
    assert first.idempotency_key
    assert second.on_disconnect == api.ON_DISCONNECT_CANCEL
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    begun = [*messages, {"role": "assistant", "content": "It"}]
    kept = client.generate(MODEL, messages=begun, continue_final_message=True, max_tokens=2, on_disconnect="continue")
    await kept.collect()
    assert engine.claimed[-1].on_disconnect == api.ON_DISCONNECT_CONTINUE
    text = byte_tokenizer().decode(list(engine.claimed[-1].prompts[0].ids), skip_special_tokens=False)
    assert text == "<s>[system]s</s>[user]u</s>[assistant]It"


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("input", {}),
    ("input", {"prompt": "a", "prompt_token_ids": [1]}),
    ("prompt", {"prompt": 7}),
    ("prompt_token_ids", {"prompt_token_ids": [-1]}),
    ("messages.1.tool", {"messages": [{"role": "user"}, {"tool": "x"}]}),
    ("messages.0.content", {"messages": [{"content": None}]}),
    ("temperature", {"prompt": "a", "temperature": "hot"}),
    ("n", {"prompt": "a", "n": -1}),
    ("stop", {"prompt": "a", "stop": [1]}),
    ("logit_bias", {"prompt": "a", "logit_bias": {"a": 1}}),
]


async def test_what_cannot_be_sent_is_named(client: AsyncClient, engine: SyntheticEngine) -> None:
    for field, given in WRONG:
        with pytest.raises(InvalidRequest) as caught:
            await client.generate("demo", **given).collect()
        assert caught.value.field == field
    with pytest.raises(TypeError, match="'max_token' is no sampling option"):
        await client.generate("demo", "x", max_token=3).collect()  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest, match="'cancel' or 'continue'"):
        await client.generate("demo", "x", on_disconnect="explode").collect()  # type: ignore[arg-type]
    assert not engine.claimed


def chunk(choice: int, ids: tuple[int, ...], text: str, **fields: Any) -> Chunk:
    unset = {"logprobs": (), "finish_reason": None, "stop_reason": "", "usage": None, "error": None}
    return Chunk(
        request_id="id", next_index=0, digest="", choice=choice, token_ids=ids, text=text, **{**unset, **fields}
    )


async def test_choices_are_separated_and_the_end_belongs_to_none() -> None:
    answer = put_together(
        [
            chunk(1, (7,), "B"),
            chunk(0, (5, 6), "ab"),
            chunk(1, (), "", finish_reason=FinishReason.STOP, stop_reason="x"),
            chunk(0, (8,), "c", finish_reason=FinishReason.LENGTH),
            chunk(0, (), "", usage=Usage(1, 4, 1)),
        ]
    )
    assert answer.choices == (
        Choice(0, (5, 6, 8), "abc", (), FinishReason.LENGTH, ""),
        Choice(1, (7,), "B", (), FinishReason.STOP, "x"),
    )
    assert (answer.request_id, answer.text, answer.usage) == ("id", "abc", Usage(1, 4, 1))
    empty = put_together([])
    assert (empty.request_id, empty.text, empty.choices, empty.usage) == ("", "", (), None)
