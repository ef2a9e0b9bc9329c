"""Prompts: what is cut of them, and which tokens they are."""

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from pagestream.v1 import inference_pb2 as api
from support.clients.gateway_clients import Address, grpc_stub, post_events, refusal
from support.engines.synthetic_engine import MAX_MODEL_LEN, MODEL, SyntheticEngine, byte_tokenizer

pytestmark = [pytest.mark.served, pytest.mark.asyncio(loop_scope="module")]

BEGIN = 0  # <s>, which the tokenizer puts before a text
LONG = "x" * 300
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "abcdefgh", "max_tokens": 2, "seed": 0}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "abcdefgh"}], "max_tokens": 2}


def ids(text: str) -> list[int]:
    found: list[int] = byte_tokenizer().encode(text, add_special_tokens=False).ids
    return found


CUT: list[tuple[Any, dict[str, Any], list[int], str]] = [
    ("abcdefgh", {"truncate_prompt_tokens": 4}, [BEGIN, *ids("fgh")], "fgh"),
    ("abcdefgh", {"truncate_prompt_tokens": 4, "truncation_side": "left"}, ids("efgh"), "efgh"),
    ("abcdefgh", {"truncate_prompt_tokens": 4, "truncation_side": "right"}, [BEGIN, *ids("abc")], "abc"),
    ("abcdefgh", {"truncate_prompt_tokens": 4, "add_special_tokens": False}, ids("efgh"), "efgh"),
    ("abcdefgh", {"truncate_prompt_tokens": 9}, [BEGIN, *ids("abcdefgh")], "abcdefgh"),
    ("abcdefgh", {"truncate_prompt_tokens": -1}, [BEGIN, *ids("abcdefgh")], "abcdefgh"),
    ("abcdefgh", {"truncation_side": "left"}, [BEGIN, *ids("abcdefgh")], "abcdefgh"),
    (ids("abcdefgh"), {"truncate_prompt_tokens": 3}, ids("fgh"), "fgh"),
    (ids("abcdefgh"), {"truncate_prompt_tokens": 3, "truncation_side": "right"}, ids("abc"), "abc"),
]


async def test_a_completion_goes_on_with_what_is_kept(http: httpx.AsyncClient) -> None:
    for prompt, asked, kept, echo in CUT:
        body = {**COMPLETION, "prompt": prompt, **asked, "echo": True, "return_token_ids": True, "n": 2}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [kept, kept]
        assert [choice["text"][:-2] for choice in answer["choices"]] == [echo, echo]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(kept), 4)
        _, events = await post_events(http, "/v1/completions", {**body, "stream": True})
        choices = [choice for event in events[:-1] for choice in event.body["choices"] if choice["index"] == 1]
        assert "".join(choice["text"] for choice in choices) == answer["choices"][1]["text"]
        assert [each for choice in choices if (each := choice.get("prompt_token_ids"))] == [kept]


async def test_each_prompt_is_cut(http: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "prompt": ["abcdefgh", "ab", LONG], "truncate_prompt_tokens": 4, "return_token_ids": True}
    answer = (await http.post("/v1/completions", json=body)).json()
    kept = [[BEGIN, *ids("fgh")], [BEGIN, *ids("ab")], [BEGIN, *ids("xxx")]]
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == kept
    assert answer["usage"]["prompt_tokens"] == 11


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_keeps_its_end(http: httpx.AsyncClient, stream: bool) -> None:
    kept = [BEGIN, *ids("h</s>[assistant]")]
    body = {**CHAT, "truncate_prompt_tokens": len(kept), "return_token_ids": True}
    if stream:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        _, events = await post_events(http, "/v1/chat/completions", {**body, **options})
        assert events[0].body["prompt_token_ids"] == kept
        assert events[-2].body["usage"]["prompt_tokens"] == len(kept)
        return
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert (answer["prompt_token_ids"], answer["usage"]["prompt_tokens"]) == (kept, len(kept))


async def test_what_fits_leaves_a_token_for_the_output(http: httpx.AsyncClient) -> None:
    """As in vLLM -1 counts no max_tokens: the output has what is left."""
    for number in (-1, MAX_MODEL_LEN, MAX_MODEL_LEN - 1):
        body = {**COMPLETION, "prompt": LONG, "max_tokens": 50, "truncate_prompt_tokens": number}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (MAX_MODEL_LEN - 1, 1)
        assert answer["choices"][0]["finish_reason"] == "length"
    body = {**COMPLETION, "prompt": LONG, "max_tokens": 50, "truncate_prompt_tokens": MAX_MODEL_LEN - 50}
    assert (await http.post("/v1/completions", json=body)).json()["usage"]["completion_tokens"] == 50


OUT_OF_RANGE: list[tuple[dict[str, Any], str, str]] = [
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be -1, or from 1 to"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ({"truncate_prompt_tokens": MAX_MODEL_LEN + 1}, "truncate_prompt_tokens", "context length, 128, got 129"),
    ({"truncate_prompt_tokens": 2**63}, "truncate_prompt_tokens", "less than"),
    ({"truncate_prompt_tokens": "3"}, "truncate_prompt_tokens", "integer"),
    ({"truncation_side": "middle"}, "truncation_side", "left"),
]


async def test_what_is_out_of_range_is_refused(http: httpx.AsyncClient) -> None:
    for asked, field, text in OUT_OF_RANGE:
        for path, body in (("completions", COMPLETION), ("chat/completions", CHAT)):
            answer = await http.post(f"/v1/{path}", json={**body, **asked})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert text in error["message"]


