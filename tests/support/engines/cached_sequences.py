"""Sequences over a cache manager, without a scheduler: each takes its blocks and is computed by one call."""

from collections import abc

from pagestream_engine import SamplingParams, Sequence
from pagestream_engine.kv_cache import BlockPool, CacheManager
from pagestream_engine.plan import KVLayout, full_attention
from pagestream_engine.request import Request, SequenceState

BLOCK_SIZE = 4
LAYOUT = full_attention(BLOCK_SIZE)


def make_cache(num_blocks: int = 16, *, layout: KVLayout = LAYOUT, enable_prefix_caching: bool = True) -> CacheManager:
    return CacheManager(BlockPool(num_blocks), layout, enable_prefix_caching=enable_prefix_caching)


def make_seq(
    token_ids: list[int],
    name: str = "a",
    salt: bytes = b"",
    num_kv_groups: int = 1,
    output_token_ids: abc.Sequence[int] = (),
) -> Sequence:
    return Sequence(
        name,
        token_ids,
        SamplingParams(),
        seed=0,
        arrival=0,
        max_total_tokens=999,
        num_kv_groups=num_kv_groups,
        output_token_ids=output_token_ids,
        request=Request((), (), cache_salt=salt),
    )


def run(cache: CacheManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """Take what is cached, and compute up to `num_tokens`; all but the last where it is left out."""
    num_tokens = len(seq.token_ids) - 1 if num_tokens is None else num_tokens
    cache.touch_prefix(seq, cache.get_computed_blocks(seq))
    seq.state = SequenceState.RUNNING
    cache.allocate_slots(seq, num_tokens)
    seq.num_computed_tokens = num_tokens
    cache.note_full_block(seq)
    cache.cache_queued_blocks(num_tokens)
