"""A second pool with another model, and a second release in another namespace: none sees the other's."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from cluster.load import known_answers
from cluster.release import CHART, NAMESPACE, VALUES, Scene, Times, make_namespace, wait_for_pool
from cluster.resources import Namespace, Release
from pagestream_client import AsyncClient, ModelNotFound, Unauthenticated
from support.engines.tiny_models import make_model
from support.kubernetes.api import CommandError, run_tool

OTHER = Namespace("pagestream-test-other")
NAMESPACES = (OTHER,)
LISTED_LIMIT_S = 10.0  # a gateway looks for new models once a second


@pytest.fixture(scope="module")
def tiny_pool(release: Release, tmp_path_factory: pytest.TempPathFactory, times: Times) -> Iterator[str]:
    """A pool that serves a small random model, whose files lie in a ConfigMap."""
    folder = tmp_path_factory.mktemp("tiny")
    changes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    make_model(folder / "model", "llama", dtype=torch.bfloat16, **changes)
    files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in (folder / "model").iterdir()}
    objects = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "tiny-model"}, "binaryData": files},
        {
            "apiVersion": "pagestream.dev/v1alpha1",
            "kind": "EnginePool",
            "metadata": {"name": "tiny"},
            "spec": {
                "model": {"source": {"path": "/models/tiny"}, "servedName": "tiny"},
                "engine": {"numGpuBlocksOverride": 128},
                "maxReplicas": 1,
                "template": {
                    "resources": {"requests": {"cpu": "50m", "memory": "256Mi"}},
                    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
                    "volumes": [{"name": "tiny", "configMap": {"name": "tiny-model"}}],
                    "volumeMounts": [{"name": "tiny", "mountPath": "/models/tiny", "readOnly": True}],
                },
            },
        },
    ]
    NAMESPACE.kubectl("apply", "--server-side", "--filename", "-", text="\n---\n".join(map(json.dumps, objects)))
    with times.of("a second pool with another model, until it is ready"):
        wait_for_pool("tiny", 1)
    yield "tiny"
    delete_pool("tiny")
    NAMESPACE.kubectl("delete", "configmap", "tiny-model")


def delete_pool(name: str) -> None:
    options = ("--ignore-not-found", "--wait", "--timeout", "90s")
    NAMESPACE.kubectl("delete", "enginepool", name, *options, limit_s=100)


async def test_a_second_pool(scene: Scene, tiny_pool: str) -> None:
    async with AsyncClient([scene.target], api_key=scene.api_key) as client:
        async with asyncio.timeout(LISTED_LIMIT_S):
            while {model.name for model in await client.list_models()} != {"demo", "tiny"}:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        answer = await client.generate(tiny_pool, prompt_token_ids=[5, 6, 7], max_tokens=32, ignore_eos=True).collect()
        assert len(answer.choices[0].token_ids) == 32
    again = await known_answers([scene.target], scene.api_key, scene.questions[:2])
    assert again == {number: scene.answers[number] for number in again}


async def test_a_deleted_pool_takes_its_model_along(scene: Scene, tiny_pool: str) -> None:
    """A Job of the engine's image removes it from Redis, and goes with the pool."""
    with scene.times.of("the deletion of a pool: drained, its model unpublished"):
        await asyncio.to_thread(delete_pool, tiny_pool)
    async with AsyncClient([scene.target], api_key=scene.api_key) as client, asyncio.timeout(LISTED_LIMIT_S):
        while {model.name for model in await client.list_models()} != {"demo"}:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


@pytest.fixture(scope="module")
def other_release(release: Release, image_values: dict[str, object], times: Times) -> Iterator[Release]:
    make_namespace(OTHER)
    more = {
        "pools": {"second": demo_pool(), "demo": None},
        "gateway.autoscaling.minReplicas": 1,
        "operator.replicas": 1,
    }
    other = Release("pagestream", OTHER, CHART, {**image_values, **more}, (VALUES,))
    with times.of("a second release in another namespace, until its pool is ready"):
        other.install()
        wait_for_pool("second", 1, OTHER)
    yield other
    with suppress(CommandError):
        other.uninstall()
    run_tool("kubectl", "delete", "namespace", OTHER.name, "--wait", "--timeout", "120s", limit_s=130)


def demo_pool() -> dict[str, object]:
    """The demo model under another name."""
    spec: dict[str, object] = NAMESPACE.get("enginepool", "demo")["spec"]
    chosen = {each: spec[each] for each in ("engine", "template")}
    return {"model": {"source": {"path": "/models/demo"}, "servedName": "second"}, "maxReplicas": 1, **chosen}


async def test_a_second_release(scene: Scene, other_release: Release) -> None:
    key = OTHER.secret("pagestream-api-key", "key")
    there = f"{OTHER.service_address('pagestream-gateway')}:50051"
    async with AsyncClient([there], api_key=key) as client:
        answer = await client.generate("second", "The lighthouse", max_tokens=8, ignore_eos=True).collect()
        assert len(answer.choices[0].token_ids) == 8
        with pytest.raises(ModelNotFound):
            await client.generate("demo", "The lighthouse", max_tokens=8).collect()
    async with AsyncClient([there], api_key=scene.api_key) as client:
        with pytest.raises(Unauthenticated):
            await client.generate("second", "The lighthouse", max_tokens=8).collect()
    async with AsyncClient([scene.target], api_key=scene.api_key) as client:
        assert "second" not in {model.name for model in await client.list_models()}
