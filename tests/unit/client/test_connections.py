"""When a connection is left for a new one, and when it is closed."""

from typing import Any

import grpc
import pytest
from pagestream_client import StreamClosed
from pagestream_client.failures import Code, Failure
from pagestream_client.grpc.connections import Connection, Connections

NO_REDIS = Failure(Code.UNAVAILABLE, "no store", reason="UNAVAILABLE")
STOPPING = Failure(Code.UNAVAILABLE, "stopping", reason="GATEWAY_STOPPING")
BROKEN = Failure(Code.UNAVAILABLE, "connection reset")
FULL = Failure(Code.RESOURCE_EXHAUSTED, "full", reason="QUEUE_FULL", retry_after_s=1.0)
TARGET = "127.0.0.1:1"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


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


@pytest.mark.parametrize(("failure", "is_left"), [(NO_REDIS, True), (STOPPING, True), (BROKEN, False), (FULL, False)])
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
