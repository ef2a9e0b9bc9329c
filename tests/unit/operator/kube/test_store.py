from pagestream_operator.kube.kinds import DEPLOYMENT, POD, POOL
from pagestream_operator.kube.store import ObjectStore, PoolKey
from support.kubernetes.pool_objects import deployment_body, pod_body, pool_body, stored

DEMO = PoolKey("default", "demo")


def test_a_change_is_told_to_its_pool() -> None:
    changed: list[PoolKey] = []
    store = ObjectStore(changed.append)
    store.put(POOL, stored(pool_body()))
    store.put(POD, pod_body("a"))
    store.put(DEPLOYMENT, deployment_body(1))
    assert changed == [DEMO] * 3
    assert store.pools() == [DEMO]


def test_what_comes_late_is_ignored() -> None:
    store = ObjectStore()
    assert store.put(DEPLOYMENT, deployment_body(3, version=8))
    assert not store.put(DEPLOYMENT, deployment_body(1, version=7))
    found = store.get(DEPLOYMENT, "default", "demo-engine")
    assert found is not None
    assert found["spec"]["replicas"] == 3


def test_the_same_version_may_say_more() -> None:
    """A write is remembered as far as it is known; the watch then brings the whole."""
    store = ObjectStore()
    store.put(DEPLOYMENT, deployment_body(3, version=8))
    assert store.put(DEPLOYMENT, deployment_body(3, version=8, readyReplicas=1))
    found = store.get(DEPLOYMENT, "default", "demo-engine")
    assert found is not None
    assert found["status"]["readyReplicas"] == 1


def test_pods_are_known_by_their_pool_and_forgotten() -> None:
    store = ObjectStore()
    store.put(POD, pod_body("b"))
    store.put(POD, pod_body("a", ready=False))
    store.put(POD, pod_body("other", "second"))
    assert [pod.name for pod in store.pods(DEMO)] == ["a", "b"]
    store.drop(POD, pod_body("a", version=2))
    assert [pod.name for pod in store.pods(DEMO)] == ["b"]


def test_the_end_of_an_object_is_not_that_of_its_successor() -> None:
    store = ObjectStore()
    store.put(POOL, stored(pool_body(), uid="new", version=9))
    store.drop(POOL, stored(pool_body(), uid="old", version=10))
    assert store.pools() == [DEMO]


def test_a_list_drops_what_it_does_not_show_and_keeps_what_came_since() -> None:
    store = ObjectStore()
    for name in ("a", "b"):
        store.put(POD, pod_body(name))
    suspects = store.uids(POD, "default")
    store.put(POD, pod_body("late"))
    assert store.settle(POD, [pod_body("b", version=5)], suspects) == 1
    assert [pod.name for pod in store.pods(DEMO)] == ["b", "late"]


def test_a_list_of_one_kind_drops_no_other() -> None:
    store = ObjectStore()
    store.put(POOL, stored(pool_body(), uid="same"))
    assert store.settle(DEPLOYMENT, [], {"same"}) == 1
    assert store.pools() == [DEMO]


def test_uids_are_those_of_a_namespace_or_all() -> None:
    store = ObjectStore()
    store.put(POD, pod_body("a"))
    assert store.uids(POD, "default") == store.uids(POD, None) == {"a-uid"}
    assert store.uids(POD, "elsewhere") == set()
