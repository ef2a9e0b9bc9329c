"""Releases that share a Redis of the user's own have different keys, and an upgrade finds those that it had."""

import pytest
from support.kubernetes.api import Administrator
from support.kubernetes.chart import CHART, one, render

pytestmark = pytest.mark.kube

OWN_REDIS = ("--set", "redis.bundled.enabled=false,redis.external.existingSecret=redis,networkPolicy.enabled=false")
VARIABLE = "PAGESTREAM_BROKER__KEY_PREFIX"


def prefix_of(*options: str, release: str = "a", namespace: str = "n") -> str | None:
    manifests = render(*options, "--set", "fullnameOverride=x", release=release, namespace=namespace)
    prefix: str | None = one(manifests, "ConfigMap", "x-settings")["data"].get(VARIABLE)
    return prefix


def test_releases_have_keys_of_their_own_where_redis_is_not() -> None:
    assert prefix_of() is None
    assert prefix_of(*OWN_REDIS) == "n.a"
    assert prefix_of(*OWN_REDIS, release="b") == "n.b"
    assert prefix_of(*OWN_REDIS, "--set", "broker.keyPrefix=shared") == "shared"


@pytest.mark.parametrize("stored", [None, "earlier"])
def test_an_upgrade_keeps_what_begins_the_keys(admin: Administrator, stored: str | None) -> None:
    """A release from before the setting has none stored, and its requests are under the default."""
    namespace = f"key-prefix-{stored or 'none'}"
    admin.run("kubectl", "create", "namespace", namespace)
    where = ("llm", str(CHART), "--namespace", namespace, "--no-hooks", "--skip-crds", *OWN_REDIS)
    admin.run("helm", "install", *where, "--set", f"broker.keyPrefix={stored or 'passing'}")
    if stored is None:
        patch = f'[{{"op": "remove", "path": "/data/{VARIABLE}"}}]'
        admin.run("kubectl", "patch", "configmap", "llm-settings", "-n", namespace, "--type", "json", "-p", patch)
    admin.run("helm", "upgrade", *where, "--reset-values")
    assert admin.get("--namespace", namespace, "configmap", "llm-settings")["data"].get(VARIABLE) == stored
