"""Would the model check notice? Each script has broken variants, and each is caught."""

from collections.abc import Iterator

import pytest
from pagestream_streams.embedded import EmbeddedRedis
from protocol_mutants import MUTANTS, Mutant
from protocol_world import ViolationError, run, walk
from redis import Redis
from redis.exceptions import ResponseError
from redis_servers import emptied, oldest_server, running_server
from virtual_streams import SCRIPTS

CATCHES = 480  # walks within which each broken script must be caught
RARELY_CAUGHT = (("sweep", 69), ("claim", 23), ("revive", 60))  # `make model-check` has the patience


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


def named(number: int, mutant: Mutant) -> object:
    marks = [pytest.mark.slow] if (mutant.script, number) in RARELY_CAUGHT else []
    return pytest.param(mutant, id=f"{mutant.script}-{number}", marks=marks)


@pytest.mark.parametrize("mutant", [named(number, mutant) for number, mutant in enumerate(MUTANTS)])
def test_a_broken_script_is_caught(client: Redis, mutant: Mutant) -> None:
    assert any(is_caught(client, mutant, seed) for seed in range(CATCHES))


ONLY_TELL = {"queue"}
"""Scripts that change nothing, and whose answers no step of the protocol uses."""


def is_caught(client: Redis, mutant: Mutant, seed: int) -> bool:
    try:
        run(client, walk(seed), mutant.texts(), twice=seed % 2 == 0)
    except (ViolationError, ResponseError, LookupError):
        return True
    return False


def test_every_script_has_a_broken_variant() -> None:
    assert {mutant.script for mutant in MUTANTS} == set(SCRIPTS) - ONLY_TELL
