"""An engine process refuses a context length that results from the memory that happens to be free."""

import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from pagestream_engine.config import EngineConfig
from pagestream_engine.engine import Engine
from pagestream_worker.process import check_context
from support.processes.stack import DEMO_MODEL, free_port

EXIT_BAD_OPTIONS = 2


def worker(*options: str) -> Sequence[str]:
    redis = f"redis://127.0.0.1:{free_port()}/0"
    return [sys.executable, "-m", "pagestream_worker", str(DEMO_MODEL), "--redis", redis, *options]


def test_it_refuses_to_serve_and_names_the_option() -> None:
    command = worker("--dtype", "float32", "--num-gpu-blocks-override", "20")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == EXIT_BAD_OPTIONS, ended.stderr
    [message] = [line for line in ended.stderr.splitlines() if "max_model_len" in line and "expected" in line]
    assert "the KV pool holds 320 tokens here and the model's context 1024" in message
    assert "give all engines of this model the same --max-model-len, at most 320" in message


@pytest.mark.parametrize(("asked", "settled"), [(320, 320), (64, 64), (None, 1024)])
def test_a_given_context_and_the_models_own_are_served(asked: int | None, settled: int) -> None:
    config = EngineConfig.from_options({} if asked is None else {"max_model_len": asked})
    check_context(cast(Engine, SimpleNamespace(config=config, max_model_len=settled, model_context=1024)))
