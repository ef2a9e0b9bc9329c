"""Which partition a prompt gets: prompts that begin alike together, unless that is too many for one."""

from collections import Counter, defaultdict

from pagestream_streams import StreamsSettings
from pagestream_streams.gateway.placing import Placer
from pagestream_streams.protocol.keys import Keyspace, Partition

SETTINGS = StreamsSettings()
PARTITIONS = 16
SYSTEM_PROMPT = list(range(700))


def placer() -> Placer:
    return Placer(SETTINGS, Keyspace())


def placed(made: Placer, prompt: list[int], salt: bytes = b"") -> int:
    number = made.place("m", PARTITIONS, prompt, salt)
    made.queued.clear()  # as if engines had claimed it
    return number


def test_conversations_with_one_system_prompt_spread_and_stay_together() -> None:
    made, places = placer(), defaultdict[int, list[int]](list)
    for turn in range(1, 11):
        for talk in range(200):
            prompt = [*SYSTEM_PROMPT, *[1000 + talk] * 400 * turn]
            places[talk].append(placed(made, prompt))
    counts = Counter(number for numbers in places.values() for number in numbers)
    assert len(counts) == PARTITIONS
    assert max(counts.values()) < 4 * 2000 / PARTITIONS
    settled = [numbers[2:] for numbers in places.values()]  # the first ones are all it knew then
    assert sum(len(set(numbers)) == 1 for numbers in settled) > 180


def test_what_is_rare_goes_by_its_first_tokens() -> None:
    made = placer()
    assert len({placed(made, [*range(64), end]) for end in range(10)}) == 1


def test_salts_are_counted_apart() -> None:
    made = placer()
    for number in range(100):
        placed(made, [*SYSTEM_PROMPT, number], b"one")
    assert len({placed(made, [*SYSTEM_PROMPT, number], b"other") for number in range(10)}) == 1


def test_equal_prompts_use_every_partition_before_one_is_full() -> None:
    """One prompt asked for again and again: no partition's bound is reached while others have room."""
    made = placer()
    for _ in range(100 * PARTITIONS):
        made.place("m", PARTITIONS, SYSTEM_PROMPT, b"")
    loads = [made.queued[Partition("m", number)] for number in range(PARTITIONS)]
    assert sum(loads) == 100 * PARTITIONS
    assert max(loads) <= SETTINGS.overload_factor * min(loads) + 1
