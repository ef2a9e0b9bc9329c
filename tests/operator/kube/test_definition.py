"""The definition of EnginePool on a real API server: what it accepts, what it refuses, and in which words."""

from typing import Any

import pytest
from pagestream_operator.api import EnginePool
from pagestream_operator.children import children
from support.kubernetes.control_plane import ControlPlane, Refused
from support.kubernetes.operator_process import PoolWorld
from support.kubernetes.pool_objects import DEFAULTS, pool_body

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
    *(
        ({"drain": {"maxUnavailable": given}}, "a share of at most 100%: write `1` or `25%`")
        for given in ("1", "150%", -1, "25", "", "-5%", 2**31)
    ),
    *(({"rollout": {"maxSurge": given}}, "or a share: write `1` or `25%`") for given in ("2", -1, "%")),
    *(
        ({"rollout": {"maxUnavailable": given}}, "a share of at most 100%: write `1` or `25%`")
        for given in ("150%", "1", "101%")
    ),
    *(
        ({"template": {"resources": {part: {"cpu": given}}}}, f"spec.template.resources.{part}.cpu")
        for part in ("requests", "limits")
        for given in ("-1", -1, "4 cores", "1e1.5", "", "1KB", "0x1")
    ),
    ({"template": {"resources": {"requests": {"gpu": 1}}}}, "write `nvidia.com/gpu`"),
    ({"template": {"resources": {"requests": {"nvidia.com/gpu": 1}}}}, "write `limits: {nvidia.com/gpu: 1}`"),
    ({"template": {"resources": {"requests": {"hugepages-2Mi": "4Mi"}}}}, "as its limit does"),
    (
        {
            "template": {
                "resources": {"requests": {"nvidia.com/gpu": 2}, "limits": {"nvidia.com/gpu": 2}},
                "gpu": {"count": 1},
            }
        },
        "or as template.gpu.count",
    ),
    ({"template": {"resources": {"limits": {"nvidia.com/gpu": "500m"}}}}, "as a whole number"),
    ({"template": {"volumeMounts": [{"name": "v", "mountPath": "/tmp"}]}}, "neither /tmp nor"),  # noqa: S108
    (
        {"template": {"volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "w", "mountPath": "/a"}]}},
        "has each mountPath once",
    ),
    (
        {"template": {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}}}},
        "raise the limit, or lower the request",
    ),
    ({"template": {"labels": {"team": "a team"}}}, "spec.template.labels.team"),
    ({"template": {"labels": {"team": "x" * 64}}}, "spec.template.labels.team"),
    ({"template": {"labels": {"a team": "x"}}}, "write `team` or `example.com/team`"),
    ({"template": {"annotations": {"a team": "x"}}}, "write `team` or `example.com/team`"),
    ({"template": {"nodeSelector": {"zone": "a/b"}}}, "spec.template.nodeSelector.zone"),
    ({"template": {"nodeSelector": {"/zone": "a"}}}, "write `team` or `example.com/team`"),
    ({"template": {"serviceAccountAnnotations": {"a role": "x"}}}, "write `team` or `example.com/team`"),
    ({"template": {"gpu": {"count": 0, "type": "NVIDIA H200"}}}, "spec.template.gpu.type"),
    ({"template": {"gpu": {"count": 0, "typeLabel": "a b"}}}, "spec.template.gpu.typeLabel"),
    ({"template": {"gpu": {"count": 0, "resourceName": "gpu"}}}, "spec.template.gpu.resourceName"),
    ({"template": {"priorityClassName": "High"}}, "spec.template.priorityClassName"),
    ({"template": {"runtimeClassName": "n_v"}}, "spec.template.runtimeClassName"),
    ({"template": {"imagePullSecrets": ["My_Secret"]}}, "spec.template.imagePullSecrets"),
    ({"template": {"image": "an image"}}, "spec.template.image"),
    ({"template": {"env": [{"name": "A=B", "value": "1"}]}}, "spec.template.env[0].name"),
    ({"template": {"volumeMounts": [{"name": "v", "mountPath": "/a:b"}]}}, "spec.template.volumeMounts[0].mountPath"),
    ({"template": {"volumeMounts": [{"name": "v", "mountPath": "/a", "subPath": "/b"}]}}, "write `llama`, not"),
    ({"template": {"volumeMounts": [{"name": "v", "mountPath": "/a", "subPath": "a/../b"}]}}, "write `llama`, not"),
    ({"template": {"tolerations": [{"value": "x"}]}}, "a toleration without a key"),
    ({"template": {"tolerations": [{"key": "a b"}]}}, "spec.template.tolerations[0].key"),
    ({"template": {"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]}}, "has no value"),
    ({"template": {"tolerations": [{"key": "a", "tolerationSeconds": 5}]}}, "needs `effect: NoExecute`"),
    ({"model": {"source": {"path": None, "volume": {"claim": "My_Claim"}}}}, "spec.model.source.volume.claim"),
]
ACCEPTED: list[dict[str, Any]] = (
    [
        {"drain": {"maxUnavailable": given}, "rollout": {"maxSurge": more, "maxUnavailable": given}}
        for given, more in ((1, "0%"), ("100%", "150%"), ("25%", 2), (2**31 - 1, 0))
    ]
    + [
        {"template": {"resources": {"requests": {"cpu": given}, "limits": {"cpu": 10**6}}}}
        for given in ("1500m", 2, "0.5", ".5", "1e3", "2E-1", "5Ki", "+1", "1.", "100u", 0)
    ]
    + [
        {"template": {"resources": {"limits": {"nvidia.com/gpu": "1", "hugepages-2Mi": "4Mi", "memory": "1Gi"}}}},
        {"template": {"resources": {"requests": {"a.b/c": 2}, "limits": {"a.b/c": 2}}}},
        {"template": {"resources": {"requests": {"nvidia.com/gpu": 1}}, "gpu": {"count": 1}}},
        {"template": {"labels": {"team": "", "example.com/team": "a_b.c-1"}, "nodeSelector": {"a": "x" * 63}}},
        {"template": {"annotations": {"example.com/A_b.c": "any text; of: any form"}}},
        {"template": {"tolerations": [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}]}},
        {
            "template": {
                "volumeMounts": [{"name": "v", "mountPath": "/a", "subPath": "a..b/c"}],
                "volumes": [{"name": "v", "emptyDir": {}}],
            }
        },
        {"template": {"env": [{"name": "a.b-C_1", "value": "1"}], "priorityClassName": "system-node-critical"}},
    ]
)
"""What the definition allows; a Deployment and a budget with it have to be possible, too."""


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=map(str, range(len(REFUSED))))
def test_a_wrong_spec_is_refused_with_what_to_write(pools: PoolWorld, change: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refusal:
        pools.change(change)
    assert refusal.value.status == 422
    assert message in refusal.value.message


@pytest.mark.parametrize("spec", ACCEPTED, ids=str)
def test_what_the_definition_allows_the_objects_of_a_pool_may_have(pools: PoolWorld, spec: dict[str, Any]) -> None:
    place = f"{pools.path('enginepools')}?dryRun=All"
    body = pool_body("allowed", **spec)
    created = pools.kube.post(place, {**body, "metadata": {"name": "allowed", "namespace": pools.namespace}})
    pool = EnginePool.from_object({**created, "metadata": {**created["metadata"], "resourceVersion": "1"}})
    for manifest in children(pool, DEFAULTS):
        if manifest["kind"] in ("Deployment", "PodDisruptionBudget"):
            plural = f"{manifest['kind'].lower()}s"
            pools.kube.request(
                "PATCH",
                f"{pools.path(plural, manifest['metadata']['name'])}?dryRun=All&fieldManager=test&force=true",
                manifest,
                kind="application/apply-patch+yaml",
            )


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
