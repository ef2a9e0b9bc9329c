"""A pool as the operator reads it, and the objects that it makes of it: pure functions of the pool and the settings."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pagestream_engine import EngineConfig
from pagestream_operator import EngineDefaults, PoolInvalid, api
from pagestream_operator.children import HASH_ANNOTATION, Manifest, children, followers, node_secret, unpublish_job
from pagestream_scaling import PolicyInvalid, ScalingPolicy
from support.kubernetes.pool_objects import DEFAULTS, pool


def body(**spec: Any) -> dict[str, Any]:
    model = {"source": {"path": "/models/demo"}, "servedName": "demo"}
    return {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "metadata": {"name": "demo", "namespace": "default", "uid": "u", "generation": 3, "resourceVersion": "7"},
        "spec": {"model": model, **spec},
    }


def test_an_object_is_read_with_its_defaults() -> None:
    pool = api.EnginePool.from_object(body())
    assert (pool.namespace, pool.name, pool.generation, pool.resource_version) == ("default", "demo", 3, "7")
    assert pool.spec.replicas is None
    assert (pool.spec.min_replicas, pool.spec.max_replicas) == (1, 10)
    assert not pool.is_deleted


def test_unknown_fields_of_a_newer_definition_are_ignored() -> None:
    assert api.EnginePool.from_object(body(color="blue")).spec.min_replicas == 1


def test_a_spec_that_this_operator_does_not_understand_names_its_fields() -> None:
    with pytest.raises(PoolInvalid, match=r"spec\.engine\.dtype: .*; spec\.minReplicas: "):
        api.EnginePool.from_object(body(minReplicas=-1, engine={"dtype": "int4"}))


def test_a_malformed_status_counts_as_none() -> None:
    assert api.EnginePool.from_object(body() | {"status": {"conditions": 3}}).status == api.EnginePoolStatus()


def spec_of(**spec: Any) -> api.EnginePoolSpec:
    return api.EnginePool.from_object(body(**spec)).spec


def test_engine_options_are_those_of_the_engine() -> None:
    groups = ("model", "cache", "scheduler", "speculation", "executor", "extensions", "adapters")
    known = {field.name for group in groups for field in dataclasses.fields(getattr(EngineConfig(), group))}
    assert set(type(spec_of().engine).model_fields) == known


def test_engine_options_become_variables_and_unset_ones_do_not() -> None:
    plugins = ["mine.policies", "mine.families"]
    options = {"maxNumSeqs": 64, "enablePrefixCaching": False, "dtype": "bfloat16", "plugins": plugins}
    assert dict(spec_of(engine=options).engine.to_environment()) == {
        "PAGESTREAM_ENGINE__DTYPE": "bfloat16",
        "PAGESTREAM_ENGINE__ENABLE_PREFIX_CACHING": "false",
        "PAGESTREAM_ENGINE__MAX_NUM_SEQS": "64",
        "PAGESTREAM_ENGINE__PLUGINS": "mine.policies,mine.families",
    }


def test_a_policy_that_says_nothing_and_one_that_says_every_default_are_the_laws_own() -> None:
    nothing = spec_of().scaling
    everything = spec_of(scaling=nothing.model_dump(by_alias=True)).scaling
    assert everything.model_fields_set == set(type(everything).model_fields)
    for scaling in (nothing, everything):
        assert scaling.to_policy(1, 10) == ScalingPolicy(min_replicas=1, max_replicas=10)


def test_what_a_policy_says_reaches_the_law() -> None:
    scaling = {"kvUtilization": {"target": 0.5, "low": 0.3}, "idle": {"afterSeconds": 7}}
    policy = spec_of(scaling=scaling).scaling.to_policy(0, 4)
    assert (policy.kv_utilization.target, policy.idle.after_s, policy.min_replicas, policy.max_replicas) == (
        0.5,
        7,
        0,
        4,
    )


def test_contradictions_are_the_laws_errors() -> None:
    with pytest.raises(PolicyInvalid, match=r"kv_utilization\.low"):
        spec_of(scaling={"kvUtilization": {"target": 0.5}}).scaling.to_policy(1, 10)


GOLDEN = Path(__file__).parent / "golden"
GPU: dict[str, Any] = {
    "model": {
        "source": {"volume": {"claim": "models", "path": "llama"}},
        "servedName": "llama",
        "revision": "r2",
    },
    "engine": {"maxNumSeqs": 64, "deterministic": True},
    "template": {
        "image": "registry.example/pagestream-engine-cuda:1",
        "gpu": {"count": 1, "type": "NVIDIA-H200"},
        "resources": {"requests": {"cpu": "4"}, "limits": {"memory": "64Gi"}},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "env": [{"name": "PAGESTREAM_BROKER__RETENTION_S", "value": "600"}, {"name": "HOME", "value": "/cache"}],
        "volumes": [{"name": "cache", "emptyDir": {"sizeLimit": "1Gi"}}],
        "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
        "labels": {"team": "search"},
    },
    "drain": {"graceSeconds": 60},
    "rollout": {"maxSurge": 0, "maxUnavailable": 1},
}
ONE_GPU: dict[str, Any] = {"template": {"gpu": {"count": 1}}}
SHARED = EngineDefaults(
    release="pagestream.pagestream",
    image="registry.example/pagestream-engine:1",
    image_pull_policy="Always",
    image_pull_secrets=("registry",),
    config_map="pagestream-settings",
    redis_secret="pagestream-redis",
    otlp_endpoint="http://collector:4317",
    shared={"PAGESTREAM_BROKER__RETENTION_S": "600"},
)


def by_kind(manifests: tuple[Manifest, ...]) -> dict[str, Manifest]:
    return {manifest["kind"]: manifest for manifest in manifests}


def template(manifests: tuple[Manifest, ...]) -> dict[str, Any]:
    found: dict[str, Any] = by_kind(manifests)["Deployment"]["spec"]["template"]
    return found


@pytest.mark.parametrize(
    ("name", "manifests"),
    [("demo", children(pool(), DEFAULTS)), ("gpu", children(pool("llama", **GPU), SHARED))],
)
def test_the_template_of_a_pod_is_what_it_was(name: str, manifests: tuple[Manifest, ...]) -> None:
    """A release that changes this file replaces every engine that is running: that is what it is here for."""
    text = (GOLDEN / f"pod_template_{name}.yaml").read_text()
    assert template(manifests) == yaml.safe_load(text)


def test_objects_have_names_labels_and_an_owner() -> None:
    manifests = children(pool(), DEFAULTS)
    assert [(each["kind"], each["metadata"]["name"]) for each in manifests] == [
        ("ServiceAccount", "demo-engine"),
        ("ConfigMap", "demo-engine-44136fa355b3678a"),
        ("Service", "demo-engines"),
        ("PodDisruptionBudget", "demo-engine"),
        ("Deployment", "demo-engine"),
    ]
    for each in manifests:
        owner = each["metadata"]["ownerReferences"][0]
        assert (owner["kind"], owner["name"], owner["uid"], owner["controller"]) == (
            "EnginePool",
            "demo",
            "pool-uid",
            True,
        )
        assert each["metadata"]["labels"]["pagestream.dev/pool"] == "demo"
        assert each["metadata"]["annotations"][HASH_ANNOTATION]


def test_the_same_pool_gives_the_same_objects() -> None:
    assert children(pool(**GPU), SHARED) == children(pool(**GPU), SHARED)


def test_the_deployment_says_nothing_of_replicas() -> None:
    assert "replicas" not in by_kind(children(pool(replicas=3), DEFAULTS))["Deployment"]["spec"]


def test_a_parallel_engine_has_a_gpu_for_each_rank() -> None:
    made = by_kind(children(pool(parallel={"tensor": 2, "pipeline": 3}, template={"gpu": {"count": 6}}), DEFAULTS))
    data = made["ConfigMap"]["data"]
    sizes = [data[f"PAGESTREAM_ENGINE__{name}_PARALLEL_SIZE"] for name in ("TENSOR", "PIPELINE")]
    assert sizes == ["2", "3"]
    [engine] = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == "6"


def test_the_other_pods_of_a_group_are_as_their_leader() -> None:
    no_proxy = {"labels": {"sidecar.istio.io/inject": "false"}, "annotations": {"linkerd.io/inject": "disabled"}}
    spec = {"nodes": 2, "parallel": {"tensor": 4}, "template": {"gpu": {"count": 2}, **no_proxy}}
    made = by_kind(children(pool(**spec), DEFAULTS))
    assert made["ConfigMap"]["data"]["PAGESTREAM_ENGINE__NNODES"] == "2"
    leader = made["Deployment"]["spec"]["template"]
    metadata = {**leader["metadata"], "name": "demo-engine-1-a", "uid": "leader-uid", "namespace": "default"}
    metadata["annotations"] = {**metadata["annotations"], "added-by": "admission"}
    body = {**leader, "metadata": metadata, "status": {"podIP": "10.0.0.7"}}
    group = followers(pool(**spec), body, DEFAULTS.release)
    assert group["spec"]["replicas"] == 1
    [own], [other] = leader["spec"]["containers"], group["spec"]["template"]["spec"]["containers"]
    for name in ("image", "args", "envFrom", "resources", "volumeMounts"):
        assert other[name] == own[name]
    assert other["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "readinessProbe" not in other
    variables = {each["name"]: each for each in other["env"]}
    assert variables["PAGESTREAM_ENGINE__MASTER_ADDR"]["value"] == "10.0.0.7"
    assert "PAGESTREAM_WORKER__REDIS" not in variables
    other_metadata = group["spec"]["template"]["metadata"]
    assert "pagestream.dev/pool" not in other_metadata["labels"], "it is no engine of the pool"
    assert other_metadata["labels"]["sidecar.istio.io/inject"] == "false"
    assert other_metadata["annotations"] == {"linkerd.io/inject": "disabled"}, "what the pool's template has alone"


def test_a_pool_made_anew_has_a_secret_of_its_own() -> None:
    """That of the former pool of its name may still be there, until garbage collection takes it."""
    former = pool(nodes=2, parallel={"tensor": 2}, template={"gpu": {"count": 1}})
    made = [node_secret(each, DEFAULTS.release) for each in (former, replace(former, uid="another"))]
    names = [each["metadata"]["name"] for each in made]
    assert names[0] != names[1]
    [volume] = [each for each in template(children(former, DEFAULTS))["spec"]["volumes"] if "secret" in each]
    assert volume["secret"]["secretName"] == names[0]


@pytest.mark.parametrize(
    "spec",
    [
        {"minReplicas": 2},
        {"maxReplicas": 20},
        {"replicas": 4},
        {"scaling": {"kvUtilization": {"target": 0.7}}},
        {"drain": {"deletionTimeoutSeconds": 5, "maxUnavailable": 2}},
        {"rollout": {"maxSurge": 2}},
        {"paused": True},
    ],
    ids=str,
)
def test_no_pod_is_replaced_for_what_does_not_concern_pods(spec: dict[str, Any]) -> None:
    assert template(children(pool(**spec), DEFAULTS)) == template(children(pool(), DEFAULTS))


def test_changed_options_replace_the_pods() -> None:
    before, after = (children(pool(engine=options), DEFAULTS) for options in ({}, {"maxNumSeqs": 8}))
    names = [by_kind(made)["ConfigMap"]["metadata"]["name"] for made in (before, after)]
    assert names[0] != names[1]
    for made, name in zip((before, after), names, strict=True):
        assert sources(made) == [name]
        assert by_kind(made)["ConfigMap"]["immutable"] is True


def sources(manifests: tuple[Manifest, ...]) -> list[str]:
    """The ConfigMaps that the engine takes variables from; the later ones prevail."""
    return [each["configMapRef"]["name"] for each in template(manifests)["spec"]["containers"][0]["envFrom"]]


def test_changed_shared_settings_replace_the_pods() -> None:
    other = EngineDefaults(**{**vars(SHARED), "shared": {"PAGESTREAM_BROKER__RETENTION_S": "60"}})
    assert template(children(pool(), other)) != template(children(pool(), SHARED))


def test_shared_settings_reach_pods_without_the_shared_config_map() -> None:
    """It may be missing in the pool's namespace; without the key prefix the pod would serve another queue."""
    shared = {"PAGESTREAM_BROKER__KEY_PREFIX": "llm.a"}
    made = children(pool(engine={"seed": 1}), EngineDefaults(**{**vars(SHARED), "shared": shared}))
    own = by_kind(made)["ConfigMap"]
    assert own["data"] == {**shared, "PAGESTREAM_ENGINE__SEED": "1"}
    assert sources(made) == ["pagestream-settings", own["metadata"]["name"]]


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ({}, (1, 0)),
        (ONE_GPU, (0, 1)),
        ({"template": {"resources": {"limits": {"amd.com/gpu": 1}}}}, (0, 1)),
        ({"template": {"gpu": {"count": 0}}}, (1, 0)),
        ({**ONE_GPU, "rollout": {"maxSurge": "25%"}}, ("25%", 0)),
        ({**ONE_GPU, "rollout": {"maxUnavailable": 0}}, (1, 0)),
        ({**ONE_GPU, "rollout": {"maxUnavailable": 2}}, (0, 2)),
        ({"rollout": {"maxSurge": "0%"}}, ("0%", 1)),
        ({"rollout": {"maxUnavailable": 2}}, (1, 2)),
    ],
    ids=str,
)
def test_a_rollout_needs_no_further_gpu(spec: dict[str, Any], steps: tuple[int | str, int | str]) -> None:
    strategy = by_kind(children(pool(**spec), DEFAULTS))["Deployment"]["spec"]["strategy"]["rollingUpdate"]
    assert (strategy["maxSurge"], strategy["maxUnavailable"]) == steps


