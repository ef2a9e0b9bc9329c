import dataclasses
from typing import Any

import pytest
from pagestream_engine.config import (
    AdapterConfig,
    CacheConfig,
    ExtensionConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from pagestream_operator import api
from pagestream_operator.api.engine import EngineOptions
from pagestream_operator.api.scaling import LAW, Scaling, law_name
from pagestream_operator.errors import PoolInvalid
from pagestream_scaling import PolicyInvalid, ScalingPolicy


def body(**spec: Any) -> dict[str, Any]:
    model = {"source": {"path": "/models/demo"}, "servedName": "demo"}
    return {
        "apiVersion": api.API_VERSION,
        "kind": api.KIND,
        "metadata": {"name": "demo", "namespace": "default", "uid": "u", "generation": 3, "resourceVersion": "7"},
        "spec": {"model": model, **spec},
    }


def test_exported_names() -> None:
    assert set(api.__all__) == {
        "API_VERSION",
        "GROUP",
        "KIND",
        "PLURAL",
        "VERSION",
        "AdapterStatus",
        "Condition",
        "ConditionType",
        "EnginePool",
        "EnginePoolSpec",
        "EnginePoolStatus",
        "PoolAdapter",
        "ScalingStatus",
    }
    assert all(hasattr(api, name) for name in api.__all__)


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


def test_engine_options_are_those_of_the_engine() -> None:
    groups = (ModelConfig, CacheConfig, SchedulerConfig, SpeculationConfig, ExtensionConfig, AdapterConfig)
    known = {field.name for group in groups for field in dataclasses.fields(group)}
    assert set(EngineOptions.model_fields) == known


def test_engine_options_become_variables_and_unset_ones_do_not() -> None:
    plugins = ["mine.policies", "mine.families"]
    options = EngineOptions(max_num_seqs=64, enable_prefix_caching=False, dtype="bfloat16", plugins=plugins)
    assert dict(options.to_environment()) == {
        "PAGESTREAM_ENGINE__DTYPE": "bfloat16",
        "PAGESTREAM_ENGINE__ENABLE_PREFIX_CACHING": "false",
        "PAGESTREAM_ENGINE__MAX_NUM_SEQS": "64",
        "PAGESTREAM_ENGINE__PLUGINS": "mine.policies,mine.families",
    }


def test_a_policy_that_says_nothing_is_the_laws_own() -> None:
    assert Scaling().to_policy(1, 10) == ScalingPolicy(min_replicas=1, max_replicas=10)


def test_every_field_of_the_policy_is_one_of_the_laws() -> None:
    for group, part in Scaling.model_fields.items():
        known = {field.name for field in dataclasses.fields(getattr(LAW, group))}
        assert part.default_factory is not None
        names = {law_name(name) for name in part.default_factory.model_fields}  # type: ignore[union-attr]
        assert names <= known, group


def test_what_a_policy_says_reaches_the_law() -> None:
    scaling = Scaling.model_validate({"kvUtilization": {"target": 0.5, "low": 0.3}, "idle": {"afterSeconds": 7}})
    policy = scaling.to_policy(0, 4)
    assert (policy.kv_utilization.target, policy.idle.after_s, policy.min_replicas, policy.max_replicas) == (
        0.5,
        7,
        0,
        4,
    )


def test_contradictions_are_the_laws_errors() -> None:
    with pytest.raises(PolicyInvalid, match=r"kv_utilization\.low"):
        Scaling.model_validate({"kvUtilization": {"target": 0.5}}).to_policy(1, 10)
