"""Which partition a prompt gets: one of the engine that has its beginning, unless that is late or has had too much."""

from collections import Counter
from collections.abc import Sequence

from pagestream_streams import StreamsSettings
from pagestream_streams.gateway.accept import MOST_HOLDERS, HeldPrefixes, Placer, left_ms
from pagestream_streams.protocol import Keyspace, Partition, ownership, prefixes_of

SETTINGS = StreamsSettings()
PARTITIONS = 16
ENGINES = frozenset({"a", "b"})
OWNER = {number: engine for engine, owned in ownership(PARTITIONS, ENGINES).items() for number in owned}
SYSTEM_PROMPT = list(range(700))


class Gateway:
    """A placer with two living engines, to which the queues are empty unless a test says otherwise."""

    def __init__(self, engines: frozenset[str] = ENGINES) -> None:
        self.now = 0.0
        self.placer = Placer(SETTINGS, Keyspace(), clock=lambda: self.now)
        self.placer.note_living("m", engines)

    def engine_of(self, prompt: Sequence[int], salt: bytes = b"") -> str:
        """Place a prompt that is claimed at once."""
        placed = self.placer.place("m", PARTITIONS, prompt, salt)
        self.placer.queued.clear()
        return OWNER[placed.partition]


def digests(prompt: Sequence[int], salt: bytes = b"") -> list[bytes]:
    return [digest for _, digest in prefixes_of(prompt, SETTINGS.placement_tokens, salt)]


def test_a_prompt_follows_its_beginning_also_where_another_engine_has_published_it() -> None:
    gateway = Gateway()
    first = gateway.engine_of(SYSTEM_PROMPT)
    assert {gateway.engine_of([*SYSTEM_PROMPT, end]) for end in range(5)} == {first}
    other = "b" if first == "a" else "a"
    gateway.placer.note_held("m", other, digests(range(5000, 6000)))
    assert gateway.engine_of([*range(5000, 6000), 1]) == other
    assert gateway.placer.place("m", PARTITIONS, [*range(5000, 6000), 1], b"").held_tokens == 960


def test_what_another_engine_has_taken_is_not_expected_any_more_where_it_was_placed() -> None:
    gateway = Gateway()
    first = gateway.engine_of(SYSTEM_PROMPT)
    thief = "b" if first == "a" else "a"
    gateway.placer.note_held("m", thief, digests(SYSTEM_PROMPT))
    assert gateway.engine_of([*SYSTEM_PROMPT, 1]) == thief


def test_an_engine_that_is_later_than_the_hit_saves_is_left_out() -> None:
    gateway = Gateway()
    holder = gateway.engine_of(SYSTEM_PROMPT)
    late = {Partition("m", number): 1 for number, engine in OWNER.items() if engine == holder}
    gateway.placer.queued.update(late)  # eight requests of 700 tokens before it
    assert OWNER[gateway.placer.place("m", PARTITIONS, SYSTEM_PROMPT, b"").partition] != holder


def test_one_hot_prompt_is_spread_before_an_engine_has_much_more_than_the_other() -> None:
    gateway = Gateway()
    counts = Counter(gateway.engine_of([*SYSTEM_PROMPT, number]) for number in range(1000))
    assert max(counts.values()) < 1.4 * min(counts.values())


def test_few_requests_stay_where_their_beginning_is() -> None:
    """A conversation alone, of a turn every few seconds, is no load that must be divided."""
    gateway, engines = Gateway(), set()
    for turn in range(1, 100):
        engines.add(gateway.engine_of(list(range(100 * turn))))
        gateway.now += 5.0
    assert len(engines) == 1