def test_a_new_password_of_redis_replaces_the_pods() -> None:
    rotated = EngineDefaults(**{**vars(DEFAULTS), "redis_login": "2"})
    assert template(children(pool(), rotated)) != template(children(pool(), DEFAULTS))


def test_options_are_the_config_map() -> None:
    data = by_kind(children(pool(engine={"maxNumSeqs": 8, "dtype": "float32"}), DEFAULTS))["ConfigMap"]["data"]
    assert data == {"PAGESTREAM_ENGINE__DTYPE": "float32", "PAGESTREAM_ENGINE__MAX_NUM_SEQS": "8"}


@pytest.mark.parametrize("manifests", [children(pool(), DEFAULTS), children(pool(**GPU), SHARED)], ids=["demo", "gpu"])
def test_pods_meet_the_restricted_standard(manifests: tuple[Manifest, ...]) -> None:
    spec = template(manifests)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_a_platform_may_choose_the_users_of_pods() -> None:
    left = EngineDefaults(**{**vars(DEFAULTS), "arbitrary_user": True})
    context = template(children(pool(), left))["spec"]["securityContext"]
    assert context == {
        "runAsNonRoot": True,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_a_pools_security_contexts_and_annotations_go_over_the_operators_own() -> None:
    given = pool(
        template={
            "podSecurityContext": {"runAsUser": 1000, "fsGroup": None},
            "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            "serviceAccountAnnotations": {"example.com/role": "reader"},
        }
    )
    manifests = children(given, DEFAULTS)
    spec = template(manifests)["spec"]
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["runAsGroup"] == 65532
    assert "fsGroup" not in spec["securityContext"]
    (container,) = spec["containers"]
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    account = by_kind(manifests)["ServiceAccount"]
    assert account["metadata"]["annotations"]["example.com/role"] == "reader"


@pytest.mark.parametrize(
    ("model", "argument"),
    [
        ({"source": {"path": "/models/demo"}, "servedName": "m"}, "/models/demo"),
        ({"source": {"volume": {"claim": "c"}}, "servedName": "m"}, "/models/volume"),
        ({"source": {"volume": {"claim": "c", "path": "a/b"}}, "servedName": "m"}, "/models/volume/a/b"),
        ({"source": {"hub": {"name": "org/name"}}, "servedName": "m"}, "org/name"),
        ({"source": {"hub": {"name": "org/name"}}, "servedName": "m", "revision": "v2"}, "org/name@v2"),
    ],
    ids=str,
)
def test_the_engine_is_told_where_its_model_is(model: dict[str, Any], argument: str) -> None:
    container = template(children(pool(model=model), DEFAULTS))["spec"]["containers"][0]
    assert (container["command"], container["args"]) == (["pagestream-engine"], [argument])


def test_an_engine_of_several_models_has_their_list_and_each_claim_once() -> None:
    models = [
        {"source": {"volume": {"claim": "m", "path": "b"}}, "servedName": "b", "revision": "r1"},
        {"source": {"volume": {"claim": "n"}}, "servedName": "c"},
        {"source": {"hub": {"name": "org/d", "tokenSecret": "hub"}}, "servedName": "d", "revision": "main"},
        {"source": {"path": "/models/e"}, "servedName": "e"},
    ]
    first = {"source": {"volume": {"claim": "m", "path": "a"}}, "servedName": "a"}
    made = template(children(pool(model=first, models=models), DEFAULTS))
    [engine] = made["spec"]["containers"]
    assert engine["args"] == ["/models/volume/a"]
    env = {each["name"]: each.get("value") for each in engine["env"]}
    assert env["PAGESTREAM_WORKER__MODELS"] == "b=/models/volume/b,c=/models/volume-2,d=org/d@main,e=/models/e"
    assert "HF_TOKEN" in env
    mounts = {each["name"]: each["mountPath"] for each in engine["volumeMounts"]}
    assert mounts == {"tmp": "/tmp", "model": "/models/volume", "model-2": "/models/volume-2"}  # noqa: S108
    claims = [each["persistentVolumeClaim"]["claimName"] for each in made["spec"]["volumes"][1:]]
    assert claims == ["m", "n"]
    assert made["metadata"]["annotations"] == {"pagestream.dev/model-revision": ",r1,,main,"}


def test_a_chat_templates_text_is_an_option() -> None:
    manifests = children(pool(chatTemplate={"text": "{{ messages }}\n"}), DEFAULTS)
    options = by_kind(manifests)["ConfigMap"]
    assert options["data"]["PAGESTREAM_WORKER__CHAT_TEMPLATE"] == "{{ messages }}\n"
    other = by_kind(children(pool(chatTemplate={"text": "{{ tools }}"}), DEFAULTS))["ConfigMap"]
    assert options["metadata"]["name"] != other["metadata"]["name"]  # so that pods are replaced


def test_a_chat_template_of_a_config_map_is_mounted() -> None:
    given = {"configMapKeyRef": {"name": "templates", "key": "own.jinja"}}
    manifests = children(pool(chatTemplate=given), DEFAULTS)
    spec = template(manifests)["spec"]
    [volume] = [each for each in spec["volumes"] if "configMap" in each]
    assert volume["configMap"] == {
        "name": "templates",
        "items": [{"key": "own.jinja", "path": "chat_template.jinja"}],
    }
    [mount] = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == volume["name"]]
    assert mount["readOnly"] is True
    path = by_kind(manifests)["ConfigMap"]["data"]["PAGESTREAM_WORKER__CHAT_TEMPLATE"]
    assert path == f"{mount['mountPath']}/chat_template.jinja"


