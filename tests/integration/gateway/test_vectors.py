"""Embeddings, scores and reranks, through a gateway and engines as processes, by the official client."""

import base64
import json
import struct
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
from support.processes.waiting import wait_until
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(180)
MODEL = "demo"
TOLERANCE = 1e-4
TEXTS = ["The miller has two sons.", "A boat", "The keeper of the lighthouse reads a long book about the sea at night."]


def encode(text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids
    return ids


@cache
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)


@cache
def expected(text: str) -> torch.Tensor:
    """Return the last token's last hidden state of `transformers`, of length 1: the demo model's files say no more."""
    with torch.inference_mode():
        states = reference()(torch.tensor([encode(text)]), output_hidden_states=True).hidden_states[-1][0, -1]
    vector: torch.Tensor = states / states.norm()
    return vector


def check(data: Any, texts: list[str]) -> None:
    assert [each.index for each in data] == list(range(len(texts)))
    for each, text in zip(data, texts, strict=True):
        torch.testing.assert_close(torch.tensor(each.embedding), expected(text), atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("given", [TEXTS, [encode(text) for text in TEXTS], TEXTS[0], encode(TEXTS[1])])
def test_embeddings_are_those_of_transformers(demo_client: openai.OpenAI, given: Any) -> None:
    """The client asks for base64 where it is not told otherwise, and decodes it."""
    texts = {TEXTS[0]: TEXTS[:1], str(encode(TEXTS[1])): TEXTS[1:2]}.get(str(given), TEXTS)
    raw = demo_client.embeddings.with_raw_response.create(model=MODEL, input=given)
    answer = raw.parse()
    check(answer.data, texts)
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
        torch.testing.assert_close(torch.tensor(vector), expected(text), atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_a_vector_may_keep_its_length(demo_client: openai.OpenAI, name: str) -> None:
    answer = demo_client.embeddings.create(model=MODEL, input=TEXTS[0], extra_body={name: False})
    length = torch.tensor(answer.data[0].embedding).norm()
    assert abs(length - 1) > 0.1
    torch.testing.assert_close(
        torch.tensor(answer.data[0].embedding) / length, expected(TEXTS[0]), atol=TOLERANCE, rtol=0.0
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
    text = httpx.get(f"{url}/v1/requests/{request_id}/events", timeout=60.0).text
    *events, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    shown = {each["index"]: base64.b64decode(each["embedding"]) for each in events}
    for each in whole.data:
        assert list(struct.unpack(f"<{len(each.embedding)}f", shown[each.index])) == each.embedding
    assert last["usage"]["prompt_tokens"] == whole.usage.prompt_tokens
    position = {"Last-Event-ID": events[0]["stream_position"]}
    rest = httpx.get(f"{url}/v1/requests/{request_id}/events", headers=position, timeout=60.0).text
    assert rest.count('"object":"embedding"') == len(TEXTS) - 1


def test_scores_are_cosines(demo_stack: Stack) -> None:
    url = demo_stack.gateways[0].url
    cosines = [float(expected(TEXTS[0]) @ expected(text)) for text in TEXTS]
    answer = httpx.post(
        f"{url}/v1/score", json={"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS}, timeout=60.0
    ).json()
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]
    assert [each["score"] for each in answer["data"]] == pytest.approx(cosines, abs=TOLERANCE)
    pairs = {"queries": TEXTS, "documents": TEXTS[::-1]}
    answer = httpx.post(f"{url}/v1/score", json={"model": MODEL, **pairs}, timeout=60.0).json()
    wanted = [float(expected(one) @ expected(other)) for one, other in zip(TEXTS, TEXTS[::-1], strict=True)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(wanted, abs=TOLERANCE)


def test_a_rerank_orders_documents(demo_stack: Stack) -> None:
    url = demo_stack.gateways[0].url
    body = {"model": MODEL, "query": TEXTS[0], "documents": TEXTS[::-1], "top_n": 2}
    reply = httpx.post(f"{url}/v1/rerank", json=body, timeout=60.0)
    first, second = reply.json()["results"]
    assert (first["index"], first["document"]) == (2, {"text": TEXTS[0]})
    assert first["relevance_score"] == pytest.approx(1.0, abs=TOLERANCE)
    assert second["relevance_score"] == pytest.approx(
        max(float(expected(TEXTS[0]) @ expected(text)) for text in TEXTS[1:]), abs=TOLERANCE
    )
    text = httpx.get(f"{url}/v1/requests/{reply.headers['x-request-id']}/events", timeout=60.0).text
    (event,) = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert event["results"] == reply.json()["results"]


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
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
    ],
)
def test_what_is_wrong_is_named(demo_stack: Stack, path: str, body: dict[str, Any], field: str, message: str) -> None:
    answer = httpx.post(f"{demo_stack.gateways[0].url}/v1/{path}", json={"model": MODEL, **body}, timeout=60.0)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert message in error["message"]


def test_a_batch_survives_its_engine(demo_stack: Stack, demo_client: openai.OpenAI) -> None:
    """SIGKILL of the engine in the middle of a batch: another one goes on where the log ends."""
    inputs = distinct_inputs(200)
    (victim,) = [engine for engine in demo_stack.engines if engine.is_alive()]
    with httpx.Client(base_url=demo_stack.gateways[0].url, timeout=90.0) as http, ThreadPoolExecutor(1) as beside:
        body = {"model": MODEL, "input": inputs, "encoding_format": "base64", "on_disconnect": "continue"}
        waiting = beside.submit(http.post, "/v1/embeddings", json=body, headers={"Idempotency-Key": "killed"})
        wait_until(lambda: any(count > 8 for count in lengths(demo_stack).values()), limit_s=60.0, what="a vector")
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
    reply = httpx.post(f"{url}/v1/embeddings", json=body, headers={"X-Request-Timeout": "0.2"}, timeout=60.0)
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
            answer = stub.Embed(request, timeout=60)
            for each, text in zip(answer.embeddings, TEXTS, strict=True):
                torch.testing.assert_close(torch.tensor(each.values), expected(text), atol=TOLERANCE, rtol=0.0)
        assert answer.usage.prompt_tokens == sum(len(encode(text)) for text in TEXTS)
        chunks = [each.chunk for each in stub.Resume(api.ResumeRequest(request_id=answer.request_id), timeout=60)]
        shown = {
            chunk.choice: struct.unpack(f"<{len(chunk.embedding) // 4}f", chunk.embedding)
            for chunk in chunks
            if chunk.embedding
        }
        assert [list(shown[number]) for number in range(len(TEXTS))] == [
            list(each.values) for each in answer.embeddings
        ]
        scored = stub.Score(api.ScoreRequest(model=MODEL, queries=TEXTS[:1], documents=TEXTS), timeout=60)
        assert list(scored.scores) == pytest.approx(
            [float(expected(TEXTS[0]) @ expected(text)) for text in TEXTS], abs=TOLERANCE
        )
        with pytest.raises(grpc.RpcError) as caught:
            stub.Embed(api.EmbedRequest(model=MODEL, texts=["x"], dimensions=8), timeout=60)
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
