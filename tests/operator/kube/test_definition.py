"""The definition of EnginePool on a real API server: what it accepts, what it refuses, and in which words."""

from typing import Any

import pytest
from support.kubernetes.control_plane import ControlPlane, Refused
from support.kubernetes.operator_process import PoolWorld

pytestmark = pytest.mark.kube


@pytest.fixture(scope="module")
def pools(world: PoolWorld) -> PoolWorld:
    world.create()
    return world


def hub(name: str, secret: str) -> dict[str, Any]:
    return {"source": {"hub": {"name": f"org/{name}", "tokenSecret": secret}}, "servedName": name}


OTHERS = [{"source": {"path": "/b"}, "servedName": "b"}]
LORA = {"enableLora": True}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"minReplicas": 5, "maxReplicas": 2}, "raise maxReplicas, or lower minReplicas"),
    ({"minReplicas": 1, "maxReplicas": 2, "warmSpares": 2}, "raise maxReplicas, or lower warmSpares"),
    ({"adapters": [{"name": "a", "path": "/a"}]}, "adapters need engine.enableLora: set it to true"),
    ({"adapters": [{"name": "demo", "path": "/a"}], "engine": {"enableLora": True}}, "choose another name"),
    ({"models": [{"source": {"path": "/b"}, "servedName": "demo"}]}, "leave out the one with model's servedName"),
    ({"models": OTHERS, "adapters": [{"name": "a", "path": "/a"}], "engine": LORA}, "so a pool with models has none"),
    ({"models": OTHERS, "nodes": 2, "parallel": {"tensor": 2}}, "nodes is 1 with models"),
    ({"models": [{"source": {"path": "/b,c"}, "servedName": "b"}]}, "models has paths and revisions without ','"),
    ({"models": [hub("b", "one"), hub("c", "other")]}, "models of the hub share one access token"),
    ({"models": [{"source": {"path": "b"}, "servedName": "b"}]}, "write `/models/demo`"),
    ({"models": [*OTHERS, *OTHERS]}, "Duplicate value"),
    ({"template": {"env": [{"name": "PAGESTREAM_WORKER__MODELS"}]}}, "further models in `spec.models`"),
    ({"chatTemplate": {}}, "exactly one of text and configMapKeyRef"),
    (
        {"chatTemplate": {"text": "{{ messages }}", "configMapKeyRef": {"name": "templates", "key": "own"}}},
        "exactly one of text and configMapKeyRef",
    ),
    ({"chatTemplate": {"configMapKeyRef": {"name": "templates"}}}, "spec.chatTemplate.configMapKeyRef.key"),
    (
        {
            "models": [{"source": {"volume": {"claim": "c"}}, "servedName": "b"}],
            "template": {"volumeMounts": [{"name": "v", "mountPath": "/models/volume-2"}]},
        },
        "the models' claims are mounted",
    ),
    ({"replicas": 11}, "raise maxReplicas first, or pin the pool at fewer pods"),
    ({"model": {"source": {"path": None}}}, "exactly one of path, volume and hub: for example"),
    ({"model": {"source": {"hub": {"name": "org/name"}}}}, "exactly one of path, volume and hub"),
    ({"model": {"source": {"path": "models/demo"}}}, "write `/models/demo`"),
    ({"model": {"source": {"path": None, "hub": {"name": "https://hub/x/y"}}}}, "write `organisation/name`"),
    ({"model": {"source": {"path": None, "volume": {"claim": "c", "path": "../x"}}}}, "write `llama-3-8b`, not"),
    ({"model": {"servedName": "another"}}, "make another EnginePool with the new name"),
    ({"model": {"servedName": "-demo"}}, "write `llama-3.1-8b`"),
    ({"engine": {"maxNumSeqs": 64, "maxNumBatchedTokens": 32}}, "raise it, or lower maxNumSeqs"),
    ({"engine": {"dtype": "int4"}}, 'supported values: "auto", "float32", "float16", "bfloat16"'),
    ({"engine": {"gpuMemoryUtilization": 0}}, "should be greater than 0"),
    ({"engine": {"schedulingPolicy": "lottery"}}, "name its module in engine.plugins"),
    ({"engine": {"plugins": ["not-a-module"]}}, "spec.engine.plugins[0] in body should match"),
    ({"scaling": {"kvUtilization": {"target": 0.5}}}, "write for example `kvUtilization: {target: 0.8, low: 0.6}`"),
    ({"scaling": {"panic": {"threshold": 1}}}, "should be greater than 1"),
    ({"rollout": {"maxSurge": 0, "maxUnavailable": "0%"}}, "write `maxUnavailable: 1`"),
    ({"template": {"env": [{"name": "PAGESTREAM_ENGINE__SEED", "value": "1"}]}}, "are written in `spec.engine`"),
    ({"template": {"gpu": {"count": 2}}}, "template.gpu.count times nodes is parallel.tensor times parallel.pipeline"),
    (
        {"parallel": {"tensor": 2}, "template": {"gpu": {"count": 1}}},
        "template.gpu.count times nodes is parallel.tensor",
    ),
    ({"parallel": {"pipeline": 2}, "template": {"gpu": {"count": 1}}}, "template.gpu.count times nodes is"),
    ({"nodes": 2, "parallel": {"tensor": 3}}, "nodes divides parallel.tensor times parallel.pipeline"),
    ({"parallel": {"tensor": 16, "pipeline": 8}}, "is at most 64, the ranks of an engine"),
    ({"parallel": {"pipeline": 2}, "engine": {"cpuOffloadGb": 1.5}}, "which ranks don't have yet"),
    ({"parallel": {"tensor": 0}}, "should be greater than or equal to 1"),
    ({"template": {"labels": {"pagestream.dev/pool": "x"}}}, "choose another prefix"),
    (
        {
            "model": {"source": {"path": None, "volume": {"claim": "c"}}},
            "template": {"volumeMounts": [{"name": "v", "mountPath": "/models/volume"}]},
        },
        "choose another mountPath",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_wrong_spec_is_refused_with_what_to_write(pools: PoolWorld, change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refusal:
        pools.change(change)
    assert refusal.value.status == 422
    assert message in refusal.value.message


@pytest.mark.parametrize("name", ["1demo", "a.b", "a" * 51])
def test_a_name_that_no_service_could_have_is_refused(pools: PoolWorld, name: str) -> None:
    with pytest.raises(Refused, match="at most 50 lower-case letters"):
        pools.create(name)


def test_the_names_limit_is_50(pools: PoolWorld) -> None:
    pools.create("a" * 50)


def test_a_spec_with_every_part_is_accepted(pools: PoolWorld) -> None:
    created = pools.create(
        "whole",
        model={"source": {"volume": {"claim": "models", "path": "llama"}}, "servedName": "llama", "revision": "r1"},
        chatTemplate={"configMapKeyRef": {"name": "templates", "key": "llama.jinja"}},
        engine={
            "dtype": "bfloat16",
            "maxNumSeqs": 64,
            "enablePrefixCaching": True,
            "gpuMemoryUtilization": 0.8,
            "plugins": ["mine.policies"],
            "schedulingPolicy": "shortest_prompt_first",
        },
        template={
            "gpu": {"count": 4, "type": "NVIDIA-H200"},
            "resources": {"requests": {"cpu": "1500m", "memory": 4096}, "limits": {"memory": "8Gi"}},
            "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
            "volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}],
            "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
            "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "tolerations": [{"operator": "Exists"}],
        },
        parallel={"tensor": 4},
        scaling={"kvUtilization": {"target": 0.7, "low": 0.4}, "idle": {"afterSeconds": 60}},
        rollout={"maxSurge": "25%", "maxUnavailable": 0},
        minReplicas=0,
    )
    spec = created["spec"]
    assert spec["template"]["volumes"] == [{"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}]
    assert spec["scaling"]["kvUtilization"] == {"target": 0.7, "low": 0.4}
    assert spec["scaling"]["stabilization"]["downSeconds"] > 0
    assert spec["drain"]["graceSeconds"] == 30
    assert "replicas" not in spec


def test_replicas_null_is_taken_as_unset(pools: PoolWorld) -> None:
    assert "replicas" not in pools.create("null", replicas=None)["spec"]


def test_kubectl_scale_pins_a_pool_that_names_no_replicas(pools: PoolWorld) -> None:
    pools.create("pinned")
    pools.kube.kubectl("--namespace", pools.namespace, "scale", "enginepool/pinned", "--replicas=4")
    assert pools.pool("pinned")["spec"]["replicas"] == 4


def test_kubectl_scale_is_refused_beyond_the_maximum(pools: PoolWorld) -> None:
    answer = pools.kube.kubectl("--namespace", pools.namespace, "scale", "enginepool/demo", "--replicas=11", fails=True)
    assert "raise maxReplicas first" in answer


def test_explain_reads_well(kube: ControlPlane) -> None:
    text = " ".join(kube.kubectl("explain", "enginepool.spec.scaling").split())
    assert "The largest of three needs counts" in text
    assert "kvUtilization <Object> How full the KV caches of the pods should be." in text
    assert "<float64>" not in text


def test_the_short_name_is_nobody_elses(kube: ControlPlane) -> None:
    assert "Warning" not in kube.kubectl("get", "epool", "--all-namespaces")
