"""The engine as a process: what it imports, how it is ended, and the card that it publishes."""

import subprocess
import sys
from pathlib import Path

import pytest
from pagestream.v1.records_pb2 import ModelCard
from redis import Redis
from support.processes.fork_server import ENGINES, ForkedPart, shared_server
from support.processes.stack import DEMO_MODEL
from support.processes.waiting import wait_until

pytestmark = pytest.mark.served

LIGHT = ("pagestream_worker.process, pagestream_worker.card", "pagestream_worker.jobs")


@pytest.mark.parametrize("modules", LIGHT)
def test_what_talks_to_redis_imports_no_torch(modules: str) -> None:
    """The engine has a process of its own, and a Job's command needs none."""
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; sys.exit('torch' in sys.modules)"], check=True)


ENDED_WITHIN_THE_IMPORTS = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pagestream_worker.process":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
from pagestream_worker.__main__ import main
main()
"""


def test_sigterm_ends_the_command_before_its_modules_are_imported() -> None:
    """By a handler: the first process of a container has no default action, which would end this one by the signal."""
    subprocess.run([sys.executable, "-c", ENDED_WITHIN_THE_IMPORTS], check=True)


def test_the_card_says_the_context_that_fits_and_the_mode(redis_url: str, tmp_path: Path) -> None:
    """A pool of 20 blocks holds less than the model's context."""
    engines = []
    with Redis.from_url(redis_url) as redis:
        try:
            for mode in ("deterministic", "no-deterministic"):
                options = [f"--{mode}", "--dtype", "float32", "--num-gpu-blocks-override", "20"]
                options += ["--served-model-name", f"little-{mode}"]
                command = ["pagestream_worker.__main__", str(DEMO_MODEL), "--redis", redis_url, *options]
                engines.append(ForkedPart(mode, command, tmp_path / mode, server=shared_server(*ENGINES)))
                engines[-1].start()
            for engine in engines:
                wait_until(engine.has_said_ready, f"{engine.name} is ready")
            keys = [key for key in redis.scan_iter("*model*little*") if redis.type(key) == b"hash"]
            cards = [ModelCard.FromString(card) for key in keys if (card := redis.hget(key, "card"))]
        finally:
            for engine in engines:
                engine.stop()
    assert sorted((card.max_model_len, card.deterministic) for card in cards) == [(320, False), (320, True)]
