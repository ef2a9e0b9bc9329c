"""Arbitrary JSON into the request parser: a spec or a typed error, never anything else."""

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_gateway.api.openai.body import count_parts, parse_json
from pagestream_gateway.api.openai.drafts import chat_draft, completion_draft
from pagestream_gateway.api.openai.refusals import refuse_for_chat, refuse_for_completions
from pagestream_gateway.api.openai.schemas import ChatBody, CompletionBody, parse_body
from pagestream_gateway.core.models import load_model
from pagestream_gateway.core.submission import build_spec, check_draft, prepare
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.settings import LimitSettings
from pydantic import ValidationError
from starlette.datastructures import Headers
from support.engines.synthetic_engine import MODEL, synthetic_card

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


MANY = 1000
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": [{}] * MANY}, "prompt"),
    ({"prompt": [[{}] * MANY] * MANY}, "prompt"),
    ({"prompt": [1] * MANY + ["x"] * MANY}, "prompt"),
    ({"prompt": [[1]] * MANY}, ""),
    ({"prompt": [1] * MANY}, ""),
    ({"prompt": "x", "stop": [5] * MANY}, "stop"),
    ({"prompt": "x", "stop_token_ids": [1] * 7 + [-1] * MANY}, "stop_token_ids.7"),
    ({"prompt": "x", "logit_bias": {"5": 1} | {f"{i}.": "x" for i in range(MANY)}}, "logit_bias.0."),
    ({"prompt": "x", "logit_bias": {str(i): float("inf") for i in range(MANY)}}, "logit_bias.0"),
    ({"prompt": "x"} | {f"x{i}": 1 for i in range(MANY)}, "x0"),
    ({"prompt": "x", "stream_options": {f"x{i}": 1 for i in range(MANY)}}, "stream_options.x0"),
    ({"messages": [{"role": "king"}] * MANY}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": "x"} | {f"x{i}": 1 for i in range(MANY)}]}, "messages.0.x0"),
    ({"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}] * MANY}]}, "messages.0.tool_calls.0"),
    ({"messages": [{"role": "user", "content": "x", "annotations": [{}] * MANY}]}, "messages.0.annotations.0"),
]


@pytest.mark.parametrize(("document", "field"), WRONG)
def test_mistakes_are_not_collected(document: dict[str, Any], field: str) -> None:
    """Each takes memory, and only the first is told."""
    kind = ChatBody if "messages" in document else CompletionBody
    if not field:
        assert parse_body(kind, document).model_dump(exclude_none=True) == document
        return
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(document)
    assert caught.value.error_count() <= 6
    with pytest.raises(InvalidRequest) as told:
        parse_body(kind, document)
    assert told.value.field == field


def parts(value: object) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(parts, value.values()))
    return 1 + sum(map(parts, value)) if isinstance(value, list) else 0


@given(ANY | st.text(alphabet='[{:"\\\\').map(lambda text: {text: [text, {"x": text}]}))
def test_parts_are_counted_outside_strings(value: object) -> None:
    expected = parts(value)
    data = json.dumps(value).encode()
    assert count_parts(data, 10**6) == expected
    assert count_parts(data, 3) == min(expected, 3)


def test_counting_takes_linear_time_whatever_the_bytes() -> None:
    for data in (b'"' + b'\\"' * 10**6, b'"[' * 10**6, b'"' * 10**6 + b"\\", b"\\" * 10**6, b'"\\' * 10**6):
        assert count_parts(data, 10**7) <= 10**6


def test_a_body_of_too_many_parts_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="more than 262144 lists"):
        parse_json(b'{"prompt":[' + b"[]," * 2**18 + b"[]]}")
    text = "[{:" * 2**18
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_bytes_that_are_no_text_are_found_among_many() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"a":[1,{"b":[]}],"prompt":[' + b"1," * 1000 + b'"\xff"]}')
    assert caught.value.field == "prompt.1000"
