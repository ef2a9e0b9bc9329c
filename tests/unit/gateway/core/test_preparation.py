from typing import Any, Literal

import pytest
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm, ModelCard
from pagestream_gateway.core.drafts import AskedTruncation, ChatPrompt, Draft, TokenPrompt
from pagestream_gateway.core.models import load_model
from pagestream_gateway.core.preparation import PreparedRequest, build_spec, prepare
from pagestream_gateway.errors import InvalidRequest, UnsupportedField
from pagestream_gateway.settings import LimitSettings
from support.engines.synthetic_engine import synthetic_card


def seed(key: str, *, tenant: str = "t", digest: str = "d", given: int | None = None) -> int:
    asked = SamplingParams() if given is None else SamplingParams(seed=given)
    draft = Draft("m", [TokenPrompt([1])], "prompt", asked, AnswerForm(), idempotency_key=key, body_digest=digest)
    prepared = PreparedRequest([[1]], SamplingParams(seed=5 if given is None else given), [])
    spec = build_spec(draft, prepared, request_id="r", model="m", tenant=tenant, grace_ms=1)
    return spec.sampling.seed


def test_each_try_with_an_idempotency_key_has_one_seed() -> None:
    assert seed("k") == seed("k")
    others = {seed("k"), seed("other"), seed("k", tenant="u"), seed("k", digest="e")}
    assert len(others) == 4
    assert max(others) < 1 << 63


def test_a_given_seed_and_one_without_a_key_stay() -> None:
    assert seed("k", given=9) == 9
    assert seed("") == 5


@pytest.mark.parametrize("asked", [{"allowed_token_ids": [3]}, {"bad_words": ["a"]}])
def test_constraints_that_an_older_engine_would_skip_are_refused(asked: dict[str, Any]) -> None:
    card = synthetic_card()
    draft = Draft("m", [TokenPrompt([1])], "prompt", SamplingParams(**asked), AnswerForm())
    assert prepare(draft, load_model(card), LimitSettings()).sampling.max_tokens
    card.takes_output_constraints = False
    with pytest.raises(UnsupportedField, match="are of an earlier version"):
        prepare(draft, load_model(card), LimitSettings())


def test_cards_of_engines_of_the_version_before_say_what_they_take() -> None:
    """Its number stays, whatever the name: cards are read by gateways of other versions."""
    assert ModelCard.DESCRIPTOR.fields_by_name["takes_output_constraints"].number == 16


@pytest.mark.parametrize(
    ("field", "asked"),
    [("best_of", {"best_of": 100}), ("beam_width", {"use_beam_search": True, "beam_width": 60}), ("n", {"n": 100})],
)
def test_all_sequences_of_a_request_count(field: str, asked: dict[str, Any]) -> None:
    draft = Draft("m", [TokenPrompt([1])] * 5, "prompt", SamplingParams(**asked), AnswerForm())
    with pytest.raises(InvalidRequest, match=f"prompts times {field} is .*, at most 256") as caught:
        prepare(draft, load_model(synthetic_card()), LimitSettings())
    assert caught.value.field == field


def open_chat(card: ModelCard, side: Literal["left", "right"]) -> PreparedRequest:
    """Prepare a chat that is cut to 20 tokens."""
    chat = ChatPrompt([{"role": "user", "content": "abcdefgh" * 9}])
    cut = AskedTruncation(20, side)
    draft = Draft("m", [chat], "messages", SamplingParams(), AnswerForm(), truncation=cut)
    return prepare(draft, load_model(card), LimitSettings())


def test_what_begins_the_reasoning_is_not_cut_off() -> None:
    card = synthetic_card()
    assert open_chat(card, "right")
    card.chat_template += "<think>\n"
    assert open_chat(card, "left")
    with pytest.raises(InvalidRequest, match="begins the reasoning") as caught:
        open_chat(card, "right")
    assert caught.value.field == "truncation_side"


def test_templates_find_earlier_reasoning_under_both_names() -> None:
    card = synthetic_card()
    card.chat_template = "{{ messages[0].reasoning }} {{ messages[0].reasoning_content }}"
    chat = ChatPrompt([{"role": "assistant", "content": "", "reasoning_content": "why"}])
    draft = Draft("m", [chat], "messages", SamplingParams(), AnswerForm())
    model = load_model(card)
    assert model.decode(list(prepare(draft, model, LimitSettings()).prompts[0])) == "why why"
