from hashlib import sha256

from pagestream_engine.cache.block_hasher import BlockHasher
from pagestream_engine.request.sampling_params import SamplingParams
from pagestream_engine.request.sequence import TokenSequence


def make_seq(num_tokens: int, salt: bytes = b"", num_outputs: int = 0) -> TokenSequence:
    tokens = list(range(num_tokens))
    prompt, outputs = tokens[: num_tokens - num_outputs], tokens[num_tokens - num_outputs :]
    return TokenSequence(
        "a",
        prompt,
        SamplingParams(),
        seed=0,
        arrival=0,
        max_total_tokens=99,
        cache_salt=salt,
        output_token_ids=outputs,
    )


def test_a_hash_covers_the_whole_prefix() -> None:
    hasher = BlockHasher(2)
    first = hasher.hash_block_tokens(hasher.root(), [1, 2])
    assert hasher.hash_block_tokens(first, [3, 4]) != hasher.hash_block_tokens(
        hasher.hash_block_tokens(hasher.root(), [2, 1]), [3, 4]
    )
    assert hasher.hash_block_tokens(first, [3, 4]) != hasher.hash_block_tokens(hasher.root(), [3, 4])


def test_a_hash_is_the_same_on_every_machine() -> None:
    hasher = BlockHasher(2)
    root = sha256(b"pagestream/prefix/1").digest()
    expected = sha256(root + (70000).to_bytes(4, "little") + (1).to_bytes(4, "little")).digest()
    assert hasher.hash_block_tokens(hasher.root(), [70000, 1]) == expected


def test_an_extra_key_shares_nothing() -> None:
    hasher = BlockHasher(1)
    assert len({hasher.root(), hasher.root(b"tenant-a"), hasher.root(b"tenant-b")}) == 3


def test_a_sequences_prefix_has_one_hash_whatever_the_size_of_the_block_that_ends_it() -> None:
    hasher, seq = BlockHasher(2), make_seq(9)
    first = hasher.hash_block_tokens(hasher.root(b"tenant"), [0, 1])
    assert hasher.block_hash(make_seq(9, b"tenant"), 2) == first
    assert hasher.block_hash(make_seq(9, b"tenant"), 4) == hasher.hash_block_tokens(first, [2, 3])
    assert hasher.block_hash(seq, 8) == hasher.block_hash(make_seq(8), 8) == seq.block_hashes[3]
    assert hasher.block_hash(seq, 2) == seq.block_hashes[0]


def test_outputs_of_another_kind_of_computation_have_other_hashes() -> None:
    """From the first block with an output on; of a prompt's own blocks they are the same."""

    def hashes(num_outputs: int, *, separates: bool) -> list[bytes]:
        seq = make_seq(12, num_outputs=num_outputs)
        BlockHasher(4, separates_outputs=separates).block_hash(seq, 12)
        return seq.block_hashes

    prompt = hashes(0, separates=False)
    for num_outputs, num_equal in ((0, 3), (1, 2), (4, 2), (5, 1), (8, 1), (9, 0)):
        assert hashes(num_outputs, separates=False) == prompt
        own = hashes(num_outputs, separates=True)
        assert own == hashes(num_outputs, separates=True)
        assert [own[index] == prompt[index] for index in range(3)] == [index < num_equal for index in range(3)]
    assert len({hashes(num_outputs, separates=True)[-1] for num_outputs in range(12)}) == 12
