"""The merge of partitions' heads: what is claimed next, what is asked again, and for what room is kept."""

import math
from collections.abc import Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st
from pagestream_streams.engine.claim import (
    AWAY_S,
    LOOK_PAUSE_S,
    REFRESH_AT_ONCE,
    SLACK_MS,
    ClaimOrder,
    Head,
    Heads,
    Take,
)

ENTRIES = st.tuples(st.integers(0, 1000), st.integers(1, 9))
"""Key and tokens."""


class Partitions:
    """What claim.lua does, with lists: the reply to a claim is exact, other engines claim in between."""

    def __init__(self, queues: Sequence[Sequence[tuple[int, int]]], ageing: int) -> None:
        self.queues = [sorted(queue) for queue in queues]
        self.ageing = ageing

    def heads(self, number: int, room: int) -> Heads:
        first, fitting = None, None
        for key, tokens in self.queues[number]:
            first = first or Head(key, tokens, key <= self.ageing)
            if tokens <= room:
                fitting = Head(key, tokens)
                break
        return Heads(first, fitting if first and first.tokens > room else None, room)

    def claim(self, take: Take, *, is_own: bool) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        room = take.max_tokens
        for entry in list(self.queues[take.number]):
            key, tokens = entry
            if len(found) == take.max_requests or (take.bound is not None and key > take.bound):
                break
            if tokens <= room:
                self.queues[take.number].remove(entry)
                found.append(entry)
                room -= tokens
            elif is_own and key <= self.ageing:
                break
        return found

    def waiting(self, own: Collection[int], room: int) -> list[tuple[int, int]]:
        """Return what may be claimed: what fits, and comes before each own head for which room is kept."""
        heads = [self.heads(number, room).first for number in own if number < len(self.queues)]
        kept = [head.key for head in heads if head is not None and head.stays and head.tokens > room]
        limit = min(kept, default=math.inf)
        return [entry for queue in self.queues for entry in queue if entry[1] <= room and entry[0] < limit]


@given(
    queues=st.lists(st.lists(ENTRIES, max_size=6), min_size=1, max_size=5),
    own=st.sets(st.integers(0, 4)),
    max_requests=st.integers(1, 12),
    max_tokens=st.integers(1, 40),
    ageing=st.integers(-1, 1000),
    others=st.lists(st.integers(0, 4), max_size=8),
)
def test_claims_are_in_order_and_end(
    *,
    queues: Sequence[Sequence[tuple[int, int]]],
    own: set[int],
    max_requests: int,
    max_tokens: int,
    ageing: int,
    others: Sequence[int],
) -> None:
    """`others`: partitions from which other engines take the head before this engine's next round."""
    redis, order, turns = Partitions(queues, ageing), ClaimOrder(), list(others)
    for number in order.to_ask(len(queues), own, 0.0):
        order.learn(number, redis.heads(number, max_tokens), 0.0, is_own=number in own)
    for _ in range(100):
        for number in order.unsure(max_tokens):
            order.learn(number, redis.heads(number, max_tokens), 0.0, is_own=number in own)
        takes = order.takes(max_requests, max_tokens, own)
        if not takes:
            break
        assert sum(take.max_requests for take in takes) <= max_requests
        assert sum(take.max_tokens for take in takes) <= max_tokens
        fronts = [(number, redis.heads(number, max_tokens).first) for number in own if number < len(queues)]
        kept = [head.key for _, head in fronts if head is not None and head.stays and head.tokens > max_tokens]
        if turns:
            number = turns.pop() % len(queues)
            redis.queues[number] = redis.queues[number][1:]
        found = [entry for take in takes for entry in redis.claim(take, is_own=take.number in own)]
        max_requests, max_tokens = max_requests - len(found), max_tokens - sum(tokens for _, tokens in found)
        left = min((key for key, _ in redis.waiting(own, max_tokens)), default=math.inf)
        for key, _ in found:
            assert key <= left + SLACK_MS
            assert others or key < min(kept, default=math.inf)
        if max_requests <= 0 or max_tokens <= 0:
            break
        for take in takes:
            order.learn(take.number, redis.heads(take.number, max_tokens), 0.0, is_own=take.number in own)
    else:
        raise AssertionError("it claims for ever")
    if max_requests > 0 and not others:
        assert redis.waiting(own, max_tokens) == [], "it left what fits"


def known(*heads: Heads, own: set[int] | None = None, at: float = 0.0) -> ClaimOrder:
    order = ClaimOrder()
    for number, each in enumerate(heads):
        order.learn(number, each, at, is_own=number in (own or set()))
    return order


