"""Arbitrary bytes into the request parser: the spec that they ask for, or a refusal that names what is wrong."""

import json
from codecs import BOM_UTF8
from collections import Counter
from typing import Any

import pagestream_streams
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream.v1.records_pb2 import RequestSpec
from pagestream_gateway.error_codes import error_report
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.gateway import checked_draft
from pagestream_gateway.http.body import count_parts, parse_body, parse_json
from pagestream_gateway.models import load_model
from pagestream_gateway.openai import chat as chat_completions
from pagestream_gateway.openai import completions
from pagestream_gateway.openai.chat import ChatBody
from pagestream_gateway.openai.completions import CompletionBody
from pagestream_gateway.preparation import prepare
from pagestream_gateway.request import ChatPrompt
from pagestream_gateway.settings import LimitSettings
from pagestream_streams import StreamsError
from pydantic import ValidationError
from starlette.datastructures import Headers
from support.engines.synthetic_engine import MODEL, synthetic_card

LIMITS = LimitSettings()
LOADED = load_model(synthetic_card())
VOCAB_SIZE = LOADED.card.vocab_size
HEADERS = Headers({"idempotency-key": "k"})
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 1e6) | st.integers(0, 3),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": TEXT | st.lists(TEXT, max_size=4),
    "stop_token_ids": TOKENS,
    "max_tokens": st.integers(10, 40),
    "min_tokens": st.integers(0, 10),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB_SIZE - 1).map(str), st.floats(-100, 100), max_size=3),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
}
"""Values that any request may have, whatever its other fields are."""
WRONG_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(max_value=0) | st.integers(129) | st.booleans() | st.text(max_size=3),
    "temperature": st.floats(max_value=0, exclude_max=True) | st.text(max_size=3) | st.booleans(),
    "top_p": st.floats(max_value=0) | st.floats(1, exclude_min=True),
    "top_k": st.integers(max_value=-2) | st.integers(2**31),
    "min_p": st.floats(max_value=0, exclude_max=True) | st.floats(1, exclude_min=True),
    "presence_penalty": st.floats(2, exclude_min=True) | st.floats(max_value=-2, exclude_max=True),
    "frequency_penalty": st.floats(2, exclude_min=True) | st.floats(max_value=-2, exclude_max=True),
    "repetition_penalty": st.floats(max_value=0),
    "seed": st.integers(2**63)
    | st.integers(max_value=-(2**63) - 1)
    | st.floats().filter(lambda value: not value.is_integer()),
    "stop": st.just("") | st.lists(st.integers(), min_size=1) | st.just(["x"] * 65) | st.just(["x" * 1025]),
    "stop_token_ids": st.lists(st.integers(VOCAB_SIZE), min_size=1) | st.lists(st.text(), min_size=1),
    "max_tokens": st.integers(max_value=0) | st.integers(LOADED.max_model_len + 1),
    "min_tokens": st.integers(LOADED.max_model_len) | st.integers(max_value=-1),
    "logit_bias": st.dictionaries(st.integers(VOCAB_SIZE).map(str) | st.just("x"), st.floats(-9, 9), min_size=1),
    "best_of": st.integers(max_value=0) | st.integers(LIMITS.max_n + 1),
    "ignore_eos": st.integers() | st.text(max_size=3),
}
NAMES = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "guided_json"}))
PLAUSIBLE = st.sampled_from([0, 1, -1, 0.5, 2**31, 2**63, True, "", "x", ["x"], [1], [[1]], None, {}, [], "continue"])


def good(*, is_chat: bool) -> st.SearchStrategy[dict[str, Any]]:
    if is_chat:
        message = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXT})
        asked: dict[str, st.SearchStrategy[Any]] = {"messages": st.lists(message, min_size=1, max_size=2)}
    else:
        asked = {
            "prompt": TEXT | TOKENS | st.lists(TEXT, min_size=1, max_size=3) | st.lists(TOKENS, min_size=1, max_size=3)
        }
    return st.fixed_dictionaries(asked, optional=GOOD)


BODIES = good(is_chat=True) | good(is_chat=False)
CHANGED = st.builds(
    lambda body, changes: {**body, **changes},
    BODIES,
    st.dictionaries(NAMES | st.text(max_size=8), ANY | PLAUSIBLE, min_size=1, max_size=3),
)
CUT = st.builds(
    lambda body, cut, other: (data := json.dumps(body).encode())[: cut % len(data)] + other,
    BODIES,
    st.integers(0),
    st.binary(max_size=3),
)
BYTES = st.one_of(
    st.binary(max_size=60),
    CUT,
    *(values.map(lambda value: json.dumps(value).encode()) for values in (ANY, BODIES, CHANGED)),
)


