"""Texts become the tokenizer's own ids: in pieces, in segments, in pairs, from a cache and cut."""

import json
from array import array
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_gateway import encoder as encoder_module
from pagestream_gateway.encoder import (
    EncodingCache,
    EncodingJob,
    Segments,
    TextEncoder,
    TooManyTokensError,
    UnbrokenTextError,
    frame_of,
    is_for_pairs,
    most_chars_per_token,
)
from pagestream_grammars import TokenTable
from support.engines.synthetic_engine import byte_tokenizer
from support.processes.stack import DEMO_MODEL
from tokenizers import (
    AddedToken,
    Encoding,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers.processors import BertProcessing, ByteLevel, PostProcessor, RobertaProcessing, TemplateProcessing

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
def regex_words() -> Tokenizer:
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


@pytest.fixture(params=[demo, regex_words, sentences, byte_tokenizer])
def tokenizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return a tokenizer whose texts are cut into small pieces."""
    monkeypatch.setattr(encoder_module, "PIECE_CHARS", 16)
    make: Callable[[], Tokenizer] = request.param
    return make()


def test_pieces_have_the_tokenizers_own_ids(tokenizer: Tokenizer) -> None:
    encoder = TextEncoder(tokenizer)

    @settings(max_examples=60)
    @given(TEXT, st.booleans())
    def check(text: str, add_special_tokens: bool) -> None:
        expected = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        assert list(encoder.encode(text, add_special_tokens=add_special_tokens, limit=MANY)) == expected
        assert list(encoder.encode(text, add_special_tokens=add_special_tokens, limit=len(expected))) == expected
        with pytest.raises(TooManyTokensError):
            encoder.encode(text, add_special_tokens=add_special_tokens, limit=len(expected) - 1)

    check()


def test_words_are_encoded_in_pieces_and_sentences_are_not() -> None:
    for make, expected in ((demo, True), (regex_words, True), (sentences, False)):
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
        encoder.encode("a" * (2 * encoder_module.MAX_RUN_CHARS), add_special_tokens=True, limit=MANY)


ARABIC = "مُحَمَّدٌ كَتَبَ "


@pytest.mark.parametrize("make", [demo, regex_words])
def test_text_of_letters_with_marks_is_encoded_in_pieces(
    make: Callable[[], Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, longest = make(), 0
    encode = TextEncoder._encoding

    def measured(self: TextEncoder, text: str, add_special_tokens: bool) -> Encoding:
        nonlocal longest
        longest = max(longest, len(text))
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(encoder_module, "PIECE_CHARS", 2**10)
    monkeypatch.setattr(encoder_module, "MAX_RUN_CHARS", 2**14)
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


MARKS = ["<s>", "</s>", "<|im", "<|im_start|>", "<|im_start|>x", "start|>"]
MARKED_WORD = st.sampled_from([*MARKS, " ", "\n", "the mill", "é", "e\u0301", "你好"])
MARKED_TEXT = st.lists(st.one_of(MARKED_WORD, st.text(max_size=6)), max_size=30).map("".join)


def marked() -> Tokenizer:
    """Return one with tokens that are beginnings of others, one that is found in normalized text, and a frame."""
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken("the mill", normalized=True)])
    return tokenizer


def marked_words() -> Tokenizer:
    """Return one that splits at blanks, and puts a mark before the first word of each part."""
    vocab = {f"▁{chr(letter)}": letter for letter in range(97, 123)} | {"▁": 1, "<unk>": 0}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(MARKS)
    ends = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ends)
    return tokenizer


@pytest.fixture(params=[demo, marked, marked_words, byte_tokenizer])
def segmented(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return a tokenizer whose segments are kept from three characters on."""
    monkeypatch.setattr(encoder_module, "LEAST_CHARS", 3)
    make: Callable[[], Tokenizer] = request.param
    return make()


def test_batches_have_the_tokenizers_own_ids_cached_or_not(segmented: Tokenizer) -> None:
    encoder, cache = TextEncoder(segmented), EncodingCache(1 << 20)

    @settings(max_examples=50)
    @given(st.lists(st.tuples(MARKED_TEXT, st.booleans()), max_size=4))
    def check(texts: list[tuple[str, bool]]) -> None:
        expected = [segmented.encode(text, add_special_tokens=adds).ids for text, adds in texts]
        jobs = [EncodingJob(text, adds, len(ids), "prompt") for (text, adds), ids in zip(texts, expected, strict=True)]
        for _ in range(2):
            found = encoder.encode_batch(jobs, cache)
            assert [list(each) for each in found if isinstance(each, array)] == expected
        tight = [EncodingJob(job.text, job.add_special_tokens, job.limit - 1, "prompt") for job in jobs]
        assert all(isinstance(each, TooManyTokensError) for each in encoder.encode_batch(tight, cache))

    check()
    assert Segments(json.loads(segmented.to_str())).divides
    assert cache.num_hits


def test_long_segments_are_kept_and_short_ones_stay_with_their_neighbours() -> None:
    divided = Segments(json.loads(byte_tokenizer().to_str())).of(f"a</s>{'b' * 128}</s>c<s>{'d' * 127}<s>")
    assert divided == [("a</s>", False), ("b" * 128, True), (f"</s>c<s>{'d' * 127}<s>", False)]


@pytest.mark.parametrize(
    "token", [AddedToken("<x>", rstrip=True, normalized=False), AddedToken("<x>", single_word=True, normalized=False)]
)
def test_a_tokenizer_that_looks_beyond_an_added_token_divides_nothing(token: AddedToken) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([token])
    assert not Segments(json.loads(tokenizer.to_str())).divides
    first = byte_tokenizer()
    first.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    assert not Segments(json.loads(first.to_str())).divides


def test_what_is_kept_is_bounded_in_bytes_and_the_least_used_goes() -> None:
    cache = EncodingCache(4000)
    keys = [cache.key(0, b"", str(number)) for number in range(100)]
    for key in keys:
        cache.put(key, array("I", range(50)))
        assert cache.get(keys[0]) is not None
        assert cache.num_bytes <= 4000
    assert cache.get(keys[99]) is not None
    assert cache.get(keys[50]) is None
    cache.put(keys[1], array("I", range(2000)))
    assert cache.get(keys[1]) is None, "larger than all"


def test_tenants_and_encoders_do_not_find_each_others_parts() -> None:
    cache, text = EncodingCache(1 << 20), f"{'b' * 200}</s>"
    encoder, other = TextEncoder(byte_tokenizer()), TextEncoder(byte_tokenizer())
    for one, scope in ((encoder, b"a"), (encoder, b"b"), (other, b"a")):
        one.encode_batch([EncodingJob(text, False, 1000, "prompt", scope)], cache)
    assert cache.num_hits == 0
    encoder.encode_batch([EncodingJob(text, False, 1000, "prompt", b"a")], cache)
    assert cache.num_hits == 1


CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = {"<s>": len(CHARACTERS), "</s>": len(CHARACTERS) + 1}
PAIRS = {
    "none": None,
    "byte level": ByteLevel(),
    "bert": BertProcessing(*SPECIALS.items().__reversed__()),
    "roberta": RobertaProcessing(("</s>", SPECIALS["</s>"]), ("<s>", SPECIALS["<s>"])),
    "llama": TemplateProcessing("<s> $A", "<s> $A <s> $B", list(SPECIALS.items())),
}


def paired(processor: PostProcessor | None) -> Tokenizer:
    vocab = {token: number for number, token in enumerate([*CHARACTERS, *SPECIALS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


@pytest.mark.parametrize("name", PAIRS)
@given(query=st.text(min_size=1, max_size=8), document=st.text(min_size=1, max_size=8))
def test_a_pair_has_the_tokens_of_both(name: str, query: str, document: str) -> None:
    tokenizer = paired(PAIRS[name])
    frame = frame_of(tokenizer)
    assert frame is not None
    parts = [array("I", tokenizer.encode(text, add_special_tokens=False).ids) for text in (query, document)]
    assert list(frame.join(*parts)) == tokenizer.encode(query, document).ids


def test_a_tokenizer_that_swaps_the_texts_has_no_frame() -> None:
    assert frame_of(paired(TemplateProcessing("$A", "$B $A", []))) is None


@pytest.mark.parametrize(
    ("template", "is_one"),
    [
        (
            "{{ messages | selectattr('role', 'eq', 'query') }}{{ messages | selectattr('role', 'eq', 'document') }}",
            True,
        ),
        ('{% if m.role == "query" %}{% elif m.role == "document" %}{% endif %}', True),
        ("{% if m.role == 'user' %}Answer the query with this document.{% endif %}", False),
        ("{{ documents }}{% if m.role == 'query' %}{% endif %}", False),
    ],
)
def test_a_template_with_both_roles_is_for_pairs(template: str, is_one: bool) -> None:
    assert is_for_pairs(template) == is_one


SPELLED = "höhe 🌊 \x00\n\u00ad~"


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))])
def test_the_bytes_of_a_texts_tokens_are_the_texts(tokenizer: Tokenizer) -> None:
    found = [
        TokenTable(tokenizer).bytes_of(token_id) for token_id in tokenizer.encode(SPELLED, add_special_tokens=False).ids
    ]
    assert b"".join(each or b"?" for each in found) == SPELLED.encode()


def test_byte_fallback() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<0xC3>": 0, "a": 1}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert [TokenTable(tokenizer).bytes_of(token_id) for token_id in (0, 1, 99)] == [b"\xc3", None, None]
