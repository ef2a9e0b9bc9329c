"""Log probabilities of prompts and echoes, through a gateway and an engine as processes, by the official client."""

from functools import cache
from typing import Any

import grpc
import httpx
import openai
import pytest
import torch
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2_grpc import InferenceStub
from support.processes.stack import DEMO_MODEL, Stack
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(180)
MODEL = "demo"
PROMPT = "The miller of the village has two sons, and the mill stands by the river."
TOLERANCE = 2e-3
"""Of log probabilities, in float32."""


def encode(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids
    return ids


@cache
def expected(ids: tuple[int, ...]) -> torch.Tensor:
    """Return the log probabilities of `transformers`: (tokens, vocabulary)."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    with torch.inference_mode():
        logprobs: torch.Tensor = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logprobs


def check(rows: list[dict[str, Any] | None], ids: list[int], count: int) -> None:
    """Compare vLLM's `prompt_logprobs` with the reference's log softmax."""
    assert rows[0] is None
    assert len(rows) == len(ids)
    for token_id, row, logprobs in zip(ids[1:], rows[1:], expected(tuple(ids)), strict=False):
        assert row is not None
        assert next(iter(row)) == str(token_id)
        assert row[str(token_id)]["logprob"] == pytest.approx(logprobs[token_id].item(), abs=TOLERANCE)
        likeliest = sorted((each["logprob"] for each in row.values()), reverse=True)[:count]
        torch.testing.assert_close(torch.tensor(likeliest), logprobs.topk(count).values, atol=TOLERANCE, rtol=0.0)
        assert {"logprob", "rank", "decoded_token"} == row[str(token_id)].keys()


def test_completions_show_them_for_each_choice(demo_client: openai.OpenAI) -> None:
    answer = demo_client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=3, n=2, seed=1, extra_body={"prompt_logprobs": 2, "ignore_eos": True}
    )
    for choice in answer.choices:
        check(choice.model_extra["prompt_logprobs"], encode(PROMPT), 2)  # type: ignore[index]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


def test_chats_show_them_once(demo_client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Who is the miller?"}]
    asked: Any = {"model": MODEL, "messages": messages, "max_tokens": 2, "extra_body": {"prompt_logprobs": 1}}
    answer = demo_client.chat.completions.create(**asked)
    assert answer.usage is not None
    rows = answer.model_extra["prompt_logprobs"]  # type: ignore[index]
    ids = [int(next(iter(row))) for row in rows[1:]]
    assert len(rows) == answer.usage.prompt_tokens
    streamed = [chunk.model_extra or {} for chunk in demo_client.chat.completions.create(**asked, stream=True)]
    assert [row for chunk in streamed for row in chunk.get("prompt_logprobs") or []] == rows
    text = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).decode(ids, skip_special_tokens=False)
    assert "Who is the miller?" in text


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_an_echo_has_those_of_the_prompt(demo_client: openai.OpenAI, max_tokens: int) -> None:
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "echo": True, "logprobs": 2, "n": 2}
    asked["extra_body"] = {"ignore_eos": True}
    answer = demo_client.completions.create(**asked, seed=1)
    ids = encode(PROMPT)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * max_tokens
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert choice.text.startswith(PROMPT)
        assert max_tokens or choice.text == PROMPT  # what is generated may be special tokens, which have no text
        assert len(logprobs.tokens or ()) == len(ids) + max_tokens
        assert "".join((logprobs.tokens or [])[1 : len(ids)]) == PROMPT  # the first is the tokenizer's own
        assert logprobs.token_logprobs[0] is None
        assert (logprobs.text_offset or [])[:2] == [0, len((logprobs.tokens or [""])[0])]
        got = torch.tensor(logprobs.token_logprobs[1 : len(ids)])
        wanted = expected(tuple(ids))[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0.0)
    chunks = list(demo_client.completions.create(**asked, seed=1, stream=True))
    for number, whole in enumerate(answer.choices):
        parts = [part for chunk in chunks for part in chunk.choices if part.index == number]
        assert "".join(part.text for part in parts) == whole.text
        columns = [part.logprobs for part in parts if part.logprobs is not None]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [each for column in columns for each in getattr(column, name)] == getattr(whole.logprobs, name)


@pytest.mark.parametrize(("side", "kept"), [(None, slice(-7, None)), ("right", slice(8))])
def test_an_echo_of_a_prompt_that_was_cut_has_those_of_its_tokens(
    demo_client: openai.OpenAI, side: str | None, kept: slice
) -> None:
    ids = encode(PROMPT)
    ids = [*([] if side else ids[:1]), *ids[kept]]
    asked: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1, "seed": 1}
    asked["extra_body"] = {"truncate_prompt_tokens": 8, "truncation_side": side, "prompt_logprobs": 1}
    answer = demo_client.completions.create(**asked)
    (choice,) = answer.choices
    check(choice.model_extra["prompt_logprobs"], ids, 1)  # type: ignore[index]
    assert choice.logprobs is not None
    assert choice.text.startswith("".join((choice.logprobs.tokens or [])[1:8]))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids) == 8


def test_a_resumed_reader_gets_the_same(demo_stack: Stack, demo_client: openai.OpenAI) -> None:
    url = demo_stack.gateways[0].url
    answer = demo_client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT * 20, max_tokens=2, extra_body={"prompt_logprobs": 3}
    )
    request_id, whole = answer.headers["x-request-id"], answer.parse()
    events = httpx.get(f"{url}/v1/requests/{request_id}/events", timeout=30.0).text
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    chunks = [httpx.Response(200, text=line).json() for line in data]
    rows = [row for chunk in chunks for each in chunk["choices"] for row in each.get("prompt_logprobs") or []]
    assert rows == whole.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    again = httpx.get(
        f"{url}/v1/requests/{request_id}/events",
        headers={"Last-Event-ID": chunks[0]["stream_position"]},
        timeout=30.0,
    ).text
    assert again.splitlines()[-3:] == events.splitlines()[-3:]
    assert again.count("data: {") == len(chunks) - 1


def test_grpc_streams_them(demo_stack: Stack) -> None:
    with grpc.insecure_channel(demo_stack.gateways[0].grpc_target) as channel:
        stub = InferenceStub(channel)
        request = api.GenerateRequest(model=MODEL, prompt=PROMPT)
        request.sampling.MergeFrom(api.SamplingParams(max_tokens=0, prompt_logprobs=1))
        chunks = [response.chunk for response in stub.Generate(request, timeout=60)]
        rows = [row for chunk in chunks for row in chunk.prompt_logprobs]
        assert [row.entries[0].token_id for row in rows] == encode(PROMPT)[1:]
        assert chunks[-1].usage.completion_tokens == 0
        assert [token for chunk in chunks for token in chunk.token_ids] == []


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs", "use_beam_search"),
    ],
)
def test_what_they_do_not_go_with_is_refused(
    demo_client: openai.OpenAI, fields: dict[str, Any], field: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        demo_client.completions.create(model=MODEL, prompt=PROMPT, extra_body=fields)
    assert caught.value.param == field
