"""A log of the greatest length that the API allows is opened in pages, and beats go between them."""

import asyncio
from typing import Any

import pytest
from pagestream_streams import Broker, GatewaySession
from pagestream_streams.engine.opening import PAGE_ENTRIES
from support.protocol.token_streams import TENANT, spec, worker

NUM_CHOICES, NUM_TOKENS = 128, 128 * 200
_GENERATE = """
for i = 1, ARGV[1] do
  redis.call('XADD', KEYS[1], i .. '-0', 'c', (i - 1) % ARGV[2], 't', i % 30000, 'x', ' word', 'd', '0123456789abcdef')
end
redis.call('HSET', KEYS[2], 'next', ARGV[1], 'digest', '0123456789abcdef')
"""


async def test_beats_go_between_the_pages(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    request = spec(n=NUM_CHOICES)
    async with GatewaySession(broker) as gateway:
        await gateway.accept(request)
    where = await broker.directory.locate(request.request_id)
    keys = where.log(request.request_id), where.request(request.request_id)
    await broker.connection.execute("EVAL", _GENERATE, 2, *keys, NUM_TOKENS, NUM_CHOICES)
    execute, pages, beat_at = broker.connection.execute, [], []

    async with worker(broker) as engine:

        async def watched(*command: Any) -> Any:
            reply = await execute(*command)
            if command[0] == "XRANGE":
                pages.append(len(reply))
                if len(pages) == 2:
                    await engine.session.heartbeat.beat()
                    beat_at.append(len(pages))
            return reply

        monkeypatch.setattr(broker.connection, "execute", watched)
        async with asyncio.timeout(20):
            [claim] = await engine.claim()
        assert max(pages) == PAGE_ENTRIES
        assert beat_at[0] < len(pages)
        assert claim.log.num_tokens == sum(pages) == NUM_TOKENS
        assert claim.log.tokens[5][:3].tolist() == [6, 134, 262]
        assert claim.log.tokens[0].itemsize == 4, "bytes a token: the texts are left in Redis"
        assert engine.lost == []
        assert (await broker.view(request.request_id, TENANT)).attempts == 1
