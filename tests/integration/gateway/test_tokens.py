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


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("tokenize", {"prompt": "x" * 200}, "prompt"),
        ("tokenize", {"prompt": "x", "add_specials": True}, "add_specials"),
        ("detokenize", {"tokens": [5, 10**6]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
        ("detokenize", {"tokens": [5] * 129}, "tokens"),
    ],
)
async def test_refusals_name_the_field(
    http: httpx.AsyncClient, engine: SyntheticEngine, path: str, body: dict[str, Any], field: str
) -> None:
    answer = await http.post(f"/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert not engine.claimed
