"""Encoding in pieces gives the tokenizer's own ids, and no text that fits is refused."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_gateway.core.text import encoder as module
from pagestream_gateway.core.text.bounds import most_chars_per_token
from pagestream_gateway.core.text.encoder import TextEncoder, TooManyTokensError, UnbrokenTextError
from support.engines.synthetic_engine import byte_tokenizer
from support.processes.stack import DEMO_MODEL
from tokenizers import AddedToken, Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
MANY = 10**6
WORD = st.sampled_from(
    [
        "the",
        "village's",
        "mill",
        " ",
        "  ",
        "\n",
        "\n\n ",
        "12345",
        "e\u0301",
        "\u0301",
        "كَتَبَ",
        "كَتَبَ ",
        "مُحَمَّدٌ 1",
        "\U0001e900\U0001e944",
        "é",
        "你好",
        "\uff0c",
        "👋",
        "!?",
        "<|im_start|>",
        "_",
        "x_y",
    ]
)
TEXT = st.lists(st.one_of(WORD, st.text(max_size=4)), max_size=60).map("".join)


def demo() -> Tokenizer:
    """Return the demo model's: words of the GPT-2 kind."""
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@cache
def words() -> Tokenizer:
    """Return one of the kind of Llama 3 and Qwen, with special tokens around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|s|>", "<|e|>", "<|im_start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()] * 4, trainer)
    ends = [("<|s|>", 0), ("<|e|>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|s|> $A <|e|>", special_tokens=ends)
    return tokenizer


@cache
def sentences() -> Tokenizer:
    """Return one of the kind of Llama 2: the whole text is one word, and unknown characters become bytes."""
    spelled = {f"<0x{byte:02X}>": byte for byte in range(256)}
    letters = "▁abcdefghijklmnopqrstuvwxyz0123456789"
    vocabulary = {**spelled, **{letter: 256 + number for number, letter in enumerate(letters)}, "▁t": 400, "he": 401}
    merges = [("▁", "t"), ("h", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<0x00>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


@pytest.fixture(params=[demo, words, sentences, byte_tokenizer])
def tokenizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return a tokenizer whose texts are cut into small pieces."""
    monkeypatch.setattr(module, "PIECE_CHARS", 16)
    make: Callable[[], Tokenizer] = request.param
    return make()


def test_pieces_have_the_tokenizers_own_ids(tokenizer: Tokenizer) -> None:
    encoder = TextEncoder(tokenizer)

    @settings(max_examples=150, deadline=None)
    @given(TEXT, st.booleans())
    def check(text: str, add_special_tokens: bool) -> None:
        expected = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        assert list(encoder.encode(text, add_special_tokens=add_special_tokens, limit=MANY)) == expected
        assert list(encoder.encode(text, add_special_tokens=add_special_tokens, limit=len(expected))) == expected
        with pytest.raises(TooManyTokensError):
            encoder.encode(text, add_special_tokens=add_special_tokens, limit=len(expected) - 1)

    check()


def test_words_are_encoded_in_pieces_and_sentences_are_not() -> None:
    for make, expected in ((demo, True), (words, True), (sentences, False)):
        encoder = TextEncoder(make())
        assert encoder._is_separable is expected, make.__name__


def test_what_is_surely_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TextEncoder(demo())
    seen: list[int] = []
    encode = TextEncoder._encoding

    def counted(self: TextEncoder, text: str, add_special_tokens: bool) -> Encoding:
        seen.append(len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(TextEncoder, "_encoding", counted)
    with pytest.raises(TooManyTokensError, match="8000000 characters, more than 1023 tokens can have"):
        encoder.encode("a b c d " * MANY, add_special_tokens=True, limit=1023)
    assert not seen
    with pytest.raises(TooManyTokensError, match="more than 200000 tokens"):
        encoder.encode("a b " * (MANY // 2), add_special_tokens=True, limit=200_000)
    assert sum(seen) < 3 * 200_000
    with pytest.raises(UnbrokenTextError):
        encoder.encode("a" * (2 * module.MAX_RUN_CHARS), add_special_tokens=True, limit=MANY)


ARABIC = "مُحَمَّدٌ كَتَبَ "


@pytest.mark.parametrize("make", [demo, words])
def test_text_of_letters_with_marks_is_encoded_in_pieces(
    make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, longest = make(), 0
    encode = TextEncoder._encoding

    def measured(self: TextEncoder, text: str, add_special_tokens: bool) -> Encoding:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(module, "PIECE_CHARS", 2**10)
    monkeypatch.setattr(module, "MAX_RUN_CHARS", 2**14)
    monkeypatch.setattr(TextEncoder, "_encoding", measured)
    text = ARABIC * 2**11
    found = TextEncoder(tokenizer).encode(text, add_special_tokens=True, limit=MANY)
    assert list(found) == tokenizer.encode(text).ids
    assert longest < 2 * 2**10
    with pytest.raises(TooManyTokensError):  # of which no part can be cut off
        TextEncoder(tokenizer).encode("a\u0301" * (2**13 - 1), add_special_tokens=True, limit=2**12)
    assert longest < 2 * 2**10


def _bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _stripping() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Strip()
    return tokenizer


def _mask() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def _incomplete() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("make", [_bert, _stripping, _mask, _incomplete])
def test_where_characters_can_vanish_no_number_of_them_is_too_many(make: Callable[[], Tokenizer]) -> None:
    assert most_chars_per_token(json.loads(make().to_str())) is None