async def test_a_response_is_cut_where_it_may_be(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "input": LONG, "max_output_tokens": 2}
    assert (await http.post("/v1/responses", json=body)).status_code == 400
    answer = (await http.post("/v1/responses", json={**body, "truncation": "auto"})).json()
    assert (answer["truncation"], answer["usage"]["input_tokens"]) == ("auto", MAX_MODEL_LEN - 2)
    for most, room in ((None, MAX_MODEL_LEN // 4), (50, 50), (MAX_MODEL_LEN, MAX_MODEL_LEN // 2)):
        asked = {**body, "truncation": "auto", "max_output_tokens": most}
        usage = (await http.post("/v1/responses", json=asked)).json()["usage"]
        assert (usage["input_tokens"], usage["output_tokens"]) == (MAX_MODEL_LEN - room, room), most
    short = (await http.post("/v1/responses", json={**body, "input": "x"})).json()
    assert short["truncation"] == "disabled"
    found = (await http.get(f"/v1/responses/{answer['id']}")).json()
    assert found["truncation"] == "auto"


async def test_a_lost_request_is_cut_again_as_it_was(http: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "truncate_prompt_tokens": 4}
    request_id = (await http.post("/v1/completions", json=body)).headers["X-Request-Id"]
    assert (await http.put(f"/v1/requests/{request_id}", json=body)).status_code == 200
    other = await http.put(f"/v1/requests/{request_id}", json={**body, "truncate_prompt_tokens": 5})
    assert other.json()["error"]["code"] == "request_differs"


async def test_grpc_cuts_likewise(gateway: Address) -> None:
    left: dict[str, Any] = {"truncation_side": api.TRUNCATION_SIDE_LEFT}
    async with grpc_stub(gateway) as stub:
        for asked, expected in (({"truncate_prompt_tokens": 4}, 4), ({"truncate_prompt_tokens": -1, **left}, 9)):
            request = api.GenerateRequest(model=MODEL, prompt="abcdefgh", **asked)
            request.sampling.max_tokens = 2
            *_, last = [answer.chunk async for answer in stub.Generate(request)]
            assert last.usage.prompt_tokens == expected
        for wrong in ({"truncate_prompt_tokens": 0}, {"truncation_side": 9}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(api.GenerateRequest(model=MODEL, prompt="x", **wrong)).read()  # type: ignore[arg-type]
            said = refusal(caught.value)
            assert (said.code, said.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [*wrong])


MESSAGES = [{"role": "user", "content": "hello"}]


async def test_tokens_are_those_of_a_request(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    for path, body in (("completions", {"prompt": "hello, Mara"}), ("chat/completions", {"messages": MESSAGES})):
        answer = (await http.post("/tokenize", json={**body, "return_token_strs": True})).json()
        await http.post(f"/v1/{path}", json={**body, "max_tokens": 1})
        assert answer["tokens"] == list(engine.claimed[-1].prompts[0].ids)
        assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
        assert len(answer["token_strs"]) == answer["count"]
        text = (await http.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]})).json()["prompt"]
        assert ("hello" in text, text.startswith("<s>")) == (True, True)


async def test_a_text_may_be_longer_than_the_context(http: httpx.AsyncClient) -> None:
    long = "x" * 9000
    for given in ({"prompt": long}, {"messages": [{"role": "user", "content": long}]}):
        answer = (await http.post("/tokenize", json={**given, "return_token_strs": True})).json()
        assert (answer["count"] > 9000, answer["max_model_len"]) == (True, 128)
        assert len(answer["tokens"]) == len(answer["token_strs"]) == answer["count"]
        text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
        assert long in text


async def test_an_empty_text_has_special_tokens_alone(http: httpx.AsyncClient) -> None:
    for adds in (True, False):
        body = {"prompt": "", "add_special_tokens": adds, "chat_template": None}
        answer = (await http.post("/tokenize", json=body)).json()
        assert (answer["count"], len(answer["tokens"])) == (adds, adds)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
    ("tokenize", {"prompt": "x" * 300_001}, "prompt"),
    ("tokenize", {"prompt": "x", "add_specials": True}, "add_specials"),
    ("tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
    ("detokenize", {"tokens": [5, 10**6]}, "tokens"),
    ("detokenize", {"tokens": "x"}, "tokens"),
    ("detokenize", {"tokens": [5] * 300_001}, "tokens"),
]


async def test_refusals_of_texts_name_the_field(http: httpx.AsyncClient, engine: SyntheticEngine) -> None:
    for path, body, field in REFUSED:
        answer = await http.post(f"/{path}", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not engine.claimed


async def test_of_requests_that_come_together_the_failing_fail_alone(http: httpx.AsyncClient) -> None:
    """They are encoded together."""
    system = {"role": "system", "content": "be kind " * 10}

    async def status_of(number: int) -> int:
        if number == 3:
            body: dict[str, Any] = {**CHAT, "messages": []}
        elif number == 7:
            body = {**CHAT, "messages": [{"role": "user", "content": LONG}]}
        elif number == 9:
            body = {**CHAT, "messages": [{"role": "user", "content": "y" * 100_000}]}
        else:
            body = {**CHAT, "messages": [system, {"role": "user", "content": f"hello {number}"}]}
        return (await http.post("/v1/chat/completions", json=body)).status_code

    found = await asyncio.gather(*(status_of(number) for number in range(20)))
    assert [number for number, status in enumerate(found) if status == 400] == [3, 7, 9]
    assert set(found) == {200, 400}
