"""The engine that is prepared for the next model."""

import asyncio

import pytest
from pagestream_engine.engine import Engine
from pagestream_worker.models.cores import Cores
from pagestream_worker.settings import load_settings
from pagestream_worker.stepping.engine_core import EngineCoreError

LIMIT_S = 60.0


async def test_a_prepared_engine_that_died_is_replaced() -> None:
    cores = Cores(load_settings(["model", "--redis", "redis://x"], {}), Engine)
    try:
        await cores.prepare()
        dead = cores._prepared
        assert dead is not None
        dead.close()
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(EngineCoreError):
                await asyncio.wrap_future(dead.ended)
        await cores.prepare()
        assert cores._prepared is not dead
    finally:
        cores.close()