def accept(document: dict[str, Any], *, is_chat: bool) -> RequestSpec:
    """All that happens to a body before the queue."""
    draft = (chat_completions if is_chat else completions).parse(document, HEADERS)
    checked_draft(draft, LIMITS)
    return prepare(draft, LOADED, LIMITS)


def check_spec(spec: RequestSpec, document: dict[str, Any], *, is_chat: bool) -> None:
    """The spec survives its storage, keeps within the limits, and is what the document asks for."""
    assert RequestSpec.FromString(spec.SerializeToString()) == spec
    sampling = spec.sampling
    assert 1 <= len(spec.prompts) <= LIMITS.max_prompts
    assert 1 <= sampling.n * len(spec.prompts) <= LIMITS.max_choices
    for prompt in spec.prompts:
        assert len(prompt.ids) > 0
        assert all(token < VOCAB_SIZE for token in prompt.ids)
        assert len(prompt.ids) + sampling.max_tokens <= LOADED.max_model_len
    assert sampling.HasField("seed")
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert 0 <= sampling.temperature < float("inf")
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 < sampling.repetition_penalty < float("inf")
    assert spec.seed_for_each_prompt == (len(spec.prompts) > 1 and document.get("seed") is None)
    names = {*GOOD, "max_tokens"} - ({"max_tokens"} if document.get("max_completion_tokens") is not None else set())
    for name in names:
        value = document.get(name)
        if value is not None:
            assert shown(getattr(sampling, name)) == expected(name, value), name
    asked = {name for name, value in document.items() if value is not None}
    unknown = asked - (ChatBody if is_chat else CompletionBody).model_fields.keys()
    assert not [name for name in unknown if name not in KNOWN_NEUTRAL], "an unknown field was ignored"


KNOWN_NEUTRAL = {*chat_completions.UNSUPPORTED, *completions.UNSUPPORTED}


def shown(value: Any) -> object:
    return value if isinstance(value, bool | int | float) else dict(value) if hasattr(value, "items") else list(value)


def expected(name: str, asked: Any) -> object:
    if name == "logit_bias":
        return {int(token): bias for token, bias in asked.items()}
    return [asked] if isinstance(asked, str) else asked


def check_refusal(refused: InvalidRequest, document: dict[str, Any] | None) -> None:
    """The refusal has a code for its API, and the field that it names was sent, or is one that must be."""
    report = error_report(refused)
    assert report.http_status == 400
    assert report.code in {"invalid_value", "unknown_parameter", "unsupported_parameter", "context_length_exceeded"}
    assert refused.message
    if document is None:
        return
    field = refused.field
    assert field is not None
    # The log probabilities and the limit of a chat have two names each; a body is needed whole.
    sent = [name[:80] or '""' for name in [*document, "prompt", "messages", "logprobs", "max_tokens"]]
    assert any(field == name or field.startswith(f"{name}.") for name in sent), field


@settings(max_examples=80)
@given(st.data(), st.booleans())
def test_good_values_are_the_spec_that_they_ask_for(data: st.DataObject, is_chat: bool) -> None:
    document = data.draw(good(is_chat=is_chat))
    check_spec(accept(parse_json(json.dumps(document).encode()), is_chat=is_chat), document, is_chat=is_chat)