def test_a_dead_engine_is_forgotten_and_partitions_stand_for_engines_that_are_unknown() -> None:
    gateway = Gateway()
    first = gateway.engine_of(SYSTEM_PROMPT)
    (left,) = ENGINES - {first}
    gateway.placer.note_living("m", {left})
    assert gateway.placer.place("m", PARTITIONS, SYSTEM_PROMPT, b"").held_tokens == 0
    gateway.placer.note_living("m", ())
    prompts = [[number] * 700 for number in range(PARTITIONS)]
    places = [gateway.placer.place("m", PARTITIONS, prompt, b"").partition for prompt in prompts]
    assert set(places) == set(range(PARTITIONS))


def test_salts_have_nothing_in_common() -> None:
    gateway = Gateway()
    gateway.engine_of(SYSTEM_PROMPT, b"one")
    assert gateway.placer.place("m", PARTITIONS, SYSTEM_PROMPT, b"other").held_tokens == 0
    assert gateway.placer.place("m", PARTITIONS, SYSTEM_PROMPT, b"one").held_tokens == 640


def test_equal_prompts_use_every_partition_before_one_is_full() -> None:
    """One prompt asked for again and again: no partition's bound is reached while others have room."""
    gateway = Gateway()
    for _ in range(100 * PARTITIONS):
        gateway.placer.place("m", PARTITIONS, SYSTEM_PROMPT, b"")
    loads = [gateway.placer.queued[Partition("m", number)] for number in range(PARTITIONS)]
    assert sum(loads) == 100 * PARTITIONS
    assert max(loads) <= 2 * min(loads)


def test_what_is_remembered_is_bounded_and_the_least_used_goes() -> None:
    held = HeldPrefixes(100)
    for number in range(100):
        held.expect(digests([number] * 64), "a")
        held.note_computed(digests([0] * 64), "b")
    assert len(held) == 100
    held.note_computed(digests([1000] * 64), "a")
    assert len(held) == 100
    assert held.lengths(prefixes_of([0] * 64, 64), ENGINES) == {"b": 64}
    assert held.lengths(prefixes_of([1] * 64, 64), ENGINES) == {}


def test_a_held_prompt_is_left_to_its_engine_for_longer_up_to_a_bound() -> None:
    assert [left_ms(SETTINGS, held) for held in (0, 1000, 100_000)] == [0, 1000, 4000]


def test_the_last_holders_of_a_beginning_are_remembered() -> None:
    held, engines = HeldPrefixes(100), [f"engine-{number}" for number in range(MOST_HOLDERS + 2)]
    for engine in engines:
        held.note_computed(digests([0] * 64), engine)
    assert held.lengths(prefixes_of([0] * 64, 64), engines).keys() == set(engines[2:])


def test_refused_requests_are_no_work() -> None:
    """A prompt that is refused again and again does not drive what its engine is given elsewhere."""
    gateway = Gateway()
    holder = gateway.engine_of(SYSTEM_PROMPT)
    for _ in range(100):
        gateway.placer.note_refused(gateway.placer.place("m", PARTITIONS, SYSTEM_PROMPT, b""))
    assert gateway.placer.queued.total() == 0
    assert {gateway.engine_of([*SYSTEM_PROMPT, end]) for end in range(5)} == {holder}


def test_a_request_that_is_refused_after_its_queue_was_read_is_not_taken_off_the_count() -> None:
    placer = Gateway().placer
    placed = placer.place("m", PARTITIONS, SYSTEM_PROMPT, b"")
    where = Partition("m", placed.partition)
    placer.note_queued(where, 3)
    placer.note_refused(placed)
    assert placer.queued[where] == 3


def test_models_that_are_gone_are_forgotten() -> None:
    gateway = Gateway()
    gateway.engine_of(SYSTEM_PROMPT)
    gateway.placer.keep_only({"m"})
    assert gateway.placer.place("m", PARTITIONS, SYSTEM_PROMPT, b"").held_tokens == 640
    gateway.placer.keep_only({"other"})
    gateway.placer.note_living("m", ENGINES)
    assert gateway.placer.place("m", PARTITIONS, SYSTEM_PROMPT, b"").held_tokens == 0
    assert gateway.placer.queued.total() == 1
