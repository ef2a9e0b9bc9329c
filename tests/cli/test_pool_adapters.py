"""`pagestream-adapters`, the command of a pool's Job, on a real Redis."""

import asyncio
import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from pagestream.v1.records_pb2 import Adapter
from pagestream_streams import Broker
from pagestream_worker import MOST_RESULT_BYTES
from support.protocol.adapter_folders import write_adapter
from support.protocol.token_streams import CALM

pytestmark = pytest.mark.served

[ADAPTERS] = entry_points(group="console_scripts", name="pagestream-adapters")


async def test_what_is_listed_is_loaded_and_what_has_left_is_unloaded(
    redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = write_adapter(tmp_path / "one", 1), write_adapter(tmp_path / "two", 2)

    async def run(*arguments: str) -> dict[str, dict[str, str]]:
        capsys.readouterr()
        assert await asyncio.to_thread(ADAPTERS.load(), ["demo", "--redis", redis_url, *arguments]) == 0
        found: dict[str, dict[str, str]] = json.loads(capsys.readouterr().out)
        return found

    async def loaded() -> dict[str, str]:
        async with await Broker.connect(redis_url, CALM) as broker:
            return {name: each.revision for name, each in (await broker.adapters.all()).items()}

    results = await run(f"--load=a={one}", f"--load=b={two}", f"--load=gone={tmp_path / 'gone'}")
    a, b = results["a"]["revision"], results["b"]["revision"]
    assert "No such file" in results["gone"]["error"]
    assert await loaded() == {"a": a, "b": b}
    assert "unload it first" in (await run(f"--load=a={two}"))["a"]["error"], "another revision took the name"
    assert (await run(f"--unload=a={a}", f"--load=a={two}", f"--load=b={two}"))["a"] == {"revision": b}
    async with await Broker.connect(redis_url, CALM) as broker:
        await broker.adapters.withdraw("b")
        await broker.adapters.publish(Adapter(name="b", model="demo", path="/by/hand", revision="hand"))
    assert await run(f"--unload=a={b}", f"--unload=b={b}") == {}
    assert await loaded() == {"b": "hand"}, "what was loaded by hand must stay"


async def test_a_result_fits_into_a_termination_message(redis_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    gone = [f"--load={number:02}{'n' * 61}=/gone/{'x' * 200}" for number in range(24)]
    assert await asyncio.to_thread(ADAPTERS.load(), ["demo", "--redis", redis_url, *gone]) == 0
    written = capsys.readouterr().out
    assert len(written) <= MOST_RESULT_BYTES
    assert len(json.loads(written)) == len(gone)
