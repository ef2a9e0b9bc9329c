"""One API server for all tests of the chart, with the definition of EnginePool."""

from collections.abc import Iterator

import pytest
from chart import CHART
from kube_api import KubeApi, running_kube_api


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    with running_kube_api(tmp_path_factory.mktemp("kube-api")) as api:
        for definition in sorted((CHART / "crds").glob("*.yaml")):
            api.apply(definition.read_text())
        api.run("kubectl", "wait", "--for=condition=Established", "crd/enginepools.pagestream.dev", "--timeout=30s")
        yield api


@pytest.fixture
def namespace(api: KubeApi, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own, in which pods must be restricted."""
    name = request.node.name.lower().translate(str.maketrans("_[]", "---")).strip("-")[:60].strip("-")
    api.run("kubectl", "create", "namespace", name)
    api.run("kubectl", "label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    return name
