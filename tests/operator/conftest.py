"""An API server with controllers, and an operator for the tests that don't disturb it.

What needs them lies in two folders, so that each can have an API server in a process of its own. Files in `clusters/`
start clusters of other kinds, each file its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.kubernetes.control_plane import ControlPlane
    from support.kubernetes.operator_process import OperatorProcess, PoolWorld

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """kube-apiserver, etcd, kube-controller-manager; EnginePool is defined."""
    from support.kubernetes.control_plane import ControlPlane
    from support.kubernetes.operator_process import install_definition

    with ControlPlane(tmp_path_factory.mktemp("kube"), controllers=True) as kube:
        install_definition(kube)
        yield kube


@pytest.fixture
def new_world(kube: ControlPlane) -> Callable[[], PoolWorld]:
    """Return a function that creates a namespace of its own."""
    from support.kubernetes.operator_process import PoolWorld

    return lambda: PoolWorld(kube, f"world-{next(_NUMBERS)}")


@pytest.fixture(scope="module")
def world(kube: ControlPlane) -> PoolWorld:
    """The namespace of `operator`. Tests in it take pools of different names."""
    from support.kubernetes.operator_process import PoolWorld

    return PoolWorld(kube, f"world-{next(_NUMBERS)}")


@pytest.fixture(scope="module")
def operator(kube: ControlPlane, world: PoolWorld) -> Iterator[OperatorProcess]:
    """One replica, which leads."""
    from support.kubernetes.control_plane import eventually
    from support.kubernetes.operator_process import running_operator

    with running_operator(kube, world.namespace) as operator:
        eventually(operator.leads, "an operator that leads")
        yield operator
