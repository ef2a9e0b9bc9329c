"""What a request says of its output's tokens, with the demo model: which it may have, and their ids."""

from typing import Any

import openai
from support.processes.stack import DEMO_MODEL
from tokenizers import Tokenizer

MODEL = "demo"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Which job does Mara have?"}],
    "temperature": 0,
    "max_tokens": 24,
}


def answered(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**ASKED, extra_body=more)


def test_bad_words_and_allowed_tokens(demo_client: openai.OpenAI) -> None:
    usual = answered(demo_client).choices[0].message.content
    assert usual.startswith("Mara is the lighthouse keeper")
    without = answered(demo_client, bad_words=["lighthouse"]).choices[0].message.content
    assert "lighthouse" not in without
    assert without.startswith("Mara is the")
    allowed = answered(demo_client, allowed_token_ids=[40, 41], return_token_ids=True)
    assert set(allowed.choices[0].model_extra["token_ids"]) <= {40, 41}


def test_ids_are_those_of_the_texts(demo_client: openai.OpenAI) -> None:
    whole = answered(demo_client, return_token_ids=True)
    ids = whole.choices[0].model_extra["token_ids"]
    assert Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).decode(ids) == whole.choices[0].message.content
    assert len(ids) == whole.usage.completion_tokens
    assert len(whole.model_extra["prompt_token_ids"]) == whole.usage.prompt_tokens
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = demo_client.chat.completions.create(
        **ASKED, stream=True, stream_options=options, extra_body={"return_token_ids": True}
    )
    chunks = list(stream)
    assert chunks[0].model_extra["prompt_token_ids"] == whole.model_extra["prompt_token_ids"]
    parts = [chunk.choices[0].model_extra.get("token_ids", []) for chunk in chunks if chunk.choices]
    assert [token for part in parts for token in part] == ids
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, len(ids))
