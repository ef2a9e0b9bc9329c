"""Prompts that are cut, against what the tokenizers library cuts."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream.v1.inference_pb2 import SamplingParams
from pagestream.v1.records_pb2 import AnswerForm, ModelCard
from pagestream_gateway import encoder
from pagestream_gateway import preparation as truncation
from pagestream_gateway.encoder import PIECE_CHARS, TextEncoder, frame_of
from pagestream_gateway.errors import InvalidRequest
from pagestream_gateway.models import LoadedModel
from pagestream_gateway.preparation import beginning, truncation_of
from pagestream_gateway.request import AskedPooling, AskedTruncation, Draft, TextPrompt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = {"<s>": len(CHARACTERS), "</s>": len(CHARACTERS) + 1}
VECTORS = AskedPooling()
TEXTS = st.text(min_size=1, max_size=12)


def tokenizer_of() -> Tokenizer:
    vocab = {token: number for number, token in enumerate([*CHARACTERS, *SPECIALS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", list(SPECIALS.items()))
    return tokenizer


def loaded(max_model_len: int = 64) -> LoadedModel:
    tokenizer = tokenizer_of()
    return LoadedModel(ModelCard(name="m", max_model_len=max_model_len), tokenizer, TextEncoder(tokenizer), None)


def asking(number: int | None, side: Any = None, pooling: AskedPooling | None = VECTORS) -> Draft:
    truncation = None if number is None else AskedTruncation(number, side)
    return Draft(
        "m", [TextPrompt("x")], "prompt", SamplingParams(), AnswerForm(), truncation=truncation, pooling=pooling
    )


def kept(text: str, number: int, side: Any = None, **draft: Any) -> list[int]:
    model = loaded()
    truncation = truncation_of(asking(number, side, **draft), model)
    assert truncation is not None
    return list(truncation.of_prompt(array("I", model.tokenizer.encode(text).ids), has_special_tokens=True))


@given(text=TEXTS, number=st.integers(3, 20))
def test_the_beginning_of_a_text_is_kept_within_its_special_tokens(text: str, number: int) -> None:
    reference = tokenizer_of()
    reference.enable_truncation(number)
    assert kept(text, number) == reference.encode(text).ids


@given(text=TEXTS, number=st.integers(2, 20))
def test_what_is_gone_on_with_keeps_its_end_within_its_special_tokens(text: str, number: int) -> None:
    reference = tokenizer_of()
    reference.enable_truncation(number, direction="left")
    assert kept(text, number, pooling=None) == reference.encode(text).ids


@given(text=TEXTS, number=st.integers(1, 20))
def test_a_side_that_is_named_is_cut_as_it_is(text: str, number: int) -> None:
    whole = tokenizer_of().encode(text).ids
    for pooling in (None, VECTORS):
        assert kept(text, number, "right", pooling=pooling) == whole[:number]
        assert kept(text, number, "left", pooling=pooling) == whole[-number:]


@given(query=TEXTS, document=TEXTS, number=st.integers(5, 40))
def test_the_longer_of_a_pair_is_cut_first(query: str, document: str, number: int) -> None:
    reference = tokenizer_of()
    reference.enable_truncation(number, strategy="longest_first")
    assert pair(query, document, number) == reference.encode(query, document).ids


@given(query=st.text("ab", min_size=1, max_size=4), document=TEXTS, number=st.integers(9, 40))
def test_a_document_is_cut_alone_beside_a_limit_of_its_own(query: str, document: str, number: int) -> None:
    reference = tokenizer_of()
    reference.enable_truncation(number, strategy="only_second")
    assert pair(query, document, number, num_doc_tokens=40) == reference.encode(query, document).ids
    with pytest.raises(InvalidRequest, match="room for a query of 9 tokens"):
        pair("a" * 9, document, 12, num_doc_tokens=40)


def pair(query: str, document: str, number: int, **asked: Any) -> list[int]:
    model = loaded()
    truncation = truncation_of(asking(number, pooling=AskedPooling(**asked)), model)
    frame = frame_of(model.tokenizer)
    assert truncation is not None
    assert frame is not None
    parts = [array("I", model.tokenizer.encode(text, add_special_tokens=False).ids) for text in (query, document)]
    return list(truncation.of_pair(*parts, frame))


@given(text=st.text(max_size=400), number=st.integers(1, 40))
def test_a_beginning_ends_with_a_whole_character(text: str, number: int) -> None:
    found = beginning(text, number, loaded())
    assert text.startswith(found)
    assert len(found.encode()) <= number
    assert found == text or len(text[: len(found) + 1].encode()) > number


def words_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are up to a word long."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(initial_alphabet=CHARACTERS, vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator(["the village mill turns"] * 9, trainer)
    return tokenizer


WORDS_MODEL = replace(loaded(), tokenizer=words_tokenizer(), encoder=TextEncoder(words_tokenizer()))
WORD = st.sampled_from(["the", " village", " mill", " turns", "é", "你好", " ", "\n\n", "12", "!?", "_x"])


@given(text=st.lists(WORD, max_size=80).map("".join), number=st.integers(1, 60))
def test_a_beginning_that_was_found_in_pieces_is_that_of_the_whole(text: str, number: int) -> None:
    whole = beginning(text, number, WORDS_MODEL)
    with pytest.MonkeyPatch.context() as small:
        for module in (encoder, truncation):
            small.setattr(module, "PIECE_CHARS", 16)
        assert beginning(text, number, WORDS_MODEL) == whole


@pytest.mark.parametrize(("text", "most"), [("the mill " * 40_000, 2 * PIECE_CHARS), ("x" * 200_000, 4 * PIECE_CHARS)])
def test_a_beginning_is_encoded_in_pieces(text: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    tokenizer = words_tokenizer()

    class Recorded:
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("encode_batch"):
                return getattr(tokenizer, name)

            def encode(texts: list[str], **options: Any) -> Any:
                lengths.extend(map(len, texts))
                return getattr(tokenizer, name)(texts, **options)

            return encode

    recorded: Any = Recorded()
    model = replace(loaded(), tokenizer=recorded, encoder=TextEncoder(recorded))
    number = 80_000
    found = beginning(text, number, model)
    assert max(lengths) <= most
    assert tokenizer.encode(found).ids == tokenizer.encode(text).ids[:number]


def test_what_few_tokens_stand_for_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single token here: all of a text would be encoded, again and again."""
    monkeypatch.setattr(truncation, "MAX_RUN_CHARS", 1 << 16)
    tokenizer = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    model = replace(loaded(), tokenizer=tokenizer, encoder=TextEncoder(tokenizer))
    assert beginning("y" * 10_000, 3, model) == "y" * 10_000
    with pytest.raises(encoder.UnbrokenTextError):
        beginning("y" * 1_000_000, 3, model)


def test_a_chat_keeps_the_special_tokens_that_its_template_begins_with() -> None:
    ids = array("I", [SPECIALS["<s>"], *range(10)])
    for side, expected in ((None, [SPECIALS["<s>"], 8, 9]), ("left", [7, 8, 9])):
        cut = truncation_of(asking(3, side, pooling=None), loaded())
        assert cut is not None
        assert list(cut.of_prompt(ids, has_special_tokens=False, is_chat=True)) == expected
        assert list(cut.of_prompt(ids, has_special_tokens=False)) == [7, 8, 9]


def test_most_is_what_the_model_takes() -> None:
    for number in (-1, 64, 63):
        for pooling in (None, VECTORS):
            assert len(kept("x" * 100, number, pooling=pooling)) == 63
    for number in (0, 65, -2):
        with pytest.raises(InvalidRequest, match="from 1 to the model's context length, 64, got"):
            kept("x", number)
    with pytest.raises(InvalidRequest, match="must be less than the model's context length"):
        truncation_of(asking(None, pooling=AskedPooling(num_doc_tokens=64)), loaded())
