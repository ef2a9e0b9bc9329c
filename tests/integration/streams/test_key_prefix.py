"""Two deployments of one model name on one Redis, told apart by their key prefix."""

from dataclasses import replace

import pytest
from pagestream_streams import Broker, GatewaySession, RequestNotFound
from support.protocol.token_streams import FAST, MODEL, TENANT, card, numbers, read_all, spec, worker
from support.redis.topologies import Place, find_keys


async def test_two_deployments_share_nothing(redis_url: str, redis_server: Place) -> None:
    blue, green = (replace(FAST, key_prefix=f"ns.{name}") for name in ("blue", "green"))
    async with await Broker.connect(redis_url, blue) as ours, await Broker.connect(redis_url, green) as theirs:
        await ours.publish_model(card(MODEL), partitions=1)
        assert await theirs.models() == []
        await theirs.publish_model(card(MODEL), partitions=1)
        async with worker(theirs) as other, GatewaySession(theirs) as far, GatewaySession(ours) as near:
            mine = spec(key="k")
            assert await near.accept_once(mine, body_digest="b") == mine
            # The same key, tenant and model there are another request, which an engine there runs first.
            their_own = spec(key="k")
            assert await far.accept_once(their_own, body_digest="other") == their_own
            [claim] = await other.claim()
            assert claim.request_id == their_own.request_id
            await other.generate(claim, 2, finish=True)
            assert await other.session.claim(max_requests=9, max_prompt_tokens=10**6) == []
            assert numbers(await read_all(far, their_own.request_id)) == [100, 101]
            with pytest.raises(RequestNotFound):
                await ours.view(their_own.request_id, TENANT)
            async with worker(ours) as engine:
                [claim] = await engine.claim()
                assert claim.request_id == mine.request_id
                await engine.generate(claim, 3, finish=True)
                assert numbers(await read_all(near, mine.request_id)) == [100, 101, 102]
    # Nothing lies outside the two prefixes, and the default one would have found none of it.
    assert not [key for key in find_keys(redis_server, "*") if not key.startswith((b"ns.blue:", b"ns.green:"))]
