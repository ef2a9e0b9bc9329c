"""How long requests wait for their runs alone once a storm of kills is over, on virtual time."""

from collections.abc import Iterator

import pytest
from pagestream_streams.connection.embedded import EmbeddedRedis
from redis import Redis
from support.protocol.virtual_storm import Storm
from support.redis.servers import emptied

STORM_MS = 20_000
LIMIT_MS = 120_000


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[Redis]:
    emptied(redis_server)
    with Redis(port=redis_server.port) as client:
        yield client


@pytest.mark.parametrize("seed", [0, 1])
def test_a_hundred_suspects_have_run_soon_after_a_storm(client: Redis, seed: int) -> None:
    outcome = Storm(client, seed).run(STORM_MS, LIMIT_MS)
    assert outcome.kills > 40
    assert outcome.suspects_at_end > 80
    assert outcome.poisoned == 0
    assert outcome.last_suspect_s < 25
    assert outcome.all_finished_s < 40


def test_an_engine_that_kept_what_has_passed_would_make_them_wait(client: Redis) -> None:
    """Without `chains_trials` the last suspect waits longer, and the measure shows it."""
    outcome = Storm(client, 0, chains_trials=False).run(STORM_MS, LIMIT_MS)
    assert outcome.last_suspect_s > 25
