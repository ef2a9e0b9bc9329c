"""The commands that the chart's hooks run, against a real API server."""

import copy
import json
from collections.abc import AsyncIterator

import pytest
from pagestream_operator import Rejected
from pagestream_operator.commands import apply_crd, apply_definition, delete_pools, release_pools, remove_pools
from pagestream_operator.crd import definition
from pagestream_operator.kube import KubeClient
from support.kubernetes.api import Administrator

pytestmark = pytest.mark.kube

FINALIZER = "tests.pagestream.dev/nobody-takes-it-away"
NAME = "enginepools.pagestream.dev"


@pytest.fixture
def kubeconfig(admin: Administrator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(admin.kubeconfig))


@pytest.fixture
async def client(kubeconfig: None) -> AsyncIterator[KubeClient]:
    async with KubeClient(10.0) as client:
        yield client


def pool(name: str, *, finalizer: str = "", label: str = "mine") -> str:
    finalizers = f"finalizers: [{finalizer}]" if finalizer else ""
    return f"""
apiVersion: pagestream.dev/v1alpha1
kind: EnginePool
metadata:
  name: {name}
  labels: {{app.kubernetes.io/instance: {label}}}
  {finalizers}
spec:
  model: {{servedName: {name}, source: {{path: /models/{name}}}}}
"""


def columns(admin: Administrator) -> list[str]:
    return [column["name"] for column in admin.get("crd", NAME)["spec"]["versions"][0]["additionalPrinterColumns"]]


def test_what_helm_installed_once_is_brought_up_to_date_and_what_is_no_longer_in_it_goes(
    admin: Administrator, kubeconfig: None, capsys: pytest.CaptureFixture[str]
) -> None:
    older = copy.deepcopy(definition())
    older["spec"]["versions"][0]["additionalPrinterColumns"] = [{"name": "Old", "type": "string", "jsonPath": ".kind"}]
    admin.run("kubectl", "replace", "--filename", "-", text=json.dumps(older))
    assert columns(admin) == ["Old"]
    apply_crd([])
    assert "Old" not in columns(admin)
    assert "Desired" in columns(admin)
    assert "is up to date" in capsys.readouterr().err


async def test_a_definition_that_the_server_refuses_is_reported_with_what_to_do(client: KubeClient) -> None:
    wrong = copy.deepcopy(definition())
    wrong["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["type"] = "array"
    with pytest.raises(Rejected, match="kubectl apply --server-side"):
        await apply_definition(client, wrong, limit_s=5)


def test_pools_of_the_selector_go_and_others_stay(admin: Administrator, kubeconfig: None, namespace: str) -> None:
    for text in (pool("first"), pool("second"), pool("theirs", label="other")):
        admin.run("kubectl", "--namespace", namespace, "apply", "--filename", "-", text=text)
    delete_pools(["--namespaces", namespace, "--selector", "app.kubernetes.io/instance=mine"])
    left = admin.get("--namespace", namespace, "enginepools")["items"]
    assert [item["metadata"]["name"] for item in left] == ["theirs"]


async def test_a_pool_that_no_operator_drains_goes_after_the_limit(
    admin: Administrator, client: KubeClient, namespace: str
) -> None:
    admin.run("kubectl", "--namespace", namespace, "apply", "--filename", "-", text=pool("stuck", finalizer=FINALIZER))
    assert await remove_pools(client, [namespace], "", limit_s=1) == [f"{namespace}/stuck"]
    assert admin.get("--namespace", namespace, "enginepools")["items"] == []


async def test_where_there_are_no_pools_there_is_nothing_to_do(client: KubeClient, namespace: str) -> None:
    assert await remove_pools(client, [namespace], "", limit_s=1) == []


def finalizers(admin: Administrator, namespace: str, name: str) -> list[str]:
    found: list[str] = admin.get("--namespace", namespace, "enginepool", name)["metadata"].get("finalizers", [])
    return found


def test_pools_that_outlive_their_release_lose_its_finalizer(
    admin: Administrator, kubeconfig: None, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    drain = "pagestream.dev/drain"
    for name, holder in (("ours", "llm.gone"), ("theirs", "llm.other")):
        text = pool(name, finalizer=f"{drain}, {FINALIZER}")
        admin.run("kubectl", "--namespace", namespace, "apply", "--filename", "-", text=text)
        status = json.dumps({"status": {"controllerClass": holder, "conditions": []}})
        patch = ("patch", "enginepool", name, "--subresource=status", "--type=merge", "--patch", status)
        admin.run("kubectl", "--namespace", namespace, *patch)
    release_pools(["--release", "llm.gone"])
    assert f"{namespace}/ours stays" in capsys.readouterr().err
    assert finalizers(admin, namespace, "ours") == [FINALIZER]
    assert finalizers(admin, namespace, "theirs") == [drain, FINALIZER]
    everything = (
        "patch",
        "enginepool",
        "ours",
        "theirs",
        "--type=merge",
        "--patch",
        '{"metadata":{"finalizers":null}}',
    )
    admin.run("kubectl", "--namespace", namespace, *everything)
