"""An engine whose KV pool holds less than the model's context serves, and publishes, what fits."""

import subprocess
import sys

from pagestream.v1.records_pb2 import ModelCard
from redis import Redis
from support.processes.stack import DEMO_MODEL
from support.processes.waiting import wait_until


def test_the_card_says_the_context_that_fits(redis_url: str) -> None:
    options = ["--dtype", "float32", "--num-gpu-blocks-override", "20", "--served-model-name", "little"]
    command = [sys.executable, "-m", "pagestream_worker", str(DEMO_MODEL), "--redis", redis_url, *options]
    with subprocess.Popen(command) as worker, Redis.from_url(redis_url) as redis:
        try:
            cards: list[bytes] = []

            def is_published() -> bool:
                assert worker.poll() is None
                rows = [key for key in redis.scan_iter("*model*little*") if redis.type(key) == b"hash"]
                cards[:] = [card for row in rows if (card := redis.hget(row, "card"))]
                return bool(cards)

            wait_until(is_published, "the card is published", 90)
            assert ModelCard.FromString(cards[0]).max_model_len == 320
        finally:
            worker.terminate()
            worker.wait(30)
