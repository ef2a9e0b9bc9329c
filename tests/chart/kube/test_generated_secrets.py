"""Generated secrets outlive upgrades: helm installs into a real API server, twice."""

import base64
import hashlib
import json
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from pagestream_gateway.auth.authenticator import KeyFile
from support.kubernetes.api import Administrator
from support.kubernetes.chart import CHART, one, render

pytestmark = pytest.mark.kube


def secret(admin: Administrator, namespace: str, name: str) -> dict[str, str]:
    data = admin.get("--namespace", namespace, "secret", name)["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


@pytest.fixture(scope="module")
def installed(admin: Administrator) -> str:
    """A release for all tests here. No nodes, so no hooks and nothing runs: what is stored is what counts."""
    admin.run("kubectl", "create", "namespace", "generated-secrets")
    helm(admin, "install", "generated-secrets")
    return "generated-secrets"


def helm(admin: Administrator, verb: str, namespace: str, *options: str) -> None:
    command = ("helm", verb, "llm", str(CHART), "--namespace", namespace, "--no-hooks", "--skip-crds")
    command += ("--disable-openapi-validation",)  # test_admission.py validates all objects
    if verb == "uninstall":
        command = ("helm", verb, "llm", "--namespace", namespace, "--no-hooks")
    admin.run(*command, *options)


def test_a_second_render_keeps_the_key_and_the_password(admin: Administrator, installed: str) -> None:
    before = {name: secret(admin, installed, name) for name in ("llm-api-key", "llm-api-key-hashes", "llm-redis")}
    helm(admin, "upgrade", installed, "--set", f"apiKeys.hashes.{'b' * 64}=team-b")
    after = {name: secret(admin, installed, name) for name in before}
    assert after["llm-api-key"] == before["llm-api-key"]
    assert after["llm-redis"] == before["llm-redis"]
    assert set(after["llm-api-key-hashes"]["keys"].splitlines()) - set(
        before["llm-api-key-hashes"]["keys"].splitlines()
    ) == {f"{'b' * 64} -> team-b"}


def test_the_gateway_knows_the_key_by_its_hash_alone(admin: Administrator, installed: str, tmp_path: Path) -> None:
    key = secret(admin, installed, "llm-api-key")
    hashes = secret(admin, installed, "llm-api-key-hashes")
    assert key["key"] not in hashes["keys"]
    assert hashlib.sha256(key["key"].encode()).hexdigest() in hashes["keys"]
    file = tmp_path / "keys"
    file.write_text(hashes["keys"])
    assert KeyFile(file).keys.identity(key["key"]).tenant == key["tenant"]


def test_the_password_opens_the_address(admin: Administrator, installed: str) -> None:
    redis = secret(admin, installed, "llm-redis")
    for user, key in (("engine", "url"), ("gateway", "gateway-url")):
        password = valid_passwords(redis)[user][0]
        assert redis[key] == f"redis://{user}:{password}@llm-redis.{installed}.svc:6379/0"
    assert valid_passwords(redis)["probe"] == [redis["probe-password"]]


def valid_passwords(redis: dict[str, str]) -> dict[str, list[str]]:
    """By user; the server's file of users must hold the hashes of the same."""
    found: dict[str, list[str]] = {}
    kept = json.loads(redis["passwords"])
    for line in redis["users.acl"].splitlines():
        name, hashes = line.split()[1], [word[1:] for word in line.split() if word.startswith("#")]
        if hashes:
            passwords = [kept["legacy"]] if name == "default" else kept[name]
            assert [hashlib.sha256(each.encode()).hexdigest() for each in passwords] == hashes
            found[name] = passwords
    return found


def test_a_new_generation_of_passwords_keeps_the_last_one_valid(admin: Administrator, installed: str) -> None:
    made = [valid_passwords(secret(admin, installed, "llm-redis"))]
    for generation in (2, 3, 1):
        helm(admin, "upgrade", installed, "--set", f"redis.bundled.passwordGeneration={generation}")
        made.append(valid_passwords(secret(admin, installed, "llm-redis")))
    first, second, third, lower = made
    for user in ("gateway", "engine", "probe", "metrics"):
        assert second[user][1:] == first[user]
        assert third[user][1:] == second[user][:1]
        assert lower[user] == third[user]


def test_the_password_of_a_release_without_users_is_valid_until_the_next(admin: Administrator, installed: str) -> None:
    admin.run("kubectl", "--namespace", installed, "delete", "secret", "llm-redis")
    admin.run(
        "kubectl", "--namespace", installed, "create", "secret", "generic", "llm-redis", "--from-literal=password=old"
    )
    labels = ("app.kubernetes.io/managed-by=Helm",)
    owner = ("meta.helm.sh/release-name=llm", f"meta.helm.sh/release-namespace={installed}")
    admin.run("kubectl", "--namespace", installed, "label", "secret", "llm-redis", *labels)
    admin.run("kubectl", "--namespace", installed, "annotate", "secret", "llm-redis", *owner)
    for generation, legacy in ((1, ["old"]), (1, ["old"]), (2, None)):
        helm(admin, "upgrade", installed, "--set", f"redis.bundled.passwordGeneration={generation}")
        assert valid_passwords(secret(admin, installed, "llm-redis")).get("default") == legacy


def test_the_certificate_of_redis_is_kept(admin: Administrator, installed: str) -> None:
    helm(admin, "upgrade", installed, "--set", "redis.bundled.tls.enabled=true")
    before = secret(admin, installed, "llm-redis")
    helm(admin, "upgrade", installed, "--set", "redis.bundled.tls.enabled=true")
    after = secret(admin, installed, "llm-redis")
    assert after == before
    assert after["url"].startswith("rediss://engine:")
    assert quote_plus(after["ca.crt"].strip()) in after["url"]


def test_the_sink_s_certificate_and_token_are_kept_until_their_secret_is_deleted(
    admin: Administrator, installed: str
) -> None:
    before = secret(admin, installed, "llm-operator-sink")
    assert set(before) == {"ca.crt", "tls.crt", "tls.key", "token"}
    helm(admin, "upgrade", installed, "--set", "operator.replicas=3")
    assert secret(admin, installed, "llm-operator-sink") == before
    admin.run("kubectl", "--namespace", installed, "delete", "secret", "llm-operator-sink")
    helm(admin, "upgrade", installed)
    after = secret(admin, installed, "llm-operator-sink")
    assert not set(before.values()) & set(after.values())


def test_a_new_installation_has_a_new_key(admin: Administrator, installed: str) -> None:
    before = secret(admin, installed, "llm-api-key")["key"]
    helm(admin, "uninstall", installed)
    helm(admin, "install", installed)
    assert secret(admin, installed, "llm-api-key")["key"] != before


def test_an_upgrade_that_changes_nothing_changes_no_pod(admin: Administrator, installed: str) -> None:
    before, passwords = templates(admin, installed), valid_passwords(secret(admin, installed, "llm-redis"))
    helm(admin, "upgrade", installed)
    assert templates(admin, installed) == before
    assert valid_passwords(secret(admin, installed, "llm-redis")) == passwords


def templates(admin: Administrator, namespace: str) -> list[object]:
    items = admin.get("--namespace", namespace, "deployments,statefulsets")["items"]
    return [(item["metadata"]["name"], item["metadata"]["generation"], item["spec"]["template"]) for item in items]


def test_where_secrets_are_named_nothing_is_generated() -> None:
    options = ("--values", str(CHART / "ci" / "gitops.yaml"))
    manifests = render(*options)
    assert not [manifest for manifest in manifests if manifest["kind"] == "Secret"]
    gateway = one(manifests, "Deployment", "pagestream-gateway")["spec"]["template"]["spec"]
    named = {volume["secret"]["secretName"] for volume in gateway["volumes"] if "secret" in volume}
    assert named == {"company-keys", "company-tls"}
