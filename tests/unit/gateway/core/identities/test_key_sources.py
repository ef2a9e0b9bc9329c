"""Keys over HTTP, from a real server: outages, floods, and answers that are no key set."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from pagestream_gateway.core.identities import key_sources
from pagestream_gateway.core.identities.identity import Identity
from pagestream_gateway.core.identities.issuers import Issuer
from pagestream_gateway.core.identities.tokens import Tokens
from pagestream_gateway.errors import CredentialsUnavailable, Unauthenticated
from support.network.token_issuer import AUDIENCE, ISSUER, KeyServer, Signer, key_set, running_key_server

OLD, NEW = Signer(kid="old"), Signer(kid="new", number=1)


@pytest.fixture
def server() -> Iterator[KeyServer]:
    with running_key_server(OLD) as server:
        yield server


@asynccontextmanager
async def watched(server: KeyServer) -> AsyncIterator[Tokens]:
    issuer = Issuer(issuer=ISSUER, audiences=[AUDIENCE], tenant_claim="tenant", jwks_url=server.url)
    tokens = Tokens([issuer])
    (task,) = tokens.watches()
    task.start()
    try:
        yield tokens
    finally:
        await task.stop()


async def test_the_first_call_waits_for_the_keys_and_a_new_key_is_fetched_at_once(server: KeyServer) -> None:
    async with watched(server) as tokens:
        assert await tokens.identity(OLD.token()) == Identity("a", f"{ISSUER} u1")
        server.body = key_set(OLD, NEW)
        answers = await asyncio.gather(*(tokens.identity(NEW.token()) for _ in range(20)))
        assert {each.tenant for each in answers} == {"a"}
        assert server.num_fetches <= 3


async def test_a_flood_of_unknown_keys_fetches_once(server: KeyServer) -> None:
    async with watched(server) as tokens:
        await tokens.identity(OLD.token())
        before = server.num_fetches
        calls = (tokens.identity(Signer(kid=f"flood {number}", number=5).token()) for number in range(300))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in answers} == {Unauthenticated}
        assert server.num_fetches == before + 1


async def test_keys_stay_while_their_address_fails(server: KeyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sources, "_REFETCH_S", 0.0)
    async with watched(server) as tokens:
        await tokens.identity(OLD.token())
        for status, body, headers in (
            (500, b"", {}),
            (302, b"", {"Location": server.url}),
            (200, b"{}", {}),
            (200, key_set(NEW), {"Content-Encoding": "gzip"}),
            (200, key_set(NEW)[:-9], {"Content-Length": "100000"}),
        ):
            server.status, server.body, server.headers = status, body, headers
            before = server.num_fetches
            with pytest.raises(Unauthenticated):
                await tokens.identity(NEW.token())
            assert server.num_fetches == before + 1
            await tokens.identity(OLD.token(jti=str(status)))


async def test_a_huge_set_is_not_read(server: KeyServer) -> None:
    server.body = b'{"keys": [' + b" " * 100_000_000
    async with watched(server) as tokens:
        with pytest.raises(CredentialsUnavailable):
            await tokens.identity(OLD.token())
    assert server.num_sent < 16_000_000  # what the sockets hold


async def test_a_silent_address_holds_a_call_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_sources, "_WAIT_S", 0.05)
    monkeypatch.setattr(key_sources, "_FETCH_LIMIT_S", 0.2)

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1024):
            pass
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent, watched(KeyServer(b"", port=silent.sockets[0].getsockname()[1])) as tokens:
        with pytest.raises(CredentialsUnavailable):
            await tokens.identity(OLD.token())
