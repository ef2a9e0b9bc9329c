"""`pagestream dead` over a request that engines really died of."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest
from pagestream_cli import NotFoundError, ServerNotFoundError
from pagestream_cli.__main__ import main
from pagestream_streams import Broker, GatewaySession
from support.protocol.token_streams import FAST, MODEL, TENANT, card, eventually, spec, worker

pytestmark = pytest.mark.served


@dataclass(frozen=True)
class Done:
    """A command's status and output."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def dead(capsys: pytest.CaptureFixture[str]) -> Callable[..., Awaitable[Done]]:
    """Runs the command in a thread of this process."""

    async def run(*arguments: str) -> Done:
        capsys.readouterr()
        status = await asyncio.to_thread(main, ["dead", *arguments])
        return Done(status, *capsys.readouterr())

    return run


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["pagestream_cli.store"], "CONNECT_LIMIT_S", 0.2)


async def quarantined(broker: Broker) -> str:
    """A request that broke every engine which computed it."""
    async with GatewaySession(broker) as gateway:
        request = spec()
        await gateway.accept(request)
        for name in "abcd":
            async with worker(broker, name) as engine:
                [claim] = await engine.claim()
                await engine.session.mark(running=[claim.request_id])
                await engine.session.hand_back([claim.request_id], failed=True)

        async def is_dead() -> bool:
            return bool(await broker.quarantined(MODEL))

        async with worker(broker, "spare"):
            await eventually(is_dead)
    return request.request_id


async def test_list_show_and_requeue(redis_url: str, dead: Callable[..., Awaitable[Done]]) -> None:
    async with await Broker.connect(redis_url, FAST) as broker:
        await broker.publish_model(card(), partitions=1)
        nothing = await dead("list", "--redis", redis_url)
        assert (nothing.returncode, nothing.stdout, nothing.stderr) == (0, "", "no request is quarantined\n")
        request_id = await quarantined(broker)

        listed = await dead("list", "--redis", redis_url)
        assert listed.returncode == 0
        assert listed.stdout.startswith(f"{request_id}  ")
        assert TENANT in listed.stdout
        [row] = json.loads((await dead("list", "--json", "--model", MODEL, "--redis", redis_url)).stdout)
        assert row["request_id"] == request_id

        shown = await dead("show", request_id, "--redis", redis_url)
        assert "engines that died:  a:" in shown.stdout
        whole = json.loads((await dead("show", "--json", request_id, "--redis", redis_url)).stdout)
        assert whole["spec"]["tenant"] == TENANT

        requeued = await dead("requeue", request_id, "--redis", redis_url)
        new_id = requeued.stdout.strip()
        assert (requeued.returncode, (await broker.quarantined_request(request_id)).requeued_as) == (0, new_id)
        assert (await dead("requeue", request_id, "--redis", redis_url)).stdout.strip() == new_id
        async with worker(broker, "fixed") as engine:
            [claim] = await engine.claim()
            assert claim.request_id == new_id


async def test_what_does_not_exist_is_an_error(redis_url: str, dead: Callable[..., Awaitable[Done]]) -> None:
    async with await Broker.connect(redis_url, FAST) as broker:
        await broker.publish_model(card(), partitions=1)
    for arguments in (["show", "nonsense"], ["requeue", "nonsense"], ["list", "--model", "nobody"]):
        done = await dead(*arguments, "--redis", redis_url)
        assert done.returncode == NotFoundError.exit_code
        assert done.stderr.startswith("error: there is no ")


@pytest.mark.usefixtures("_impatient")
async def test_a_redis_that_is_away_or_malformed_is_an_error(dead: Callable[..., Awaitable[Done]]) -> None:
    away = await dead("list", "--redis", "redis://127.0.0.1:1/0")
    assert away.returncode == 1
    assert away.stderr.startswith("error: Redis does not answer at redis://127.0.0.1:1/0")
    malformed = await dead("list", "--redis", "nonsense")
    assert malformed.returncode == 2
    assert "--redis nonsense" in malformed.stderr


@pytest.mark.usefixtures("_impatient")
async def test_what_listens_there_is_no_redis(dead: Callable[..., Awaitable[Done]]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        done = await dead("list", "--redis", f"redis://127.0.0.1:{port}/0")
    assert done.returncode == ServerNotFoundError.exit_code
    assert "is not Redis protocol" in done.stderr
