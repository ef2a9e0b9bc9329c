"""Would the model check notice? Each script has broken variants, and each is caught."""

from collections.abc import Iterator

import pytest
from pagestream_streams.connection.embedded import EmbeddedRedis
from redis import Redis
from redis.exceptions import ResponseError
from support.protocol.mutants import MUTANTS, Mutant
from support.protocol.virtual_streams import SCRIPTS
from support.protocol.world import ViolationError, run, walk
from support.redis.servers import emptied, oldest_server, running_server

CATCHES = 480  # walks within which each broken script must be caught


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One server is enough: what is tried here is the checker."""
    with running_server(tmp_path_factory.mktemp("redis"), oldest_server()) as server:
        yield server


@pytest.fixture
def client(redis_server: EmbeddedRedis) -> Iterator[Redis]:
    emptied(redis_server)
    with Redis(port=redis_server.port) as client:
        yield client


@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{each.script}-{place}" for place, each in enumerate(MUTANTS)])
def test_a_broken_script_is_caught(client: Redis, mutant: Mutant) -> None:
    caught = next((seed for seed in (mutant.walk, *range(CATCHES)) if is_caught(client, mutant, seed)), None)
    assert caught is not None
    if caught != mutant.walk:
        print(f"walk {mutant.walk} no longer catches it, walk {caught} does: note that in mutants.py")


ONLY_TELL = {"queue", "outline", "log_sizes"}
"""Scripts that change nothing, and whose answers no step of the protocol uses."""

AFTER_ALL = {"forget_model"}
"""Scripts that run when no engine and no unfinished request is left, tried in test_unpublish.py."""

APART = {"isolate"}
"""Scripts whose writes the checker makes itself where it needs them, tried in test_room_for_suspects.py."""

BESIDE = {"reserve", "release", "enlist", "delist", "reserve_log", "settle_logs", "amend_model", "roster", "discard"}
"""Scripts of tenants' keys and models' cards, and of what has ended, which are beside the partitions, tested in
test_accept, test_request_lists, test_log_quota and test_contexts. Those in folders have tests of their folder's name.
"""


def is_caught(client: Redis, mutant: Mutant, seed: int) -> bool:
    try:
        run(client, walk(seed), mutant.texts(), twice=seed % 2 == 0)
    except (ViolationError, ResponseError, LookupError):
        return True
    return False


def test_every_script_has_a_broken_variant() -> None:
    beside_none = {name for name in SCRIPTS if "/" not in name}
    assert {mutant.script for mutant in MUTANTS} == beside_none - ONLY_TELL - AFTER_ALL - APART - BESIDE
