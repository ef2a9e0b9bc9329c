"""One API server for all tests of the chart, with the definitions that its objects may need."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kubernetes.api import Administrator
from support.kubernetes.chart import CHART
from support.kubernetes.control_plane import ControlPlane

OTHERS = Path(__file__).with_name("definitions.yaml")  # of Gateway API, cert-manager, the Prometheus operator


@pytest.fixture(scope="session")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Administrator]:
    with ControlPlane(tmp_path_factory.mktemp("chart-api")) as plane:
        admin = Administrator(plane.kubeconfig)
        for definitions in (*sorted((CHART / "crds").glob("*.yaml")), OTHERS):
            admin.apply(definitions.read_text())
        admin.run("kubectl", "wait", "--for=condition=Established", "customresourcedefinitions", "--all")
        yield admin


@pytest.fixture
def namespace(admin: Administrator, request: pytest.FixtureRequest) -> str:
    """A namespace of the test's own, in which pods must be restricted."""
    name = request.node.name.lower().translate(str.maketrans("_[].", "----"))[:60].strip("-")
    admin.run("kubectl", "create", "namespace", name)
    admin.run("kubectl", "label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    return name