@pytest.mark.parametrize(
    ("given_values", "named"),
    [
        ({"min_tokens": 1, "max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"n": 0, "best_of": 2}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
    ],
)
def test_of_two_values_the_one_that_is_wrong_by_itself_is_named(given_values: dict[str, int], named: str) -> None:
    body = json.dumps({"prompt": "0", **given_values}).encode()
    with pytest.raises(InvalidRequest) as caught:
        accept(parse_json(body), is_chat=False)
    assert caught.value.field == named


@settings(max_examples=120)
@given(st.data(), st.booleans(), st.sampled_from(sorted(WRONG_VALUES)))
def test_one_wrong_value_is_refused_by_its_name(data: st.DataObject, is_chat: bool, name: str) -> None:
    document = {**data.draw(good(is_chat=is_chat)), name: data.draw(WRONG_VALUES[name])}
    with pytest.raises(InvalidRequest) as caught:
        accept(parse_json(json.dumps(document).encode()), is_chat=is_chat)
    field = caught.value.field or ""
    # JSON has no infinity and no NaN: these are refused before there are fields.
    assert field.partition(".")[0] == name or "is no JSON number" in caught.value.message


def test_a_mark_of_byte_order_is_skipped() -> None:
    """Windows' editors and PowerShell write one before UTF-8."""
    assert parse_json(BOM_UTF8 + b'{"a": "\xef\xbb\xbfb"}') == {"a": "\ufeffb"}
    with pytest.raises(InvalidRequest):
        parse_json(2 * BOM_UTF8 + b"{}")


def test_any_bytes_are_a_spec_or_a_typed_error() -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=200)
    @given(BYTES, st.booleans())
    def check(data: bytes, is_chat: bool) -> None:
        document = None
        try:
            document = parse_json(data)
            spec = accept(document, is_chat=is_chat)
        except InvalidRequest as refused:
            check_refusal(refused, document)
            outcomes["unread" if document is None else "refused"] += 1
        else:
            check_spec(spec, document, is_chat=is_chat)
            outcomes["accepted"] += 1

    check()
    assert min(outcomes[kind] for kind in ("unread", "refused", "accepted")) >= 10, outcomes


def test_the_digest_of_a_body_is_of_what_it_says() -> None:
    def digest(document: dict[str, Any]) -> str:
        return completions.parse(document, HEADERS).body_digest

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
    ({"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}, "messages.0.tool_calls.0.id"),
    ({"messages": [{"role": "user", "content": "x"}], "tools": [{}] * MANY}, "tools.0.function"),
]


@pytest.mark.parametrize(("document", "field"), WRONG)
def test_mistakes_are_not_collected(document: dict[str, Any], field: str) -> None:
    """Each takes memory, and only the first is reported."""
    kind = ChatBody if "messages" in document else CompletionBody
    if not field:
        assert parse_body(kind, document).model_dump(exclude_none=True) == document
        return
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(document)
    assert caught.value.error_count() <= 6
    with pytest.raises(InvalidRequest) as refused:
        parse_body(kind, document)
    assert refused.value.field == field


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


def test_usage_in_each_chunk_needs_usage_at_all() -> None:
    body = {"model": MODEL, "prompt": "hello", "stream": True}
    for options, expected in (
        ({"include_usage": True, "continuous_usage_stats": False}, (True, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"continuous_usage_stats": True}, (False, False)),
    ):
        answer = completions.parse({**body, "stream_options": options}, HEADERS).answer
        assert (answer.include_usage, answer.continuous_usage) == expected


CALL = {"id": "1", "index": 0, "function": {"name": "f", "arguments": '{"a": "tru'}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_tokens": 16.0, "top_k": 5.0}, {"max_tokens": 16, "top_k": 5}),
        ({"unheard_of": None, "tool_calls": None}, {}),
        ({"response_format": {"type": "text", "json_schema": None}}, {}),
        ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": None, "structural_tag": None}}, {}),
        ({"tools": [{"function": {"name": "m" * 128}, "cache_control": {"type": "ephemeral"}}]}, {}),
        ({"mm_payload": "tensors", "include_reasoning": False, "return_token_ids": True}, {}),
    ],
)
def test_what_clients_of_vllm_send_unasked_is_taken(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "refusal": None, "reasoning": "Hm.", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "reasoning_content": "So?", "annotations": None},
    ]
    parsed = chat_completions.parse({"model": MODEL, "messages": messages, **changes}, HEADERS)
    for name, value in expected.items():
        assert getattr(parsed.sampling, name) == value
    [prompt] = parsed.prompts
    assert isinstance(prompt, ChatPrompt)
    shown = [message.get("reasoning_content") for message in prompt.messages]
    assert shown == [message.get("reasoning") for message in prompt.messages] == [None, "Hm.", "So?"]
    # What was cut off is an empty object: a template may look into it.
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert all("cache_control" not in str(tool) for tool in prompt.tools.definitions)


def test_every_error_of_the_streams_has_its_own_code() -> None:
    """But those that no call here can raise."""
    unlisted = {"StreamsError", "ServerNotFound", "ModelInUse", "RequestsUnfinished", "DataFolderRefused"}
    kinds = {name: getattr(pagestream_streams, name) for name in pagestream_streams.__all__}
    errors = {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, StreamsError)}
    for name in errors.keys() - unlisted:
        made = errors[name].__new__(errors[name], "x")
        vars(made).update(name="x", retry_after_s=1.0, rates=())
        assert error_report(made).code != "internal_error", name
    assert len(errors) > 10
    secret = error_report(KeyError("secret"))
    assert (secret.code, "secret" in secret.message) == ("internal_error", False)
