from typing import Any

import pytest
from pagestream_operator.kube.compare import differs, fingerprint, projection


@pytest.mark.parametrize(
    ("wanted", "live"),
    [
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2], "c": 3}, "d": 4}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "1", "default": True}]}),
        ({"data": {}}, {}),
        ({"data": {}}, {"data": None}),
        ({"list": []}, {}),
    ],
)
def test_more_in_the_object_is_no_difference(wanted: dict[str, Any], live: dict[str, Any]) -> None:
    assert not differs(wanted, live)


@pytest.mark.parametrize(
    ("wanted", "live"),
    [
        ({"a": 1}, {}),
        ({"a": 1}, {"a": 2}),
        ({"a": [1]}, {"a": [1, 2]}),
        ({"a": [1, 2]}, {"a": [2, 1]}),
        ({"a": {"b": 1}}, {"a": 1}),
        ({"data": {}}, {"data": {"x": "1"}}),
        ({"cpu": "1000m"}, {"cpu": "1"}),
    ],
)
def test_differences(wanted: dict[str, Any], live: dict[str, Any]) -> None:
    assert differs(wanted, live)


def test_what_the_server_made_of_a_manifest_is_recognised() -> None:
    wanted = {"cpu": "1000m", "unknown": {"x": 1}}
    made = {"cpu": "1", "other": 5}
    assert fingerprint(wanted, made) == fingerprint(wanted, {**made, "other": 6})
    assert fingerprint(wanted, made) != fingerprint(wanted, {"cpu": "2"})
    assert fingerprint({"cpu": "1"}, made) != fingerprint(wanted, made)


def test_a_projection_has_only_what_was_asked_for() -> None:
    assert projection({"a": {"b": 1}, "l": [{"n": 1}]}, {"a": {"b": 2, "c": 3}, "l": [{"n": 4, "m": 5}]}) == {
        "a": {"b": 2},
        "l": [{"n": 4}],
    }
