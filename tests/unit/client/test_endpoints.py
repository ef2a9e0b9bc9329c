"""Which gateway is asked."""

import random

import pytest
from pagestream_client.endpoints import Endpoints
from pagestream_client.grpc.configuration import checked_targets


def endpoints(*targets: str, seed: int = 0) -> Endpoints:
    return Endpoints(targets, random.Random(seed))


def test_it_stays_with_a_gateway_that_works() -> None:
    known = endpoints("a:1", "b:1", "c:1")
    first = known.current
    for _ in range(5):
        known.worked(first)
    assert known.current == first


def test_the_beginnings_are_spread() -> None:
    assert {endpoints("a:1", "b:1", "c:1", seed=seed).current for seed in range(40)} == {"a:1", "b:1", "c:1"}


def test_it_goes_round_while_all_fail() -> None:
    known = endpoints("a:1", "b:1", "c:1")
    asked = []
    for _ in range(6):
        asked.append(known.current)
        known.failed(known.current)
    assert set(asked[:3]) == {"a:1", "b:1", "c:1"}
    assert asked[:3] == asked[3:]


def test_a_failure_of_another_gateway_changes_nothing() -> None:
    known = endpoints("a:1", "b:1")
    first = known.current
    other = next(target for target in known.targets if target != first)
    known.failed(other)
    assert known.current == first


def test_one_that_works_again_is_chosen_before_those_that_failed() -> None:
    known = endpoints("a:1", "b:1", "c:1")
    first = known.current
    second, third = (target for target in known.targets if target != first)
    known.failed(second)
    known.failed(third)
    known.worked(third)
    known.failed(first)
    assert known.current == third


def test_a_gateway_named_twice_is_one() -> None:
    assert endpoints("a:1", "a:1", "b:2").targets == ("a:1", "b:2")


@pytest.mark.parametrize("target", ["a", "http://a:1", "a:port", "", "a:1:2", "::1:50051"])
def test_what_is_no_target_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        checked_targets(["b:1", target])


def test_addresses_of_version_6_stand_in_brackets() -> None:
    assert checked_targets(["[::1]:50051"]) == ["[::1]:50051"]


def test_none_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        endpoints()
