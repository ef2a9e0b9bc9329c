from hashlib import sha256

from pagestream_engine.cache.hashing import BlockHasher


def test_names_the_whole_prefix() -> None:
    hasher = BlockHasher(2)
    first = hasher.child(hasher.root(), [1, 2])
    assert hasher.child(first, [3, 4]) != hasher.child(hasher.child(hasher.root(), [2, 1]), [3, 4])
    assert hasher.child(first, [3, 4]) != hasher.child(hasher.root(), [3, 4])


def test_is_the_same_on_every_machine() -> None:
    hasher = BlockHasher(2)
    root = sha256(b"pagestream/prefix/1").digest()
    expected = sha256(root + (70000).to_bytes(4, "little") + (1).to_bytes(4, "little")).digest()
    assert hasher.child(hasher.root(), [70000, 1]) == expected


def test_an_extra_key_shares_nothing() -> None:
    hasher = BlockHasher(1)
    assert len({hasher.root(), hasher.root(b"tenant-a"), hasher.root(b"tenant-b")}) == 3
