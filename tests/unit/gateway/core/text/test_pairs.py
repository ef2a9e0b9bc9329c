"""Two texts in one prompt, against tokenizers that encode both at once."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagestream_gateway.core.text.pairs import frame_of, is_for_pairs
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import BertProcessing, ByteLevel, PostProcessor, RobertaProcessing, TemplateProcessing

CHARACTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIALS = {"<s>": len(CHARACTERS), "</s>": len(CHARACTERS) + 1}
PAIRS = {
    "none": None,
    "byte level": ByteLevel(),
    "bert": BertProcessing(*SPECIALS.items().__reversed__()),
    "roberta": RobertaProcessing(("</s>", SPECIALS["</s>"]), ("<s>", SPECIALS["<s>"])),
    "llama": TemplateProcessing("<s> $A", "<s> $A <s> $B", list(SPECIALS.items())),
}


def tokenizer_of(processor: PostProcessor | None) -> Tokenizer:
    vocab = {token: number for number, token in enumerate([*CHARACTERS, *SPECIALS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


@pytest.mark.parametrize("name", PAIRS)
@given(query=st.text(min_size=1, max_size=8), document=st.text(min_size=1, max_size=8))
def test_a_pair_has_the_tokens_of_both(name: str, query: str, document: str) -> None:
    tokenizer = tokenizer_of(PAIRS[name])
    frame = frame_of(tokenizer)
    assert frame is not None
    parts = [array("I", tokenizer.encode(text, add_special_tokens=False).ids) for text in (query, document)]
    assert list(frame.join(*parts)) == tokenizer.encode(query, document).ids


def test_a_tokenizer_that_swaps_the_texts_has_no_frame() -> None:
    assert frame_of(tokenizer_of(TemplateProcessing("$A", "$B $A", []))) is None


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
