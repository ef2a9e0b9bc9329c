"""Loads that hang, and engines that do not end: real processes."""

import asyncio
import time
from pathlib import Path

import pytest
from pagestream_engine import Engine, EngineConfig
from pagestream_worker import Cores, EngineProcess, EngineStuckError, Loader, LoadTimeoutError, load_settings
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served


def hang(folder: str | Path, config: EngineConfig) -> Engine:
    """Load from a storage that does not answer."""
    while True:
        time.sleep(LIMIT_S)


@pytest.mark.slow
async def test_a_load_that_hangs_ends_with_its_process_and_one_that_stays_is_an_error() -> None:
    limits = {"PAGESTREAM_WORKER__LOAD_TIMEOUT_S": "0.1", "PAGESTREAM_WORKER__KILL_TIMEOUT_S": "1e-9"}
    hasty = load_settings(["model", "--redis", "redis://x"], limits)
    patient = load_settings(["model", "--redis", "redis://x"], {})
    cores = Cores(hasty, f"{__name__}:hang")
    try:
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(LoadTimeoutError, match="raise load_timeout_s"):
                await Loader(cores, hasty.worker).load("model", 0.0)
            killed = cores.current
            await Loader(cores, patient.worker).end(killed)
            assert isinstance(killed, EngineProcess)
            assert killed.exited.is_set()
            await cores.prepare()
            with pytest.raises(EngineStuckError, match="has not ended"):
                await Loader(cores, hasty.worker).end(cores._prepared)
    finally:
        cores.close()
