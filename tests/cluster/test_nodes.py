"""Engines of two pods, with a rank in each: the tokens of one process, whatever happens to one of the pods."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from cluster.load import Question, known_answers
from cluster.release import NAMESPACE, Scene, busiest_engine, delete_by_force, num_restarts, wait_for_pool
from cluster.resources import Object, name_of, process_of, seconds_to_ready, send

POOL = "pair"
NUM_QUESTIONS = 6
MOST_TOKENS = 300
WIDTH = 4
SAME_TOKENS = 64
"""Of an answer, compared with one process. A sum of two parts may have other bits than the whole, so somewhere within
thousands of tokens two that are almost as likely change places."""
GOES_LIMIT_S = 20.0
"""For the pods of a group that has been ended. Less than `drain.graceSeconds`, after which the kubelet kills them."""


def make_pool(demo: Scene) -> None:
    """The demo model in groups of two pods, otherwise as the demo pool."""
    spec = demo.pool["spec"]
    changed = {
        "model": {"source": {"path": "/models/demo"}, "servedName": POOL},
        "engine": {"deterministic": True},
        "parallel": {"tensor": 2},
        "nodes": 2,
        "replicas": 1,
        "maxReplicas": 3,
        "template": spec["template"],
    }
    pool = {"apiVersion": "pagestream.dev/v1alpha1", "kind": "EnginePool", "metadata": {"name": POOL}, "spec": changed}
    NAMESPACE.kubectl("apply", "--server-side", "--filename", "-", text=json.dumps(pool))


@pytest.fixture(scope="module")
def pair(scene: Scene) -> Iterator[Scene]:
    """The pool, and what its first group answers undisturbed."""
    scene.pin(1)
    wait_for_pool(scene.name, 1)
    with scene.times.of("a pool with a group of two pods, until it is ready"):
        make_pool(scene)
        wait_for_pool(POOL, 1)
    questions = [Question(number, MOST_TOKENS, POOL) for number in range(NUM_QUESTIONS)]
    answers = asyncio.run(known_answers([scene.target], scene.api_key, questions))
    yield Scene(scene.release, scene.target, scene.api_key, questions, answers, scene.times, POOL, WIDTH)
    NAMESPACE.kubectl("delete", "enginepool", POOL, "--wait", "--timeout", "90s", limit_s=100)


def follower_of(leader: str) -> Object:
    """The other pod of a group."""
    [pod] = NAMESPACE.find("pods", f"pagestream.dev/leader={leader}")
    return pod


def groups() -> set[str]:
    """Leaders of which there is still a StatefulSet, or a pod of one, however close to its end."""
    found = NAMESPACE.find("statefulsets,pods", "pagestream.dev/leader")
    return {each["metadata"]["labels"]["pagestream.dev/leader"] for each in found}


def test_tokens_of_one_process(scene: Scene, pair: Scene) -> None:
    for number, (choices, *_) in pair.answers.items():
        [[alone], [found]] = scene.answers[number][0], choices
        assert len(found.token_ids) == MOST_TOKENS
        assert found.token_ids[:SAME_TOKENS] == alone.token_ids[:SAME_TOKENS], f"question {number}"


def kill_process(follower: Object) -> None:
    send(follower, "engine", signal.SIGKILL)


def force_deletion(follower: Object) -> None:
    delete_by_force(name_of(follower))


async def test_lost_ranks(pair: Scene) -> None:
    """The group ends with its rank, its streams go on with another group, and it forms again."""
    pair.pin(2)
    await pair.settled(2)
    ways = {
        "kill -9 of a rank in another pod than its group's leader": kill_process,
        "kubectl delete pod --force of the same pod": force_deletion,
    }
    process_of(follower_of(min(pair.pods())), "engine")  # skips where it runs on another machine
    async with pair.load() as load:
        for what, lose in ways.items():
            await load.wait_under_way()
            leader, restarts = await asyncio.to_thread(lose_rank, pair, lose)
            begin = time.monotonic()
            await pair.until("the leader's restart", lambda: num_restarts(leader) > restarts)  # noqa: B023
            await pair.settled(2)
            pair.times.note("from there until its group is ready again", time.monotonic() - begin)
            await load.wait_marked()
            pair.times.note(f"{what}: longest silence of a stream", load.longest_silence_s)


def lose_rank(pair: Scene, lose: Callable[[Object], None]) -> tuple[str, int]:
    """Lose the other pod of the busiest group; return the group's leader, and how often that was started before."""
    leader = name_of(busiest_engine(pair))
    restarts = num_restarts(leader)
    lose(follower_of(leader))
    return leader, restarts


async def test_a_rolling_update(pair: Scene) -> None:
    pair.pin(2)
    await pair.settled(2)
    before = groups()
    assert len(before) == 2
    async with pair.load() as load:
        await load.wait_under_way()
        begin = time.monotonic()
        pair.patch(engine={"maxNumSeqs": 48})
        await pair.settled(2, limit_s=240)
        pair.times.note("rolling update of two groups under load", time.monotonic() - begin)
        assert not before & pair.pods()
        await pair.until("the former groups to go", lambda: not before & groups(), limit_s=GOES_LIMIT_S)
        await load.wait_marked()
        pair.times.note("that update: longest silence of a stream", load.longest_silence_s)
    newest = max(NAMESPACE.pods(pair.engines), key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    pair.times.note("a group's start-up under load: leader's pod created until ready", seconds_to_ready(newest))


async def test_scale_in(pair: Scene) -> None:
    pair.pin(2)
    await pair.settled(2)
    assert len(groups()) == 2
    async with pair.load() as load:
        await load.wait_under_way()
        begin = time.monotonic()
        pair.pin(1)
        await pair.until("a leader to drain and go", lambda: len(NAMESPACE.find("pods", pair.engines)) == 1)
        pair.times.note("kubectl scale from 2 groups to 1 under load, until a leader is gone", time.monotonic() - begin)
        await pair.until("its group to go", lambda: groups() == pair.pods(), limit_s=GOES_LIMIT_S)
        pair.times.note("and until the rest of its group is", time.monotonic() - begin)
        await load.wait_marked()
        pair.times.note("that scale-in: longest silence of a stream", load.longest_silence_s)
    assert len(groups()) == 1
