"""Arbitrary JSON into the request parser: a spec or a typed error, never anything else."""

import json
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.http.body import parse_json
from pagestream_gateway.http.drafts import chat_draft, completion_draft
from pagestream_gateway.http.refusals import refuse_for_chat, refuse_for_completions
from pagestream_gateway.http.schemas import ChatBody, CompletionBody, parse_body
from pagestream_gateway.models import load_model
from pagestream_gateway.requests import build_spec, check_draft, prepare
from pagestream_gateway.settings import LimitSettings
from starlette.datastructures import Headers
from synthetic_engine import MODEL, synthetic_card

LIMITS = LimitSettings()
LOADED = load_model(synthetic_card())
HEADERS = Headers({"idempotency-key": "k"})
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "logprobs", "tools", "best_of"}))
PLAUSIBLE = st.sampled_from([0, 1, -1, 0.5, 2**31, 2**63, True, "", "x", ["x"], [1], [[1]], None, {}, [], "continue"])
CHANGES = st.dictionaries(NAMES | st.text(max_size=8), ANY | PLAUSIBLE, max_size=5)


def take(document: dict[str, Any], is_chat: bool) -> None:
    """All that happens to a body before the queue."""
    if is_chat:
        draft = chat_draft(parse_body(ChatBody, refuse_for_chat(document)), HEADERS, document)
    else:
        draft = completion_draft(parse_body(CompletionBody, refuse_for_completions(document)), HEADERS, document)
    check_draft(draft, LIMITS)
    prepared = prepare(draft, LOADED, LIMITS)
    spec = build_spec(draft, prepared, request_id="r", model=MODEL, tenant="t", grace_ms=1)
    assert spec.sampling.HasField("seed")
    assert spec.SerializeToString()
    assert spec.seed_for_each_prompt == (len(spec.prompts) > 1 and document.get("seed") is None)
    for prompt in spec.prompts:
        assert len(prompt.ids) > 0
        assert len(prompt.ids) + spec.sampling.max_tokens <= LOADED.max_model_len


@settings(max_examples=300, deadline=None)
@given(CHANGES, st.booleans())
def test_any_fields_are_a_spec_or_a_typed_error(changes: dict[str, Any], is_chat: bool) -> None:
    good: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": "hi"}
    data = json.dumps({"model": MODEL, **good, **changes}).encode()
    with suppress(InvalidRequest):
        take(parse_json(data), is_chat)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | ANY.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_a_spec_or_a_typed_error(data: bytes) -> None:
    for is_chat in (True, False):
        with suppress(InvalidRequest):
            take(parse_json(data), is_chat)


def test_the_digest_of_a_body_is_of_what_it_says() -> None:
    def digest(document: dict[str, Any]) -> str:
        return completion_draft(parse_body(CompletionBody, document), HEADERS, document).body_digest

    assert digest({"prompt": "x", "n": 1}) == digest({"n": 1, "prompt": "x"})
    assert digest({"prompt": "x", "n": 1}) != digest({"prompt": "x", "n": 2})
