import copy
from typing import Any

from pagestream_operator.children.manifest import MANAGER
from pagestream_operator.kube.ownership import SCALER, owns_replicas, taken_over

OURS = {"manager": MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:strategy": {}}}}
SCALE = {"manager": SCALER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}, "subresource": "scale"}
CONTROLLER = {
    "manager": "kube-controller-manager",
    "operation": "Update",
    "subresource": "status",
    "fieldsV1": {"f:status": {"f:replicas": {}}},
}


def live(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"managedFields": copy.deepcopy(list(entries))}}


def foreign(fields: dict[str, Any]) -> dict[str, Any]:
    return {"manager": "kubectl", "operation": "Update", "fieldsV1": fields}


def test_who_owns_replicas() -> None:
    assert owns_replicas(live(OURS, SCALE), SCALER)
    assert not owns_replicas(live(OURS, SCALE), MANAGER)


def test_nothing_is_taken_where_nobody_has_put_anything() -> None:
    revision = foreign({"f:metadata": {"f:annotations": {"f:deployment.kubernetes.io/revision": {}}}})
    assert taken_over(live(OURS, SCALE, CONTROLLER, revision)) is None


def test_a_variable_of_somebody_elses_becomes_ours_to_take_out() -> None:
    env = {"f:template": {"f:spec": {"f:containers": {'k:{"name":"engine"}': {"f:env": {'k:{"name":"X"}': {}}}}}}}
    entries = taken_over(live(OURS, SCALE, foreign({"f:spec": env})))
    assert entries is not None
    assert [entry["manager"] for entry in entries] == [MANAGER, SCALER]
    assert entries[0]["fieldsV1"]["f:spec"] == {"f:strategy": {}, **env}


def test_replicas_and_asked_for_restarts_stay_with_whoever_set_them() -> None:
    restart = {"f:annotations": {".": {}, "f:kubectl.kubernetes.io/restartedAt": {}}}
    fields = {"f:spec": {"f:replicas": {}, "f:template": {"f:metadata": restart}}}
    assert taken_over(live(OURS, foreign(fields))) is None


def test_a_restart_beside_a_change_stays() -> None:
    annotations = {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}, "f:x": {}}}
    entries = taken_over(live(OURS, foreign({"f:spec": {"f:template": {"f:metadata": annotations}}})))
    assert entries is not None
    assert entries[1]["manager"] == "kubectl"
    kept = entries[1]["fieldsV1"]["f:spec"]["f:template"]["f:metadata"]["f:annotations"]
    assert kept == {"f:kubectl.kubernetes.io/restartedAt": {}}
    taken = entries[0]["fieldsV1"]["f:spec"]["f:template"]["f:metadata"]["f:annotations"]
    assert taken == {"f:x": {}}


def test_data_of_a_config_map_is_content() -> None:
    entries = taken_over(live({**OURS, "fieldsV1": {"f:metadata": {}}}, foreign({"f:data": {"f:X": {}}})))
    assert entries is not None
    assert entries[0]["fieldsV1"]["f:data"] == {"f:X": {}}


def test_the_object_itself_is_left_as_it_was() -> None:
    body = live(OURS, foreign({"f:data": {"f:X": {}}}))
    before = copy.deepcopy(body)
    taken_over(body)
    assert body == before
