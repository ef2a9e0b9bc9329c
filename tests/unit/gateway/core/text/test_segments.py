"""Texts divided at added tokens, and parts from a cache, have the tokenizer's own ids."""

import json
from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagestream_gateway.core.text import segments as module
from pagestream_gateway.core.text.encoder import EncodingJob, TextEncoder, TooManyTokensError
from pagestream_gateway.core.text.encoding_cache import EncodingCache
from pagestream_gateway.core.text.segments import Segments
from support.engines.synthetic_engine import byte_tokenizer
from support.processes.stack import DEMO_MODEL
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

MARKS = ["<s>", "</s>", "<|im", "<|im_start|>", "<|im_start|>x", "start|>"]
WORD = st.sampled_from([*MARKS, " ", "\n", "the mill", "é", "e\u0301", "你好"])
TEXT = st.lists(st.one_of(WORD, st.text(max_size=6)), max_size=30).map("".join)


def demo() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def marked() -> Tokenizer:
    """Return one with tokens that are beginnings of others, one that is found in normalized text, and a frame."""
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.add_tokens([AddedToken("the mill", normalized=True)])
    return tokenizer


def words() -> Tokenizer:
    """Return one that splits at blanks, and puts a mark before the first word of each part."""
    vocab = {f"▁{chr(letter)}": letter for letter in range(97, 123)} | {"▁": 1, "<unk>": 0}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.add_special_tokens(MARKS)
    ends = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ends)
    return tokenizer


@pytest.fixture(params=[demo, marked, words, byte_tokenizer])
def tokenizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """Return a tokenizer whose segments are kept from three characters on."""
    monkeypatch.setattr(module, "LEAST_CHARS", 3)
    make: Callable[[], Tokenizer] = request.param
    return make()


def test_batches_have_the_tokenizers_own_ids_cached_or_not(tokenizer: Tokenizer) -> None:
    encoder, cache = TextEncoder(tokenizer), EncodingCache(1 << 20)

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(TEXT, st.booleans()), max_size=4))
    def check(texts: list[tuple[str, bool]]) -> None:
        expected = [tokenizer.encode(text, add_special_tokens=adds).ids for text, adds in texts]
        jobs = [EncodingJob(text, adds, len(ids), "prompt") for (text, adds), ids in zip(texts, expected, strict=True)]
        for _ in range(2):
            found = encoder.encode_batch(jobs, cache)
            assert [list(each) for each in found if isinstance(each, array)] == expected
        tight = [EncodingJob(job.text, job.add_special_tokens, job.limit - 1, "prompt") for job in jobs]
        assert all(isinstance(each, TooManyTokensError) for each in encoder.encode_batch(tight, cache))

    check()
    assert Segments(json.loads(tokenizer.to_str())).divides
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
