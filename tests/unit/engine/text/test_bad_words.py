import pytest
from pagestream_engine.text.bad_words import bad_words_token_ids
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors, trainers


def merged_tokenizer() -> Tokenizer:
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
    tokenizer = merged_tokenizer()
    found = bad_words_token_ids([word], tokenizer)
    assert [[tokenizer.id_to_token(token_id) for token_id in ids] for ids in found] == [["cat"], ["Ġcat"]]


def test_a_space_that_is_a_token_of_its_own_adds_nothing() -> None:
    tokenizer = merged_tokenizer()
    assert len(bad_words_token_ids(["zz"], tokenizer)) == 1
    assert bad_words_token_ids(["zz", "zz"], tokenizer) == bad_words_token_ids(["zz"], tokenizer)
