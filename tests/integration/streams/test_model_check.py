"""The real scripts under lost replies, late scripts, lost writes, dead and paused engines and clock steps."""

from collections.abc import Iterator

import pytest
from pagestream_streams.connection.embedded import EmbeddedRedis
from redis import Redis
from redis.exceptions import ResponseError
from support.protocol.world import GRACE, Op, Protocol, ViolationError, explore, run, shortest, walk
from support.redis.servers import emptied

WALKS = 80
REPLACED: tuple[Op, ...] = (
    ("retire", "a"),
    ("claim", "a", 4, False),
    ("claim", "b", 4, False),
    ("append", "a", "p", "1", ""),
    ("append", "a", "p", "end", "lost"),
    ("hand_back", "a", "p", ""),
    ("beat", "a", 1),
    ("leave", "a"),
    ("crash", "a", True),
    ("tick", 1200),
    ("sweep",),
    ("lose", 2),
)

MENU: tuple[Op, ...] = (
    ("claim", "a", 4, False),
    ("claim", "b", 4, True),
    ("append", "a", "p", "1", "lost"),
    ("append", "a", "p", "end", ""),
    ("stale_append", 0, "1"),
    ("hand_back", "a", "p", ""),
    ("crash", "a", True),
    ("cancel", "p"),
    ("unregister", "g", "p"),
    ("lose", 2),
)


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[Redis]:
    emptied(redis_server)
    with Redis(port=redis_server.port) as client:
        yield client


@pytest.mark.parametrize("part", range(4))
def test_no_walk_breaks_a_rule(client: Redis, part: int) -> None:
    for seed in range(part, WALKS, 4):
        twice = seed % 2 == 0
        try:
            run(client, walk(seed), twice=twice)
        except (ViolationError, ResponseError) as error:
            error.add_note(f"walk {seed}, as short as it gets: {shortest(client, walk(seed), twice=twice)}")
            raise


def test_a_request_that_ends_as_it_is_accepted_is_never_claimed(client: Redis) -> None:
    steps: list[Op] = [("beat", "a", 0), ("echo", "g", "p"), ("claim", "a", 4, False), ("echo", "g", "p"), ("sweep",)]
    steps += [("accept", "g", "p", 1), ("cancel", "p"), ("read", "g", "p"), ("claim", "a", 4, False)]
    for twice in (False, True):
        run(client, steps, twice=twice)


def test_a_grace_ends_while_redis_is_full_in_every_other_sweep(client: Redis) -> None:
    """And not before it has run for its whole length while Redis was not full."""
    protocol = Protocol(client)
    for op in (("accept", "g", "p", 1), ("unregister", "g", "p")):
        protocol.do(op)
    [until] = protocol.state["graces"].values()
    num_sweeps = 0
    while protocol.world.now < until or protocol.state["graces"]["p"] > protocol.world.now:
        for op in (("fill", num_sweeps % 2), ("gateway_beat", "g"), ("tick", 200), ("sweep",)):
            protocol.do(op)
        num_sweeps += 1
        assert num_sweeps < 3 * GRACE / 200
    assert protocol.world.now >= until + GRACE * 0.8


def test_every_order_of_three_steps_of_one_request(client: Redis) -> None:
    states, steps = explore(client, [("accept", "g", "p", 1)], MENU, 3)
    assert states > len(MENU)
    assert steps >= len(MENU)


def test_every_order_of_three_steps_around_an_engine_that_ends(client: Redis) -> None:
    begun: list[Op] = [("accept", "g", "p", 1), ("beat", "a", 0), ("beat", "b", 0), ("claim", "a", 4, False)]
    begun += [("append", "a", "p", "1", ""), ("accept", "g", "q", 1)]
    states, steps = explore(client, begun, REPLACED, 3)
    assert states > len(REPLACED)
    assert steps >= len(REPLACED)
