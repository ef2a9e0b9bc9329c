"""`pagestream models` and `pagestream-unpublish` on a real Redis."""

import asyncio
import json
from importlib.metadata import entry_points

import pytest
from pagestream_cli.__main__ import main as pagestream
from pagestream_streams import Broker, GatewaySession
from support.protocol.token_streams import CALM, MODEL, card, spec, worker

pytestmark = pytest.mark.served

[UNPUBLISH] = entry_points(group="console_scripts", name="pagestream-unpublish")


async def test_list_and_remove(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGESTREAM_BROKER__DIRECTORY_TTL_S", "0.1")
    monkeypatch.setenv("PAGESTREAM_WORKER__REDIS", redis_url)

    async def models(*arguments: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(pagestream, ["models", *arguments, "--redis", redis_url])
        return (code, *capsys.readouterr())

    async def unpublish(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(UNPUBLISH.load(), arguments)
        return code, capsys.readouterr().err.removeprefix("pagestream-unpublish: ").rstrip()

    async with await Broker.connect(redis_url, CALM) as broker:
        await broker.publish_model(card(), partitions=1)
        await broker.publish_model(card("other"), partitions=1)
        async with worker(broker):
            _, listed, _ = await models()
            assert listed.startswith("other  0 engines  1 partitions  published 20")
            assert "\ntest/model  1 engines" in listed
            code, _, said = await models("rm", MODEL)
            assert (code, "1 engine serves 'test/model': " in said) == (1, True)
            assert (await unpublish(MODEL))[0] == 3
        async with GatewaySession(broker) as gateway:
            await gateway.accept(spec())
        assert (await unpublish(MODEL))[0] == 4
        assert await unpublish(MODEL, "--end-requests") == (0, "'test/model' was removed; 1 requests were ended")
        assert await unpublish(MODEL) == (0, "'test/model' is not published")
        assert (await models("rm", "other"))[0] == 0
        code, _, said = await models("rm", "other")
        assert (code != 0, "there is no model 'other'" in said, "Broker" in said) == (True, True, False)
        assert json.loads((await models("list", "--json"))[1]) == []
    assert (await unpublish(MODEL, "--redis", "http://x"))[0] == 2
