"""An engine whose KV pool holds less than the model's context serves, and publishes, what fits; and its mode."""

from pathlib import Path

import pytest
from pagestream.v1.records_pb2 import ModelCard
from redis import Redis
from support.processes.fork_server import ENGINES, ForkedPart, shared_server
from support.processes.stack import DEMO_MODEL
from support.processes.waiting import wait_until


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_card_says_the_context_that_fits_and_the_mode(redis_url: str, tmp_path: Path, deterministic: bool) -> None:
    mode = "--deterministic" if deterministic else "--no-deterministic"
    options = [mode, "--dtype", "float32", "--num-gpu-blocks-override", "20", "--served-model-name", "little"]
    command = ["pagestream_worker.__main__", str(DEMO_MODEL), "--redis", redis_url, *options]
    worker = ForkedPart("engine", command, tmp_path / "log", server=shared_server(*ENGINES))
    worker.start()
    with Redis.from_url(redis_url) as redis:
        try:
            cards: list[bytes] = []

            def is_published() -> bool:
                assert worker.is_alive(), worker.log_tail()
                rows = [key for key in redis.scan_iter("*model*little*") if redis.type(key) == b"hash"]
                cards[:] = [card for row in rows if (card := redis.hget(row, "card"))]
                return bool(cards)

            wait_until(is_published, "the card is published", 90)
            card = ModelCard.FromString(cards[0])
            assert (card.max_model_len, card.deterministic) == (320, deterministic)
        finally:
            worker.stop()