def test_every_variable_is_set_once() -> None:
    env = template(children(pool(**GPU), SHARED))["spec"]["containers"][0]["env"]
    names = [variable["name"] for variable in env]
    assert len(names) == len(set(names))
    assert {"name": "HOME", "value": "/cache"} in env


def test_the_job_that_unpublishes_is_no_engine_and_reaches_redis_as_one() -> None:
    served = {"source": {"path": "/m"}, "servedName": "org/llama"}
    variable = {"name": "PAGESTREAM_BROKER__RETENTION_S", "value": "5"}
    extra = {"labels": {"team": "search"}, "annotations": {"owner": "x"}}
    given = {"template": {**GPU["template"], **extra, "env": [variable]}}
    job = unpublish_job(pool("llama", **{**GPU, **given, "model": served}), SHARED, ["org/llama", "other"])
    template_of_job = job["spec"]["template"]
    assert template_of_job["metadata"]["labels"]["app.kubernetes.io/name"] == "pagestream-engine"
    assert not template_of_job["metadata"]["labels"].keys() & {"pagestream.dev/pool", "app.kubernetes.io/managed-by"}
    assert template_of_job["metadata"]["labels"]["team"] == "search", "as a policy asks of all pods"
    assert template_of_job["metadata"]["annotations"] == {"owner": "x"}
    (container,) = template_of_job["spec"]["containers"]
    assert container["command"] == ["pagestream-unpublish"]
    assert container["args"][:3] == ["org/llama", "other", "--wait"]
    variables = {each["name"]: each for each in container["env"]}
    redis = {"secretKeyRef": {"name": SHARED.redis_secret, "key": "url"}}
    assert variables["PAGESTREAM_WORKER__REDIS"]["valueFrom"] == redis
    assert variables["PAGESTREAM_BROKER__RETENTION_S"]["value"] == "5"
    assert "nvidia.com/gpu" not in str(container["resources"])
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert template_of_job["spec"]["securityContext"]["runAsNonRoot"] is True
    assert job["spec"]["activeDeadlineSeconds"] == 60


def test_the_job_that_unpublishes_needs_no_object_that_goes_with_the_pool() -> None:
    """A deletion in the foreground takes the pool's ConfigMap before the Job is made, and would take the Job."""
    defaults = dataclasses.replace(
        DEFAULTS, config_map="settings", shared={"PAGESTREAM_BROKER__KEY_PREFIX": "a$(HOME)"}
    )
    job = unpublish_job(pool("llama"), defaults, ["demo"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"configMapRef": {"name": "settings", "optional": True}}]
    assert {"name": "PAGESTREAM_BROKER__KEY_PREFIX", "value": "a$$(HOME)"} in container["env"], "nothing is expanded"
    assert [owner["blockOwnerDeletion"] for owner in job["metadata"]["ownerReferences"]] == [False]
    late = unpublish_job(pool("llama", drain={"graceSeconds": 600}), defaults, ["demo"], outlives_pool=True)
    assert "ownerReferences" not in late["metadata"]
    assert late["spec"]["activeDeadlineSeconds"] == 650


def test_accepted_requests_are_ended_only_where_the_pool_says_so() -> None:
    job = unpublish_job(pool("llama", drain={"whenDeleted": "EndRequests"}), DEFAULTS, ["demo"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][1] == "--end-requests"
