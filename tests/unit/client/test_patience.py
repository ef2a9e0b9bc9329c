"""When another try is made, where, and when it is given up."""

import random

import grpc
import pytest
from pagestream_client import (
    DataLoss,
    InvalidRequest,
    QueueFull,
    Reconnection,
    ServerError,
    Unauthenticated,
    Unavailable,
)
from pagestream_client.endpoints import Endpoints
from pagestream_client.patience import Patience
from pagestream_client.status import Failure

AWAY = Failure(grpc.StatusCode.UNAVAILABLE, "connection refused")
FULL = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after_s=3.0)
POLICY = Reconnection(limit_s=60.0, first_delay_s=0.1, max_delay_s=2.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A Patience over a clock that the test moves."""

    def __init__(self, *targets: str, policy: Reconnection = POLICY) -> None:
        self.clock = Clock()
        rng = random.Random(1)
        self.endpoints = Endpoints(targets or ("a:1", "b:1"), rng)
        self.patience = Patience(self.endpoints, policy, clock=self.clock, rng=rng)

    def fail(self, failure: Failure = AWAY, *, lasted_s: float = 0.0) -> float:
        delay_s = self.patience.after(failure, self.endpoints.current, lasted_s=lasted_s)
        self.clock.now += delay_s
        return delay_s

    def fail_for_ever(self, failure: Failure = AWAY, *, lasted_s: float = 0.0) -> None:
        for _ in range(1_000):
            self.clock.now += lasted_s
            self.fail(failure, lasted_s=lasted_s)


def test_the_next_gateway_is_asked_almost_at_once() -> None:
    bench = Bench("a:1", "b:1", "c:1")
    asked = [bench.endpoints.current]
    for _ in range(2):
        assert bench.fail() <= 0.1
        asked.append(bench.endpoints.current)
    assert len(set(asked)) == 3


def test_then_slower_and_slower_up_to_a_bound() -> None:
    bench = Bench("a:1")
    delays = [bench.fail() for _ in range(12)]
    for number, delay_s in enumerate(delays):
        assert 0.5 * min(0.1 * 2**number, 2.0) <= delay_s <= min(0.1 * 2**number, 2.0)
    assert len(set(delays)) == len(delays), "nothing is left to chance"


def test_the_limit_counts_from_the_first_failure_without_progress_since() -> None:
    bench = Bench()
    start = bench.clock.now
    with pytest.raises(Unavailable, match="connection refused"):
        bench.fail_for_ever()
    assert 55.0 < bench.clock.now - start <= 60.0


def test_progress_starts_the_count_anew() -> None:
    bench = Bench("a:1")
    for _ in range(20):
        bench.fail()
        bench.patience.worked("a:1")
        bench.clock.now += 50.0
    assert bench.fail() <= 0.1


def test_a_call_that_stood_long_has_worked_even_if_it_said_nothing() -> None:
    bench = Bench("a:1")
    for _ in range(20):
        bench.clock.now += 30.0
        assert bench.fail(lasted_s=30.0) <= 0.1


def test_a_gateway_that_says_it_cannot_serve_has_not_worked_however_long_it_took() -> None:
    bench = Bench("a:1")
    away = Failure(grpc.StatusCode.UNAVAILABLE, "no store", reason="UNAVAILABLE", retry_after_s=1.0)
    with pytest.raises(Unavailable):
        bench.fail_for_ever(away, lasted_s=30.0)


def test_a_full_queue_is_waited_for_as_long_as_it_asks_and_by_nobody_at_the_same_moment() -> None:
    bench = Bench()
    delays = [bench.fail(FULL) for _ in range(10)]
    assert all(3.0 <= delay_s <= 3.75 for delay_s in delays)
    assert len(set(delays)) == 10


def test_a_full_queue_is_no_fault_of_the_gateway() -> None:
    bench = Bench()
    before = bench.endpoints.current
    bench.fail(FULL)
    assert bench.endpoints.current == before


def test_a_wait_beyond_the_limit_is_told_at_once() -> None:
    bench = Bench(policy=Reconnection(limit_s=2.0))
    with pytest.raises(QueueFull) as caught:
        bench.fail(FULL)
    assert caught.value.retry_after_s == 3.0
    assert bench.clock.now == 100.0


def test_a_single_gateway_that_is_about_to_end_is_given_its_time() -> None:
    stopping = Failure(grpc.StatusCode.UNAVAILABLE, "stopping", reason="GATEWAY_STOPPING", retry_after_s=1.0)
    assert Bench("a:1").fail(stopping) == 1.0
    assert Bench("a:1", "b:1").fail(stopping) <= 0.1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.DATA_LOSS, DataLoss),
        (grpc.StatusCode.UNIMPLEMENTED, ServerError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, InvalidRequest),
    ],
)
def test_what_another_try_would_not_change_is_raised_at_once(code: grpc.StatusCode, expected: type[Exception]) -> None:
    bench = Bench()
    with pytest.raises(expected):
        bench.fail(Failure(code, "no"))


def test_a_broken_connection_is_tried_again_whatever_it_looks_like() -> None:
    for code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED):
        Bench().fail(Failure(code, "RST_STREAM"))


def test_a_gateways_own_fault_is_tried_three_times() -> None:
    bench = Bench()
    fault = Failure(grpc.StatusCode.INTERNAL, "a defect", reason="INTERNAL_ERROR")
    for _ in range(3):
        bench.fail(fault)
    with pytest.raises(ServerError, match="a defect") as caught:
        bench.fail(fault)
    assert caught.value.status == "INTERNAL"


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="first_delay_s"):
        Reconnection(first_delay_s=3.0, max_delay_s=1.0)
