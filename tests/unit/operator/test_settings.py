import pytest
from pagestream_operator.errors import SettingsError
from pagestream_operator.settings import load_settings


def variables(**fields: str) -> dict[str, str]:
    return {f"PAGESTREAM_OPERATOR__{name.upper()}": value for name, value in fields.items()}


def test_defaults_are_enough() -> None:
    settings = load_settings({})
    assert settings.namespaces == ("default",)
    assert settings.engine.redis_secret == "pagestream-redis"
    assert settings.identity


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", ("home",)), ("a", ("a",)), ("a, b,", ("a", "b")), ("*", None), ("a,*", None)],
)
def test_namespaces(given: str, expected: tuple[str, ...] | None) -> None:
    assert load_settings(variables(namespaces=given, pod_namespace="home")).namespaces == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nmespaces": "a"}, "did you mean PAGESTREAM_OPERATOR__NAMESPACES"),
        ({"metrics_port": "x"}, "PAGESTREAM_OPERATOR__METRICS_PORT"),
        ({"otlp_port": "70000"}, "a TCP port is expected"),
        ({"decide_s": "0"}, "PAGESTREAM_OPERATOR__DECIDE_S"),
        ({"lease_duration_s": "5"}, r"more than lease_renew_s \+ lease_margin_s"),
        ({"engine_image_pull_policy": "Sometimes"}, "Always or IfNotPresent or Never"),
        ({"prometheus_url": "prometheus:9090"}, "a URL with http:// or https:// is expected"),
        ({"lease_name": ""}, "PAGESTREAM_OPERATOR__LEASE_NAME"),
    ],
)
def test_a_wrong_setting_is_named(fields: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(variables(**fields))


def test_shared_settings_count_where_engines_take_them_from_a_config_map() -> None:
    shared = {"PAGESTREAM_BROKER__RETENTION_S": "60", "PAGESTREAM_TELEMETRY__TRACES": "false"}
    assert load_settings(shared).engine.shared == {}
    assert load_settings(shared | variables(engine_config_map="c")).engine.shared == shared


def test_a_listed_secret_is_split() -> None:
    assert load_settings(variables(engine_image_pull_secrets="a,b")).engine.pull_secrets == ("a", "b")
