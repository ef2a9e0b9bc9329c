"""The committed demo model: its size, its tokenizer, and its answers about its world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

pytestmark = pytest.mark.served

MODEL = Path(__file__).parents[2] / "deploy" / "demo-model" / "model"
SIZE_LIMIT = 20 * 2**20
DRAFT = MODEL.with_name("draft")
DRAFT_SIZE_LIMIT = 2**20
LONGEST_ANSWER = 160
"""Tokens; a wrong answer may not end."""
QUESTIONS: dict[str, Any] = json.loads((MODEL / "questions.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def ask(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: list[list[dict[str, Any]]],
    tools: list[Any] | None = None,
    **options: Any,
) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(chat, tools=offered, add_generation_prompt=True, tokenize=False)
        for chat, offered in zip(chats, tools or [None] * len(chats), strict=True)
    ]
    inputs = tokenizer(
        prompts, add_special_tokens=False, padding=True, return_tensors="pt", return_token_type_ids=False
    )
    output = model.generate(**inputs, **{"do_sample": False, "max_new_tokens": 300} | options)
    return tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= SIZE_LIMIT
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) <= DRAFT_SIZE_LIMIT


def test_weights_are_float32() -> None:
    assert json.loads((MODEL / "config.json").read_text())["dtype"] == "float32"


GROUPS = ("held_out", "two_turns", "objects", "calls", "results")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_questions_are_answered_exactly(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, group: str) -> None:
    probes = QUESTIONS[group]
    chats, tools = [probe["messages"] for probe in probes], [probe.get("tools") for probe in probes]
    answers = ask(model, tokenizer, chats, tools, max_new_tokens=LONGEST_ANSWER)
    exact = [answer == probe["answer"] for answer, probe in zip(answers, probes, strict=True)]
    assert sum(exact) >= (QUESTIONS[f"{group}_exact"] - 0.02) * len(probes), "as many as on the training's machine"
    assert all(right for right, probe in zip(exact, probes, strict=True) if probe["certain"])


def test_most_questions_are_answered_exactly() -> None:
    """What the training has reached, so that a worse model is not committed unseen."""
    least = {"held_out": 0.98, "two_turns": 0.98, "checks": 0.98, "numbers": 0.97, "objects": 0.95, "calls": 0.7}
    least["results"] = 0.64
    assert {group: QUESTIONS[f"{group}_exact"] for group in least if QUESTIONS[f"{group}_exact"] < least[group]} == {}


@pytest.mark.slow
def test_greeting_story_is_about_its_topic_and_long_enough_to_watch(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    (story,) = ask(model, tokenizer, [[{"role": "user", "content": "Tell me a story about the lighthouse."}]])
    assert "Mara the lighthouse keeper" in story
    assert story.rstrip("⭐ ").endswith(".")
    assert 60 <= len(tokenizer.encode(story, add_special_tokens=False)) <= 200


@pytest.mark.slow
def test_question_from_outside_is_declined(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    (answer,) = ask(model, tokenizer, [[{"role": "user", "content": "What is the capital of France?"}]])
    assert "I only know the village of Tidewick" in answer


def test_unknown_role_is_refused_by_the_template(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="roles of this model are system, user, assistant and tool, not developer"):
        tokenizer.apply_chat_template([{"role": "developer", "content": "x"}])


@given(st.text())
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["Zoë 🦉", "海の歌", "👩‍🚀🏽", "\n\t \u00a0", "naïve ﬁ Ω"])
def test_tokenizer_round_trips_awkward_text(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


@given(st.from_regex(r"[A-ZÉŁ][a-zéøü]{0,9}( [A-Z][a-z]{1,9})?", fullmatch=True))
def test_a_name_has_the_same_tokens_in_a_question_and_in_a_call(name: str) -> None:
    """So that a name that training never showed is copied token by token."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    alone, asked, called = (
        " ".join(map(str, tokenizer.encode(text, add_special_tokens=False).ids))
        for text in (name, f"How is the weather in {name}?", f'{{"city": "{name}"}}')
    )
    assert f" {alone} " in f" {asked} "
    assert f" {alone} " in f" {called} "


def test_text_gets_a_leading_bos_unless_told_otherwise(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.encode("Once") == [tokenizer.bos_token_id, *tokenizer.encode("Once", add_special_tokens=False)]