def test_own_partitions_come_first_among_those_that_are_equal_but_for_the_slack() -> None:
    order = known(Heads(Head(1000, 1)), Heads(Head(1000 + SLACK_MS, 1)), Heads(Head(1001 + SLACK_MS, 1)))
    assert [take.number for take in order.takes(1, 9, own={1, 2})] == [1]
    assert [take.number for take in order.takes(1, 9, own={2})] == [0]


def test_one_partition_gives_until_the_next_one_s_turn() -> None:
    order = known(Heads(Head(1000, 1)), Heads(Head(5000, 1)))
    assert order.takes(4, 9, own=set()) == [Take(0, 4, 9, 5000 + SLACK_MS)]


def test_room_is_kept_for_an_own_head_alone() -> None:
    order = known(Heads(Head(1000, 50, stays=True)), Heads(Head(900, 1)), Heads(Head(2000, 1)))
    assert [take.number for take in order.takes(9, 10, own={0})] == [1], "what comes before it is claimed"
    assert [take.number for take in order.takes(9, 10, own={2})] == [1]
    assert order.reserves({0}, 10)
    assert not order.reserves({0}, 50)


def test_a_partition_is_asked_again_when_it_rings_and_not_at_every_ring() -> None:
    empty, full = Heads(), Heads(Head(1, 1))
    order = known(empty, full, at=1.0)
    assert order.to_ask(2, set(), 1.01) == []
    for number in (0, 1):
        order.ring(number, 1.02)
    assert order.to_ask(2, set(), 1.02) == [0]
    assert order.to_ask(2, set(), 1.0 + LOOK_PAUSE_S) == [0, 1]
    order.learn(0, empty, 1.01, is_own=False)
    assert order.to_ask(1, set(), 1.03) == [0], "it rang after the question"


def test_a_partition_is_asked_again_when_an_entry_ripens_and_when_it_changes_hands() -> None:
    order = known(Heads(ripens_s=0.1))
    assert (order.to_ask(1, set(), 0.05), order.to_ask(1, set(), 0.11)) == ([], [0])
    assert order.to_ask(1, {0}, 0.05) == [0]


def test_partitions_that_do_not_ring_take_turns() -> None:
    order = known(*[Heads()] * 256)
    assert order.to_ask(256, set(), 0.9) == []
    asked = order.to_ask(256, set(), 1.1)
    assert len(asked) == REFRESH_AT_ONCE
    for number in asked:
        order.learn(number, Heads(), 1.1, is_own=False)
    assert not set(asked) & set(order.to_ask(256, set(), 1.2))


def test_a_partition_without_an_answer_is_left_out_for_a_while() -> None:
    order = known(Heads(Head(1, 1)), Heads(Head(2, 1)))
    order.note_away(0, 5.0)
    assert [take.number for take in order.takes(9, 9, own=set())] == [1]
    assert 0 not in order.to_ask(2, set(), 5.0 + AWAY_S / 2)
    assert 0 in order.to_ask(2, set(), 5.0 + AWAY_S)


def test_a_partition_is_alone_where_all_others_are_known_to_have_nothing() -> None:
    order = ClaimOrder()
    assert order.lone(2, {0}, 0.0) is None, "nothing is known"
    order.learn(0, Heads(), 0.0, is_own=True)
    assert order.lone(2, {0}, 0.1) == 1, "it alone is unknown"
    order.learn(1, Heads(), 0.1, is_own=False)
    assert order.lone(2, {0}, 0.2) is None, "neither has anything"
    order.ring(0, 0.3)
    assert order.lone(2, {0}, 0.3) == 0
    order.ring(1, 0.4)
    assert order.lone(2, {0}, 0.4) is None, "which one goes first has to be asked"
    order.note_away(1, 0.5)
    assert order.lone(2, {0}, 0.5) == 0
    assert order.lone(2, {0}, 0.5 + AWAY_S) is None, "it may have something, and is asked again"
    order.learn(1, Heads(Head(5, 1)), 2.0, is_own=False)
    assert order.lone(2, {0}, 2.0) is None, "the other one has a head"


def test_a_partition_is_not_alone_beside_one_whose_head_is_this_engines_now() -> None:
    """Its head was another engine's: left alone until it is old enough, or the partition's owner has changed."""
    order = ClaimOrder()
    order.learn(0, Heads(ripens_s=1.0), 0.0, is_own=False)
    order.learn(1, Heads(), 0.0, is_own=True)
    order.ring(1, 0.1)
    assert order.lone(2, {1}, 0.2) == 1
    assert order.lone(2, {0, 1}, 0.2) is None
    assert order.lone(2, {1}, 1.1) is None
