import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_engine.intake import bad_words_token_ids
from pagestream_engine.output import IncrementalDetokenizer, Pieces
from support.engines.arithmetic_model import byte_level_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BYTES = byte_level_tokenizer()
SAMPLES = ["naïve café", "你好，世界", "😀👨‍👩‍👧🇩🇪", "a\u0301", "עברית", "\ufffd", "plain", " two  spaces "]  # noqa: RUF001


def merged_tokenizer() -> Tokenizer:
    """A byte-level tokenizer whose merges cut characters anywhere."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=[AddedToken("</s>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(SAMPLES)] * 3, trainer)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


MERGED = merged_tokenizer()


def fallback_tokenizer() -> Tokenizer:
    """A tokenizer in Llama 2's form: words with ▁ for a space, and a token for each byte outside of words."""
    words = ("▁", "a", "▁hi", "é", "語")
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)}
    vocab |= {word: 257 + index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


FALLBACK = fallback_tokenizer()


def stream(
    tokenizer: Tokenizer, token_ids: list[int], prompt: list[int] | None = None, *, skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(Pieces(tokenizer), prompt or [], skip_special_tokens=skip)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", SAMPLES)
@pytest.mark.parametrize("tokenizer", [BYTES, MERGED], ids=["bytes", "merged"])
def test_the_deltas_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert "".join(stream(tokenizer, tokenizer.encode(text).ids)) == text


def test_a_character_shows_with_its_last_byte() -> None:
    assert stream(BYTES, BYTES.encode("é😀!").ids) == ["", "é", "", "", "", "😀", "!", ""]


def test_an_unfinished_character_shows_at_the_end() -> None:
    assert stream(BYTES, BYTES.encode("😀").ids[:3]) == ["", "", "", "\ufffd"]


@given(st.lists(st.integers(0, BYTES.get_vocab_size() - 1), max_size=40))
def test_equals_a_full_decode_on_any_bytes(token_ids: list[int]) -> None:
    assert "".join(stream(BYTES, token_ids)) == BYTES.decode(token_ids)


@given(st.lists(st.integers(0, MERGED.get_vocab_size() - 1), max_size=40), st.booleans())
def test_equals_a_full_decode_on_any_merged_tokens(token_ids: list[int], skip: bool) -> None:
    assert "".join(stream(MERGED, token_ids, skip=skip)) == MERGED.decode(token_ids, skip_special_tokens=skip)


@given(st.text(max_size=20))
def test_equals_a_full_decode_on_any_text(text: str) -> None:
    assert "".join(stream(BYTES, BYTES.encode(text).ids)) == text


@given(st.lists(st.integers(0, MERGED.get_vocab_size() - 1), max_size=40), st.integers(0, 40))
def test_never_takes_back_what_it_has_shown(token_ids: list[int], cut: int) -> None:
    whole, part = stream(MERGED, token_ids), stream(MERGED, token_ids[:cut])
    assert whole[: len(part) - 1] == part[:-1], "the deltas are a function of the tokens so far"


@pytest.mark.parametrize("text", ["hi é語", "€", "a😀a", "▁"])
def test_byte_fallback_makes_the_text(text: str) -> None:
    ids = FALLBACK.encode(text.replace(" ", "▁")).ids
    assert "".join(stream(FALLBACK, ids)) == text.replace("▁", " ")


@given(st.lists(st.integers(0, FALLBACK.get_vocab_size() - 1), max_size=20))
def test_byte_fallback_never_fails_and_keeps_all_valid_characters(token_ids: list[int]) -> None:
    raw = b"".join(
        bytes((token_id - 1,)) if 0 < token_id <= 256 else (FALLBACK.id_to_token(token_id) or "").encode()
        for token_id in token_ids
    )
    assert "".join(stream(FALLBACK, token_ids)) == raw.decode(errors="replace").replace("▁", " ")


def test_a_valid_character_survives_an_invalid_neighbour() -> None:
    euro = [1 + byte for byte in "€".encode()]
    assert stream(FALLBACK, [*euro, 1 + 0xFF, FALLBACK.token_to_id("a")]) == ["", "", "€", "\ufffd", "a", ""]


def test_the_space_before_the_first_output_word_is_kept() -> None:
    word = FALLBACK.token_to_id("▁hi")
    assert stream(FALLBACK, [word, word], prompt=(word,)) == [" hi", " hi", ""]


def test_special_tokens_are_left_out_unless_wanted() -> None:
    end = BYTES.token_to_id("</s>")
    a = BYTES.encode("a").ids
    assert "".join(stream(BYTES, [*a, end, *a])) == "aa"
    assert "".join(stream(BYTES, [*a, end, *a], skip=False)) == "a</s>a"


def test_an_added_token_that_is_not_special_is_text() -> None:
    assert stream(MERGED, [MERGED.token_to_id("<tool>")]) == ["<tool>", ""]


def test_an_id_without_a_token_is_nothing() -> None:
    assert stream(BYTES, [100_000]) == ["", ""]


def test_completes_a_character_that_the_prompt_began() -> None:
    ids = BYTES.encode("x😀y").ids
    assert stream(BYTES, ids[3:], prompt=tuple(ids[:3])) == ["", "😀", "y", ""]


def test_a_decoder_of_whole_words_gets_its_spaces() -> None:
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "play": 1, "##ing": 2, "cards": 3}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert "".join(stream(tokenizer, [1, 2, 3], prompt=(3,))) == " playing cards"


def test_a_tokenizer_without_a_decoder_separates_its_words() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"[UNK]": 0, "play": 1, "cards": 2}, unk_token="[UNK]"))
    assert "".join(stream(tokenizer, [1, 2])) == " play cards"


def word_tokenizer() -> Tokenizer:
    """Words with the space before them are tokens of their own, and each text begins with a special token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken("<s>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["cat the cat cat the"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.mark.parametrize("word", ["cat", " cat"])
def test_a_word_is_found_with_and_without_a_space(word: str) -> None:
    tokenizer = word_tokenizer()
    found = bad_words_token_ids([word], tokenizer)
    assert [[tokenizer.id_to_token(token_id) for token_id in ids] for ids in found] == [["cat"], ["Ġcat"]]


def test_a_space_that_is_a_token_of_its_own_adds_nothing() -> None:
    tokenizer = word_tokenizer()
    assert len(bad_words_token_ids(["zz"], tokenizer)) == 1
    assert bad_words_token_ids(["zz", "zz"], tokenizer) == bad_words_token_ids(["zz"], tokenizer)
