"""An API server with controllers for all tests of the operator, and an operator for those that don't disturb it."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from support.kubernetes.control_plane import ControlPlane, eventually
from support.kubernetes.operator_process import OperatorProcess, PoolWorld, install_definition, running_operator

_NUMBERS = itertools.count()


@pytest.fixture(scope="package")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """kube-apiserver, etcd, kube-controller-manager; EnginePool is defined."""
    with ControlPlane(tmp_path_factory.mktemp("kube"), controllers=True) as kube:
        install_definition(kube)
        yield kube


@pytest.fixture
def new_world(kube: ControlPlane) -> Callable[[], PoolWorld]:
    """Return a function that creates a namespace of its own."""
    return lambda: PoolWorld(kube, f"world-{next(_NUMBERS)}")


@pytest.fixture(scope="module")
def world(kube: ControlPlane) -> PoolWorld:
    """The namespace of `operator`. Tests in it take pools of different names."""
    return PoolWorld(kube, f"world-{next(_NUMBERS)}")


@pytest.fixture(scope="module")
def operator(kube: ControlPlane, world: PoolWorld) -> Iterator[OperatorProcess]:
    """One replica, which leads."""
    with running_operator(kube, world.namespace) as operator:
        eventually(operator.leads, "an operator that leads")
        yield operator
