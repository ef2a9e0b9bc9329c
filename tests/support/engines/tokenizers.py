"""Tokenizers with one token for each byte."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


def byte_level(first: Sequence[str], *, last: Sequence[str] = ()) -> Tokenizer:
    """Return byte-level BPE without merges: the special tokens `first`, GPT-2's alphabet in its order, then `last`."""
    tokens = [*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), *last]
    vocab = {token: number for number, token in enumerate(tokens)}
    unknown = "<unk>" if "<unk>" in first else None
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in first])
    return tokenizer
