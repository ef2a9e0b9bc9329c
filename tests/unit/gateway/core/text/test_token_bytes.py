import pytest
from pagestream_gateway.core.text.token_bytes import TokenBytes
from support.engines.synthetic_engine import byte_tokenizer
from support.processes.stack import DEMO_MODEL
from tokenizers import Tokenizer, decoders, models

TEXT = "höhe 🌊 \x00\n\u00ad~"


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))])
def test_the_bytes_of_a_texts_tokens_are_the_texts(tokenizer: Tokenizer) -> None:
    found = [TokenBytes(tokenizer).get(token_id) for token_id in tokenizer.encode(TEXT, add_special_tokens=False).ids]
    assert b"".join(each or b"?" for each in found) == TEXT.encode()


def test_byte_fallback() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<0xC3>": 0, "a": 1}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    assert [TokenBytes(tokenizer).get(token_id) for token_id in (0, 1, 99)] == [b"\xc3", None, None]
