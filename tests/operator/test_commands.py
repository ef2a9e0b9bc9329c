"""Settings, and the commands that run once."""

from pathlib import Path

import pytest
from pagestream_operator import ApiUnavailable, Rejected, SettingsError, load_settings
from pagestream_operator.commands import delete_pools, run_once, wait_until
from pagestream_operator.kube import KubeClient
from support.kubernetes.api import write_kubeconfig


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
    assert load_settings(variables(engine_image_pull_secrets="a,b")).engine.image_pull_secrets == ("a", "b")


def test_the_resources_of_jobs_are_json() -> None:
    assert load_settings({}).engine.job_resources["limits"]["cpu"] == "1"
    given = '{"requests": {"cpu": 0.5}, "limits": null}'
    assert load_settings(variables(job_resources=given)).engine.job_resources == {"requests": {"cpu": "0.5"}}
    assert load_settings(variables(job_resources="{}")).engine.job_resources == {}
    for wrong in ("1", "[]", "cpu", '{"cpu": "1"}', '{"limits": {"cpu": []}}', '{"limit": {}}', '{"limits": 1}'):
        with pytest.raises(SettingsError, match=r"JOB_RESOURCES: .* a JSON object such as"):
            load_settings(variables(job_resources=wrong))


async def test_a_condition_is_asked_until_it_holds() -> None:
    answers = iter([False, ApiUnavailable("busy"), True])

    async def ask() -> bool:
        answer = next(answers)
        if isinstance(answer, ApiUnavailable):
            raise answer
        return answer

    assert await wait_until(ask, limit_s=10)


async def test_after_the_limit_it_did_not_hold() -> None:
    async def ask() -> bool:
        return False

    assert not await wait_until(ask, limit_s=0)


async def test_a_server_that_is_silent_to_the_end_is_an_error() -> None:
    async def ask() -> bool:
        raise ApiUnavailable("busy")

    with pytest.raises(ApiUnavailable, match="busy"):
        await wait_until(ask, limit_s=0)


def test_errors_end_the_process_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_kubeconfig(tmp_path / "kubeconfig", "https://127.0.0.1:1", token="none")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))

    async def act(_: KubeClient) -> None:
        raise Rejected("not allowed", 403)

    with pytest.raises(SystemExit, match="pagestream-operator: not allowed"):
        run_once(act)


def test_without_access_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(_: KubeClient) -> None:
        raise AssertionError

    monkeypatch.setenv("KUBECONFIG", "/nothing/here")
    with pytest.raises(SystemExit, match="set KUBECONFIG, or run in a pod"):
        run_once(act)


@pytest.mark.parametrize("namespaces", ["", ","])
def test_pools_are_deleted_in_named_namespaces_alone(namespaces: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        delete_pools(["--namespaces", namespaces])
    assert "names no namespace" in capsys.readouterr().err
