"""/tokenize and /detokenize give the tokens of requests."""

from typing import Any

import httpx
import pytest
from support.engines.synthetic_engine import MODEL, SyntheticEngine

CHAT = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [("completions", {"prompt": "hello, Mara"}), ("chat/completions", {"messages": CHAT})],
)
async def test_tokens_are_those_of_a_request(
    http: httpx.AsyncClient, engine: SyntheticEngine, path: str, body: dict[str, Any]
) -> None:
    answer = (await http.post("/tokenize", json={**body, "return_token_strs": True})).json()
    await http.post(f"/v1/{path}", json={**body, "max_tokens": 1})
    assert answer["tokens"] == list(engine.claimed[0].prompts[0].ids)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 128)
    assert len(answer["token_strs"]) == answer["count"]
    text = (await http.post("/detokenize", json={"model": MODEL, "tokens": answer["tokens"]})).json()["prompt"]
    assert ("hello" in text, text.startswith("<s>")) == (True, True)


@pytest.mark.parametrize("given", [{"prompt": "x" * 9000}, {"messages": [{"role": "user", "content": "x" * 9000}]}])
async def test_a_text_may_be_longer_than_the_context(http: httpx.AsyncClient, given: dict[str, Any]) -> None:
    answer = (await http.post("/tokenize", json={**given, "return_token_strs": True})).json()
    assert (answer["count"] > 9000, answer["max_model_len"]) == (True, 128)
    assert len(answer["tokens"]) == len(answer["token_strs"]) == answer["count"]
    text = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()["prompt"]
    assert "x" * 9000 in text


@pytest.mark.parametrize("adds", [True, False])
async def test_an_empty_text_has_special_tokens_alone(http: httpx.AsyncClient, adds: bool) -> None:
    answer = (
        await http.post("/tokenize", json={"prompt": "", "add_special_tokens": adds, "chat_template": None})
    ).json()
    assert (answer["count"], len(answer["tokens"])) == (adds, adds)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("tokenize", {"prompt": "x" * 300_001}, "prompt"),
        ("tokenize", {"prompt": "x", "add_specials": True}, "add_specials"),
        ("tokenize", {"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ("detokenize", {"tokens": [5, 10**6]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
        ("detokenize", {"tokens": [5] * 300_001}, "tokens"),
    ],
)
async def test_refusals_name_the_field(
    http: httpx.AsyncClient, engine: SyntheticEngine, path: str, body: dict[str, Any], field: str
) -> None:
    answer = await http.post(f"/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not engine.claimed
