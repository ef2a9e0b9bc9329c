"""When another try is made, where and over which connection, and when it is given up."""

import random
from typing import Any

import grpc
import pytest
from pagestream_client import (
    Client,
    DataLoss,
    InvalidRequest,
    QueueFull,
    Reconnection,
    ServerError,
    StreamClosed,
    Transport,
    Unauthenticated,
    Unavailable,
)
from pagestream_client.grpc.connections import Connection, Connections
from pagestream_client.retry import Code, Endpoints, Failure, RetryState
from pagestream_gateway import Settings
from pagestream_streams import StreamsSettings

AWAY = Failure(Code.UNAVAILABLE, "connection refused")
FULL = Failure(Code.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after_s=3.0)
NO_REDIS = Failure(Code.UNAVAILABLE, "no store", reason="UNAVAILABLE", retry_after_s=1.0)
STOPPING = Failure(Code.UNAVAILABLE, "stopping", reason="GATEWAY_STOPPING", retry_after_s=1.0)
POLICY = Reconnection(limit_s=60.0, first_delay_s=0.1, max_delay_s=2.0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A RetryState over a clock that the test moves."""

    def __init__(self, *targets: str, policy: Reconnection = POLICY) -> None:
        self.clock = Clock()
        rng = random.Random(1)
        self.endpoints = Endpoints(targets or ("a:1", "b:1"), rng)
        self.retry = RetryState(self.endpoints, policy, clock=self.clock, rng=rng)

    def fail(self, failure: Failure = AWAY, *, lasted_s: float = 0.0) -> float:
        delay_s = self.retry.next_delay(failure, self.endpoints.current, lasted_s=lasted_s)
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
        bench.retry.worked("a:1")
        bench.clock.now += 50.0
    assert bench.fail() <= 0.1


@pytest.mark.parametrize(("failure", "stood_s"), [(AWAY, 30.0), (STOPPING, 30.0), (NO_REDIS, 300.0)])
def test_a_call_that_stood_long_has_worked_even_if_it_said_nothing(failure: Failure, stood_s: float) -> None:
    bench = Bench("a:1", "b:1")
    for _ in range(20):
        bench.clock.now += stood_s
        assert bench.fail(failure, lasted_s=stood_s) <= 0.1


@pytest.mark.parametrize("lasted_s", [0.0, 30.0, StreamsSettings().outage_limit_s])
def test_a_gateway_without_redis_has_not_worked_for_as_long_as_it_may_have_waited(lasted_s: float) -> None:
    bench = Bench("a:1")
    with pytest.raises(Unavailable):
        bench.fail_for_ever(NO_REDIS, lasted_s=lasted_s)


def test_a_dead_connection_has_not_worked_until_that_was_noticed() -> None:
    bench, transport = Bench("a:1"), Transport()
    with pytest.raises(Unavailable):
        bench.fail_for_ever(lasted_s=transport.keepalive_s + transport.keepalive_timeout_s)


@pytest.mark.parametrize("lasted_s", [0.0, 6.0, 40.0])
@pytest.mark.parametrize("failure", [AWAY, STOPPING, NO_REDIS])
def test_a_gateway_that_fails_alone_is_left_at_once(failure: Failure, lasted_s: float) -> None:
    bench = Bench("a:1", "b:1")
    first = bench.endpoints.current
    assert bench.fail(failure, lasted_s=lasted_s) <= 0.1
    assert bench.endpoints.current != first


def test_so_it_is_after_troubles_that_were_long_ago() -> None:
    bench = Bench("a:1", "b:1")
    for _ in range(8):
        bench.fail()
    first = bench.endpoints.current
    assert bench.fail(NO_REDIS, lasted_s=12.0) <= 0.1
    assert bench.endpoints.current != first


@pytest.mark.parametrize("lasted_s", [0.0, Settings().gateway.answer_limit_s])
@pytest.mark.parametrize("targets", [["a:1"], ["a:1", "b:1", "c:1"]])
def test_redis_is_waited_for_as_long_as_the_gateways_wait(targets: list[str], lasted_s: float) -> None:
    bench = Bench(*targets, policy=Reconnection())
    start = bench.clock.now
    while bench.clock.now - start < StreamsSettings().outage_limit_s:
        bench.fail(NO_REDIS, lasted_s=lasted_s)  # raises when it is given up
        bench.clock.now += lasted_s


def test_a_full_queue_is_retried_after_its_delay_and_a_random_part() -> None:
    bench = Bench()
    delays = [bench.fail(FULL) for _ in range(10)]
    assert all(3.0 <= delay_s <= 3.75 for delay_s in delays)
    assert len(set(delays)) == 10


def test_a_full_queue_is_no_fault_of_the_gateway() -> None:
    bench = Bench()
    before = bench.endpoints.current
    bench.fail(FULL)
    assert bench.endpoints.current == before


def test_a_wait_beyond_the_limit_raises_at_once() -> None:
    bench = Bench(policy=Reconnection(limit_s=2.0))
    with pytest.raises(QueueFull) as caught:
        bench.fail(FULL)
    assert caught.value.retry_after_s == 3.0
    assert bench.clock.now == 100.0


def test_a_single_gateway_that_is_about_to_end_is_given_its_time() -> None:
    assert Bench("a:1").fail(STOPPING) == 1.0
    assert Bench("a:1", "b:1").fail(STOPPING) <= 0.1


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (Code.INVALID_ARGUMENT, InvalidRequest),
        (Code.UNAUTHENTICATED, Unauthenticated),
        (Code.DATA_LOSS, DataLoss),
        (Code.UNIMPLEMENTED, ServerError),
        (Code.RESOURCE_EXHAUSTED, InvalidRequest),
    ],
)
def test_what_another_try_would_not_change_is_raised_at_once(code: Code, expected: type[Exception]) -> None:
    bench = Bench()
    with pytest.raises(expected):
        bench.fail(Failure(code, "no"))


def test_a_broken_connection_is_tried_again_whatever_it_looks_like() -> None:
    for code in (Code.INTERNAL, Code.UNKNOWN, Code.CANCELLED):
        Bench().fail(Failure(code, "RST_STREAM"))


def test_a_gateways_own_fault_is_tried_three_times() -> None:
    bench = Bench()
    fault = Failure(Code.INTERNAL, "a defect", reason="INTERNAL_ERROR")
    for _ in range(3):
        bench.fail(fault)
    with pytest.raises(ServerError, match="a defect") as caught:
        bench.fail(fault)
    assert caught.value.status == "INTERNAL"


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="first_delay_s"):
        Reconnection(first_delay_s=3.0, max_delay_s=1.0)


def test_a_gateway_that_took_the_call_has_the_whole_limit() -> None:
    """A queued request gets no event yet; its gateway's restart is an outage, not a missing server."""
    policy = Reconnection(limit_s=60.0, first_contact_s=1.0, first_delay_s=0.1, max_delay_s=2.0)
    bench = Bench("a:1", policy=policy)
    bench.retry.answered()
    started = bench.clock.now
    while bench.clock.now < started + 10.0:
        bench.fail()


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
        Client(["b:1", target])


def test_addresses_of_version_6_stand_in_brackets_and_one_is_needed() -> None:
    Client(["[::1]:50051"]).close()
    with pytest.raises(ValueError, match="at least one"):
        Client([])


TARGET = "127.0.0.1:1"


def connections() -> tuple[Connections, Clock]:
    clock = Clock()
    return Connections(grpc.insecure_channel, clock=clock), clock


def is_closed(channel: grpc.Channel) -> bool:
    call: Any = channel.unary_unary("/a/b")
    try:
        call.future(b"").cancel()
    except ValueError:
        return True
    return False


def test_one_connection_serves_all_calls_to_a_gateway() -> None:
    made, _ = connections()
    assert made.to(TARGET) is made.to(TARGET)
    assert made.to(TARGET) is not made.to("127.0.0.1:2")


@pytest.mark.parametrize(("failure", "is_left"), [(NO_REDIS, True), (STOPPING, True), (AWAY, False), (FULL, False)])
def test_it_is_left_where_a_gateway_says_that_it_cannot_serve(failure: Failure, is_left: bool) -> None:
    made, clock = connections()
    first = made.to(TARGET)
    clock.now += 10.0
    made.failed(first, failure)
    assert (made.to(TARGET) is not first) == is_left


def test_many_calls_that_fail_leave_it_once() -> None:
    made, clock = connections()
    first = made.to(TARGET)
    clock.now += 10.0
    made.failed(first, NO_REDIS)
    second = made.to(TARGET)
    clock.now += 10.0
    made.failed(first, NO_REDIS)
    assert made.to(TARGET) is second


def test_a_new_one_is_not_left_at_once() -> None:
    made, clock = connections()
    first = made.to(TARGET)
    clock.now += 1.0
    made.failed(first, NO_REDIS)
    assert made.to(TARGET) is first


def test_one_that_was_left_is_closed_when_its_last_call_has_gone() -> None:
    made, clock = connections()
    held: Connection | None = made.to(TARGET)
    assert held is not None
    channel = held.channel
    clock.now += 10.0
    made.failed(held, NO_REDIS)
    assert not is_closed(channel)
    held = None
    assert is_closed(channel)


def test_closing_ends_it_for_everybody() -> None:
    made, _ = connections()
    channel = made.to(TARGET).channel
    assert made.close() == [channel]
    with pytest.raises(StreamClosed):
        made.to(TARGET)


def test_a_quiet_stream_leaves_a_dead_gateway_before_its_request_is_cancelled() -> None:
    transport, reconnection, streams = Transport(), Reconnection(), StreamsSettings()
    noticed_s = transport.keepalive_s + transport.keepalive_timeout_s
    also_dead_s = reconnection.first_delay_s + transport.connect_timeout_s
    resumed_s = noticed_s + also_dead_s + reconnection.first_delay_s
    lease_s = (streams.lease_ms - streams.heartbeat_ms) / 1000  # the gateway may die just before its next beat
    assert resumed_s < lease_s + Settings().stream.disconnect_grace_s
