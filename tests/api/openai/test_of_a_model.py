"""Vectors, log probabilities, ids and responses of the demo model, through processes, by the official client."""

import base64
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import grpc
import httpx
import openai
import pytest
import torch
from pagestream.v1 import inference_pb2 as api
from pagestream.v1.inference_pb2_grpc import InferenceStub
from pagestream_client import Client, DeadlineExceeded, InvalidRequest
from support.clients.gateway_clients import refusal
from support.processes.stack import DEMO_MODEL, Stack
from support.processes.waiting import LIMIT_S, wait_until
from tokenizers import Tokenizer

pytestmark = pytest.mark.served


@pytest.fixture(scope="module")
def demo_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Run Redis, a gateway, and an engine with the demo model in float32, as processes."""
    running = Stack(
        tmp_path_factory.mktemp("demo"),
        model=DEMO_MODEL,
        engine_options=("--dtype", "float32", "--max-num-batched-tokens", "16", "--max-num-seqs", "4"),
        is_forked=True,
    )
    try:
        running.redis.start()
        running.add_engine()
        running.add_gateway()
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="module")
def demo_client(demo_stack: Stack) -> Iterator[openai.OpenAI]:
    """Open the official client on that gateway."""
    url = f"{demo_stack.gateways[0].url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT_S) as client:
        yield client


MODEL = "demo"
TOLERANCE = 1e-4
TEXTS = ["The miller has two sons.", "A boat", "The keeper of the lighthouse reads a long book about the sea at night."]


def encode(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids
    return ids


@cache
def reference() -> Any:
    from transformers import AutoModelForCausalLM  # takes a second

    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


@cache
def vector_of(text: str) -> torch.Tensor:
    """Return the last token's last hidden state of `transformers`, of length 1: the demo model's files say no more."""
    with torch.inference_mode():
        states = reference()(torch.tensor([encode(text)]), output_hidden_states=True).hidden_states[-1][0, -1]
    vector: torch.Tensor = states / states.norm()
    return vector


def check_vectors(data: Any, texts: list[str]) -> None:
    assert [each.index for each in data] == list(range(len(texts)))
    for each, text in zip(data, texts, strict=True):
        torch.testing.assert_close(torch.tensor(each.embedding), vector_of(text), atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("given", [TEXTS, [encode(text) for text in TEXTS], TEXTS[0], encode(TEXTS[1])])
def test_embeddings_are_those_of_transformers(demo_client: openai.OpenAI, given: Any) -> None:
    """The client asks for base64 where it is not told otherwise, and decodes it."""
    texts = {TEXTS[0]: TEXTS[:1], str(encode(TEXTS[1])): TEXTS[1:2]}.get(str(given), TEXTS)
    raw = demo_client.embeddings.with_raw_response.create(model=MODEL, input=given)
    answer = raw.parse()
    check_vectors(answer.data, texts)
    again = demo_client.get(f"/requests/{raw.headers['X-Request-Id']}/answer", cast_to=httpx.Response)
    assert again.json() == raw.http_response.json()
    assert answer.object == "list"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(encode(text)) for text in texts)
    as_numbers = demo_client.embeddings.create(model=MODEL, input=given, encoding_format="float")
    for one, other in zip(answer.data, as_numbers.data, strict=True):
        torch.testing.assert_close(torch.tensor(one.embedding), torch.tensor(other.embedding), atol=1e-6, rtol=0.0)


def test_a_batch_has_the_embeddings_of_its_jobs(demo_client: openai.OpenAI) -> None:
    body = {"model": MODEL, "encoding_format": "float"}
    lines = [{"custom_id": text, "body": {**body, "input": text}} for text in TEXTS]
    file = demo_client.files.create(file=("jobs", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
    made = demo_client.batches.create(input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h")
    wait_until(lambda: demo_client.batches.retrieve(made.id).status == "completed", "the batch")
    output = demo_client.batches.retrieve(made.id).output_file_id or ""
    found = [json.loads(line) for line in demo_client.files.content(output).text.splitlines()]
    answers = {each["custom_id"]: each["response"]["body"]["data"][0]["embedding"] for each in found}
    assert sorted(answers) == sorted(TEXTS)
    for text, vector in answers.items():
        torch.testing.assert_close(torch.tensor(vector), vector_of(text), atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_a_vector_may_keep_its_length(demo_client: openai.OpenAI, name: str) -> None:
    answer = demo_client.embeddings.create(model=MODEL, input=TEXTS[0], extra_body={name: False})
    length = torch.tensor(answer.data[0].embedding).norm()
    assert abs(length - 1) > 0.1
    torch.testing.assert_close(
        torch.tensor(answer.data[0].embedding) / length, vector_of(TEXTS[0]), atol=TOLERANCE, rtol=0.0
    )


@pytest.mark.parametrize(("side", "kept"), [("right", slice(5)), ("left", slice(-5, None))])
def test_a_prompt_may_be_cut(demo_client: openai.OpenAI, side: str, kept: slice) -> None:
    asked = {"truncate_prompt_tokens": 5, "truncation_side": side, "padding": "do_not_pad"}
    cut = demo_client.embeddings.create(model=MODEL, input=TEXTS[2], extra_body=asked)
    same = demo_client.embeddings.create(model=MODEL, input=encode(TEXTS[2])[kept])
    assert cut.usage.prompt_tokens == same.usage.prompt_tokens == 5
    torch.testing.assert_close(
        torch.tensor(cut.data[0].embedding), torch.tensor(same.data[0].embedding), atol=TOLERANCE, rtol=0.0
    )


def test_a_prompt_is_cut_to_what_the_model_takes(demo_client: openai.OpenAI) -> None:
    long = "the miller " * 4000
    most = demo_client.models.retrieve(MODEL).max_model_len  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="context length"):
        demo_client.embeddings.create(model=MODEL, input=long)
    cut = demo_client.embeddings.create(model=MODEL, input=long, extra_body={"truncate_prompt_tokens": -1})
    assert cut.usage.prompt_tokens == most - 1


def test_a_reader_on_any_gateway_gets_the_same(demo_stack: Stack, demo_client: openai.OpenAI) -> None:
    url = demo_stack.gateways[0].url
    headers = {"Idempotency-Key": "vectors-1"}
    answer = demo_client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS, extra_headers=headers)
    whole, request_id = answer.parse(), answer.headers["x-request-id"]
    again = demo_client.embeddings.with_raw_response.create(model=MODEL, input=TEXTS, extra_headers=headers)
    assert again.headers["x-request-id"] == request_id, "it was computed twice"
    assert [each.embedding for each in again.parse().data] == [each.embedding for each in whole.data]
    text = httpx.get(f"{url}/v1/requests/{request_id}/events", timeout=LIMIT_S).text
    *events, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    shown = {each["index"]: base64.b64decode(each["embedding"]) for each in events}
    for each in whole.data:
        assert list(struct.unpack(f"<{len(each.embedding)}f", shown[each.index])) == each.embedding
    assert last["usage"]["prompt_tokens"] == whole.usage.prompt_tokens
    position = {"Last-Event-ID": events[0]["stream_position"]}
    rest = httpx.get(f"{url}/v1/requests/{request_id}/events", headers=position, timeout=LIMIT_S).text
    assert rest.count('"object":"embedding"') == len(TEXTS) - 1


def test_scores_are_cosines(demo_stack: Stack) -> None:
    url = demo_stack.gateways[0].url
    cosines = [float(vector_of(TEXTS[0]) @ vector_of(text)) for text in TEXTS]
    answer = httpx.post(
        f"{url}/v1/score", json={"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS}, timeout=LIMIT_S
    ).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    assert [each["score"] for each in answer["data"]] == pytest.approx(cosines, abs=TOLERANCE)
    pairs = {"queries": TEXTS, "documents": TEXTS[::-1]}
    answer = httpx.post(f"{url}/v1/score", json={"model": MODEL, **pairs}, timeout=LIMIT_S).json()
    wanted = [float(vector_of(one) @ vector_of(other)) for one, other in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=TOLERANCE)


def test_a_rerank_orders_documents(demo_stack: Stack) -> None:
    url = demo_stack.gateways[0].url
    body = {"model": MODEL, "query": TEXTS[0], "documents": TEXTS[::-1], "top_n": 2}
    reply = httpx.post(f"{url}/v1/rerank", json=body, timeout=LIMIT_S)
    first, second = reply.json()["results"]
    assert (first["index"], first["document"]) == (2, {"text": TEXTS[0]})
    assert first["relevance_score"] == pytest.approx(1.0, abs=TOLERANCE)
    assert second["relevance_score"] == pytest.approx(
        max(float(vector_of(TEXTS[0]) @ vector_of(text)) for text in TEXTS[1:]), abs=TOLERANCE
    )
    text = httpx.get(f"{url}/v1/requests/{reply.headers['x-request-id']}/events", timeout=LIMIT_S).text
    (event,) = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert event["results"] == reply.json()["results"]


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("embeddings", {"input": "x", "dimensions": 8}, "dimensions", "don't say that they may be cut"),
    ("embeddings", {"input": []}, "input", "must not be empty"),
    ("embeddings", {"input": [""]}, "input", "must not be empty"),
    ("embeddings", {"input": ["x"] * 2049}, "input", "at most 2048 inputs"),
    ("embeddings", {"input": [[1] * 300] * 1001}, "input", "at most 300000 tokens"),
    ("embeddings", {"input": "x", "truncate_prompt_tokens": 10**6}, "truncate_prompt_tokens", "context length"),
    ("embeddings", {"input": "x", "padding": "max_length"}, "padding", "not supported"),
    ("embeddings", {"input": "x", "normalize": True, "use_activation": False}, "use_activation", "normalize"),
    ("embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format", "base64"),
    ("score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many as text_2"),
    ("score", {"text_1": "a"}, "text_2", "exactly one"),
    ("rerank", {"query": "a", "documents": []}, "documents", "must not be empty"),
    ("rerank", {"query": {"text": ""}, "documents": ["a"]}, "query", "must not be empty"),
    ("rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents.0.title", "Unknown parameter"),
]


def test_what_is_wrong_is_named(demo_stack: Stack) -> None:
    for path, body, field, message in WRONG:
        answer = httpx.post(f"{demo_stack.gateways[0].url}/v1/{path}", json={"model": MODEL, **body}, timeout=LIMIT_S)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field)
        assert message in error["message"]


@pytest.mark.slow
def test_a_batch_survives_its_engine(demo_stack: Stack, demo_client: openai.OpenAI) -> None:
    """SIGKILL of the engine in the middle of a batch: another one goes on where the log ends."""
    inputs = distinct_inputs(200)
    (victim,) = [engine for engine in demo_stack.engines if engine.is_alive()]
    with httpx.Client(base_url=demo_stack.gateways[0].url, timeout=LIMIT_S) as http, ThreadPoolExecutor(1) as beside:
        body = {"model": MODEL, "input": inputs, "encoding_format": "base64", "on_disconnect": "continue"}
        waiting = beside.submit(http.post, "/v1/embeddings", json=body, headers={"Idempotency-Key": "killed"})
        wait_until(lambda: any(count > 8 for count in lengths(demo_stack).values()), what="a vector")
        victim.kill()
        left = lengths(demo_stack)
        demo_stack.add_engine()
        answer = waiting.result().json()
        again = http.post("/v1/embeddings", json=body, headers={"Idempotency-Key": "killed"}).json()
        assert (again["id"], again["data"]) == (answer["id"], answer["data"])
        view = http.get(f"/v1/requests/{answer['id']}").json()
    assert 8 < left[answer["id"]] < 2 * len(inputs), "the kill came after the end"
    assert view["attempts"] == 2
    assert view["next_index"] == 2 * len(inputs) + 1, "a vector stands in the log twice"
    undisturbed = demo_client.embeddings.create(model=MODEL, input=inputs)
    for each, other in zip(answer["data"], undisturbed.data, strict=True):
        vector = struct.unpack(f"<{len(other.embedding)}f", base64.b64decode(each["embedding"]))
        torch.testing.assert_close(torch.tensor(vector), torch.tensor(other.embedding), atol=TOLERANCE, rtol=0.0)


def test_a_request_that_is_cancelled_is_no_answer(demo_stack: Stack) -> None:
    url = demo_stack.gateways[0].url
    body = {"model": MODEL, "input": distinct_inputs(2000)}
    reply = httpx.post(f"{url}/v1/embeddings", json=body, headers={"X-Request-Timeout": "0.2"}, timeout=LIMIT_S)
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "deadline")


def distinct_inputs(count: int) -> list[list[int]]:
    """Return inputs of 40 tokens, none of which is cached for another."""
    return [[10 + number // 90, *[10 + number % 90] * 39] for number in range(count)]


def test_grpc_answers_alike(demo_stack: Stack) -> None:
    with grpc.insecure_channel(demo_stack.gateways[0].grpc_target) as channel:
        stub = InferenceStub(channel)
        for request in (
            api.EmbedRequest(model=MODEL, texts=TEXTS),
            api.EmbedRequest(model=MODEL, token_ids=[api.TokenIds(ids=encode(text)) for text in TEXTS]),
        ):
            answer = stub.Embed(request, timeout=LIMIT_S)
            for each, text in zip(answer.embeddings, TEXTS, strict=True):
                torch.testing.assert_close(torch.tensor(each.values), vector_of(text), atol=TOLERANCE, rtol=0.0)
        assert answer.usage.prompt_tokens == sum(len(encode(text)) for text in TEXTS)
        chunks = [each.chunk for each in stub.Resume(api.ResumeRequest(request_id=answer.request_id), timeout=LIMIT_S)]
        shown = {
            chunk.choice: struct.unpack(f"<{len(chunk.embedding) // 4}f", chunk.embedding)
            for chunk in chunks
            if chunk.embedding
        }
        assert [list(shown[number]) for number in range(len(TEXTS))] == [
            list(each.values) for each in answer.embeddings
        ]
        scored = stub.Score(api.ScoreRequest(model=MODEL, queries=TEXTS[:1], documents=TEXTS), timeout=LIMIT_S)
        assert list(scored.scores) == pytest.approx(
            [float(vector_of(TEXTS[0]) @ vector_of(text)) for text in TEXTS], abs=TOLERANCE
        )
        with pytest.raises(grpc.RpcError) as caught:
            stub.Embed(api.EmbedRequest(model=MODEL, texts=["x"], dimensions=8), timeout=LIMIT_S)
        refused = refusal(caught.value)  # type: ignore[arg-type]
        assert (refused.code, refused.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["dimensions"])
    with Client([demo_stack.gateways[0].grpc_target]) as client:
        one = client.embed(MODEL, TEXTS, idempotency_key="vectors-2", deadline_s=60.0)
        again = client.embed(MODEL, TEXTS, idempotency_key="vectors-2", deadline_s=60.0)
        assert (one.request_id, one.vectors) == (again.request_id, again.vectors), "it was computed twice"
        by_ids = client.embed(MODEL, [encode(text) for text in TEXTS])
        torch.testing.assert_close(torch.tensor(by_ids.vectors), torch.tensor(one.vectors), atol=TOLERANCE, rtol=0.0)
        assert client.score(MODEL, TEXTS[0], TEXTS).scores == pytest.approx(list(scored.scores), abs=TOLERANCE)
        with pytest.raises(InvalidRequest, match="must be one or as many as documents"):
            client.score(MODEL, TEXTS[:2], TEXTS)
        with pytest.raises(DeadlineExceeded):
            client.embed(MODEL, distinct_inputs(2000), deadline_s=0.2)


def lengths(stack: Stack) -> dict[str, int]:
    """Return the lengths of the logs of unfinished requests."""
    return {name: count for owned in stack.log_lengths().values() for name, count in owned.items()}


PROMPT = "The miller of the village has two sons, and the mill stands by the river."
LOOSE = 2e-3
"""Of log probabilities, in float32."""


@cache
def logprobs_of(ids: tuple[int, ...]) -> torch.Tensor:
    """Return the log probabilities of `transformers`: (tokens, vocabulary)."""
    with torch.inference_mode():
        logprobs: torch.Tensor = reference()(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return logprobs


def check(rows: list[dict[str, Any] | None], ids: list[int], count: int) -> None:
    """Compare vLLM's `prompt_logprobs` with the reference's log softmax."""
    assert rows[0] is None
    assert len(rows) == len(ids)
    for token_id, row, logprobs in zip(ids[1:], rows[1:], logprobs_of(tuple(ids)), strict=False):
        assert row is not None
        assert next(iter(row)) == str(token_id)
        assert row[str(token_id)]["logprob"] == pytest.approx(logprobs[token_id].item(), abs=LOOSE)
        likeliest = sorted((each["logprob"] for each in row.values()), reverse=True)[:count]
        torch.testing.assert_close(torch.tensor(likeliest), logprobs.topk(count).values, atol=LOOSE, rtol=0.0)
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
        places = list(zip(logprobs.tokens or (), logprobs.text_offset or (), strict=True))
        assert [offset for _, offset in places[:2]] == [0, 0]
        assert all(choice.text.startswith(token, offset) for token, offset in places[1 : len(ids)])
        got = torch.tensor(logprobs.token_logprobs[1 : len(ids)])
        wanted = logprobs_of(tuple(ids))[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(got, wanted, atol=LOOSE, rtol=0.0)
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


def test_a_resumed_reader_gets_the_same_log_probabilities(demo_stack: Stack, demo_client: openai.OpenAI) -> None:
    url = demo_stack.gateways[0].url
    answer = demo_client.completions.with_raw_response.create(
        model=MODEL, prompt=PROMPT * 20, max_tokens=2, extra_body={"prompt_logprobs": 3}
    )
    request_id, whole = answer.headers["x-request-id"], answer.parse()
    events = httpx.get(f"{url}/v1/requests/{request_id}/events", timeout=LIMIT_S).text
    data = [line.removeprefix("data: ") for line in events.splitlines() if line.startswith("data: {")]
    chunks = [httpx.Response(200, text=line).json() for line in data]
    rows = [row for chunk in chunks for each in chunk["choices"] for row in each.get("prompt_logprobs") or []]
    assert rows == whole.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    again = httpx.get(
        f"{url}/v1/requests/{request_id}/events",
        headers={"Last-Event-ID": chunks[0]["stream_position"]},
        timeout=LIMIT_S,
    ).text
    assert again.splitlines()[-3:] == events.splitlines()[-3:]
    assert again.count("data: {") == len(chunks) - 1


def test_grpc_streams_log_probabilities(demo_stack: Stack) -> None:
    with grpc.insecure_channel(demo_stack.gateways[0].grpc_target) as channel:
        stub = InferenceStub(channel)
        request = api.GenerateRequest(model=MODEL, prompt=PROMPT)
        request.sampling.MergeFrom(api.SamplingParams(max_tokens=0, prompt_logprobs=1))
        chunks = [response.chunk for response in stub.Generate(request, timeout=LIMIT_S)]
        rows = [row for chunk in chunks for row in chunk.prompt_logprobs]
        assert [row.entries[0].token_id for row in rows] == encode(PROMPT)[1:]
        assert chunks[-1].usage.completion_tokens == 0
        assert [token for chunk in chunks for token in chunk.token_ids] == []


NOT_WITH: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt_logprobs": 21}, "prompt_logprobs", "from 0 to 20"),
    ({"max_tokens": 0}, "max_tokens", "1 or more"),
    ({"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs", "use_beam_search"),
]


def test_what_they_do_not_go_with_is_refused(demo_client: openai.OpenAI) -> None:
    for fields, field, message in NOT_WITH:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            demo_client.completions.create(model=MODEL, prompt=PROMPT, extra_body=fields)
        assert caught.value.param == field


CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Which job does Mara have?"}],
    "temperature": 0,
    "max_tokens": 24,
}


def answered(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**CHAT, extra_body=more)


def test_bad_words_and_allowed_tokens(demo_client: openai.OpenAI) -> None:
    usual = answered(demo_client).choices[0].message.content
    assert usual.startswith("Mara is the lighthouse keeper")
    without = answered(demo_client, bad_words=["lighthouse"]).choices[0].message.content
    assert "lighthouse" not in without
    assert without.startswith("Mara is the")
    allowed = answered(demo_client, allowed_token_ids=[40, 41], return_token_ids=True)
    assert set(allowed.choices[0].model_extra["token_ids"]) <= {40, 41}


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"name": "a", "description": "A.", "parameters": SCHEMA}
ASKED = {"messages": [{"role": "user", "content": "A boat"}], "max_tokens": 8}
CONTRADICTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {**ASKED, "response_format": JSON_SCHEMA}, "response_format"),
    ("/v1/chat/completions", {**ASKED, "structured_outputs": {"choice": ["yes"]}}, "structured_outputs"),
    (
        "/v1/chat/completions",
        {**ASKED, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"},
        "tools",
    ),
    ("/v1/chat/completions", {**ASKED, "bad_words": ["q"]}, "bad_words"),
    ("/v1/completions", {"prompt": "A", "response_format": JSON_SCHEMA}, "response_format"),
    (
        "/v1/responses",
        {"input": "A", "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}},
        "text.format",
    ),
    (
        "/v1/messages",
        {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format",
    ),
    (
        "/v1/messages",
        {**ASKED, "tools": [{"name": "a", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}},
        "tools",
    ),
]


@pytest.mark.parametrize(("path", "body", "field"), CONTRADICTIONS)
def test_a_contradiction_is_the_field_s_that_asks_for_it(
    demo_client: openai.OpenAI, path: str, body: dict[str, Any], field: str
) -> None:
    """Only the engine sees that the allowed token and the form leave nothing."""
    only = encode("q")[-1]
    url = str(demo_client.base_url).removesuffix("/v1/")
    answer = httpx.post(f"{url}{path}", json={"model": MODEL, **body, "allowed_token_ids": [only]}, timeout=LIMIT_S)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
    names = error["message"].partition(": ")[0].split(", ")
    assert set(names) == {field, "allowed_token_ids"}
    if path != "/v1/messages":  # whose errors have no such member
        assert (error["param"], error["code"]) == (names[0], "invalid_request")


def test_a_contradiction_is_named_in_streams(demo_stack: Stack, demo_client: openai.OpenAI) -> None:
    only = encode("q")[-1]
    with pytest.raises(openai.APIError) as caught:
        list(
            demo_client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "A boat"}],
                response_format=JSON_SCHEMA,  # type: ignore[arg-type]
                stream=True,
                extra_body={"allowed_token_ids": [only]},
            )
        )
    assert caught.value.param == "response_format"
    sampling = api.SamplingParams(allowed_token_ids=[only], structured_outputs=api.StructuredOutputs(regex="[0-9]{2}"))
    with grpc.insecure_channel(demo_stack.gateways[0].grpc_target) as channel:
        asked = api.GenerateRequest(model=MODEL, prompt="A", sampling=sampling)
        *_, last = InferenceStub(channel).Generate(asked, timeout=LIMIT_S)
    assert (last.chunk.error.code, last.chunk.error.field) == ("invalid_request", "sampling.structured_outputs")


def test_ids_are_those_of_the_texts(demo_client: openai.OpenAI) -> None:
    whole = answered(demo_client, return_token_ids=True)
    ids = whole.choices[0].model_extra["token_ids"]
    assert Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).decode(ids) == whole.choices[0].message.content
    assert len(ids) == whole.usage.completion_tokens
    assert len(whole.model_extra["prompt_token_ids"]) == whole.usage.prompt_tokens
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = demo_client.chat.completions.create(
        **CHAT, stream=True, stream_options=options, extra_body={"return_token_ids": True}
    )
    chunks = list(stream)
    assert chunks[0].model_extra["prompt_token_ids"] == whole.model_extra["prompt_token_ids"]
    parts = [chunk.choices[0].model_extra.get("token_ids", []) for chunk in chunks if chunk.choices]
    assert [token for part in parts for token in part] == ids
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(ids))


ASKED: Any = {"model": "demo", "input": "Tell me a story.", "temperature": 0.8}
LONG: Any = {**ASKED, "max_output_tokens": 200, "extra_body": {"seed": 3, "min_tokens": 200}}


def test_a_response_outlives_its_engine_and_its_gateway(demo_stack: Stack, demo_client: openai.OpenAI) -> None:
    undisturbed = demo_client.responses.create(**LONG)
    gateway = demo_stack.add_gateway()
    wait_until(gateway.has_become_ready, what="a second gateway")
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
