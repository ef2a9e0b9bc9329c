"""A pool that lists two models: its engines share them out, and streams of both outlive an engine."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator

import pytest
from cluster.load import Question, known_answers
from cluster.release import NAMESPACE, Scene, busiest_engine, wait_for_pool
from cluster.resources import send

POOL = "shared"
MODELS = ("first", "second")
NUM_QUESTIONS = 6
MOST_TOKENS = 400
WIDTH = 6


def make_pool(demo: Scene) -> None:
    """The demo model under two names: an engine has one of them at a time, in a process of its own."""
    template = demo.pool["spec"]["template"]
    first, second = ({"source": {"path": "/models/demo"}, "servedName": name} for name in MODELS)
    spec = {
        "model": first,
        "models": [second],
        "engine": {"deterministic": True},
        "replicas": 1,
        "maxReplicas": 2,
        "template": template,
    }
    pool = {"apiVersion": "pagestream.dev/v1alpha1", "kind": "EnginePool", "metadata": {"name": POOL}, "spec": spec}
    NAMESPACE.kubectl("apply", "--server-side", "--filename", "-", text=json.dumps(pool))


@pytest.fixture(scope="module")
def shared(scene: Scene) -> Iterator[Scene]:
    """The pool with one engine, and what it answers undisturbed as either model."""
    scene.pin(1)
    wait_for_pool(scene.name, 1)
    with scene.times.of("a pool with two models, until its engine is ready"):
        make_pool(scene)
        wait_for_pool(POOL, 1)
    questions = [Question(number, MOST_TOKENS, MODELS[number % len(MODELS)]) for number in range(NUM_QUESTIONS)]
    with scene.times.of("six streams of two models by one engine, which changes its model for the second"):
        answers = asyncio.run(known_answers([scene.target], scene.api_key, questions))
    yield Scene(scene.release, scene.target, scene.api_key, questions, answers, scene.times, POOL, WIDTH)
    NAMESPACE.kubectl("delete", "enginepool", POOL, "--wait", "--timeout", "90s", limit_s=100)


def test_one_engine_answers_as_both_models(scene: Scene, shared: Scene) -> None:
    for number, (choices, *_) in shared.answers.items():
        [[alone], [found]] = scene.answers[number][0], choices
        assert len(found.token_ids) == MOST_TOKENS
        assert found.token_ids == alone.token_ids[:MOST_TOKENS], f"question {number}"


async def test_a_killed_engine_of_two(shared: Scene) -> None:
    """Whichever model it has: the streams of both end with the known tokens."""
    shared.pin(2)
    await shared.settled(2)

    def kill() -> None:
        send(busiest_engine(shared), "engine", signal.SIGKILL)

    async with shared.disturbed("kill -9 of one of two engines that share two models", kill):
        await shared.settled(2)
