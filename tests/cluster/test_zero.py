"""An idle pool costs no pod, and one request brings it back."""

from __future__ import annotations

import asyncio
import time

import pytest
from cluster.release import NAMESPACE, Scene
from pagestream_client import AsyncClient
from support.clients.readers import Reader

MOST_S_TO_DECISION = 10.0
"""Twice the goal of 5 s, which the operator's own test of the scaling loop measures from the export with the
message: here kubectl looks for the decision, and streams, cluster and kubectl share the processor.
"""
FIRST_TOKEN_LIMIT_S = 90.0


@pytest.mark.short
async def test_to_zero_and_back(scene: Scene) -> None:
    scene.patch(replicas=None, minReplicas=0, scaling={"idle": {"afterSeconds": 5}})
    begin = time.monotonic()
    await scene.until("no engine", lambda: not NAMESPACE.find("pods", scene.engines), limit_s=120)
    scene.times.note("an idle pool to zero (5 s of idleness asked for)", time.monotonic() - begin)

    async with AsyncClient([scene.target], api_key=scene.api_key) as client:
        begin = time.monotonic()
        reader = Reader()
        asked = asyncio.create_task(scene.questions[0].ask(client, reader))
        await scene.until("the decision for an engine", lambda: scene.pool["status"].get("desiredReplicas", 0) >= 1)
        to_decision = time.monotonic() - begin
        scene.times.note("from one message at zero engines to the decision", to_decision)
        while not reader.chunks:
            await asyncio.sleep(0.02)
            assert time.monotonic() < begin + FIRST_TOKEN_LIMIT_S
        scene.times.note("from that message to its first token", time.monotonic() - begin)
        assert await asked == scene.answers[scene.questions[0].number]
    assert to_decision <= MOST_S_TO_DECISION
    scene.patch(minReplicas=1)
    await scene.settled(1)
