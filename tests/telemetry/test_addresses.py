"""Addresses as text, and servers that are reached over IPv4 and IPv6."""

import contextlib
import http.client
import socket

import pytest
from pagestream_telemetry import (
    ALL_ADDRESSES,
    Endpoint,
    EndpointError,
    Probes,
    is_loopback,
    join_address,
    listening_sockets,
    loopback_host,
    split_address,
    unmapped,
)
from support.processes.waiting import LIMIT_S

IPV4, IPV6 = "127.0.0.1", "::1"
HAS_IPV6 = loopback_host() == IPV6
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6 loopback address")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", ("a", 7)),
        ("a:", ("a", 7)),
        ("a:1", ("a", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]", ("::1", 7)),
        ("[::1]:1", ("::1", 1)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
    ],
)
def test_an_address_is_split_and_joined(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text, 7) == expected
    assert split_address(join_address(*expected), 0) == expected


@pytest.mark.parametrize(
    "text", ["", ":1", "::1", "::1:1", "[::1", "[::1]1", "[a]:1", "a:b", "a:1:2", "a:0", "a:65536"]
)
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_address(text, 7)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((name, True) for name in ("localhost", "LOCALHOST", "a.localhost", "127.9.9.9", "::1", "[::1]")),
        ("::ffff:127.0.0.1", True),
        *((name, False) for name in ("", "example.com", "10.0.0.1", "::", "0.0.0.0", "::ffff:10.0.0.1", "[::1")),  # noqa: S104
    ],
)
def test_names_of_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_a_caller_over_ipv4_has_its_ipv4_address() -> None:
    assert [unmapped(each) for each in ("::ffff:10.0.0.1", "10.0.0.1", "fd00::1", "a")] == [
        "10.0.0.1",
        "10.0.0.1",
        "fd00::1",
        "a",
    ]


def probes() -> Probes:
    return Probes(health=lambda: "", readiness=lambda: "", metrics=lambda: b"", profile=lambda steps: f"/{steps}")


def answers(host: str, port: int, method: str = "GET", path: str = "/healthz") -> int:
    with contextlib.closing(http.client.HTTPConnection(host, port, timeout=LIMIT_S)) as connection:
        connection.request(method, path)
        return connection.getresponse().status


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        (ALL_ADDRESSES, (IPV4, IPV6)),
        ("[::]", (IPV4, IPV6)),
        ("", (IPV4, IPV6)),
        (IPV6, (IPV6,)),
        (f"[{IPV6}]", (IPV6,)),
        (IPV4, (IPV4,)),
        ("localhost", ("localhost",)),
    ],
)
def test_probes_reach_the_endpoint_by_each_address_of_its_host(host: str, reached: tuple[str, ...]) -> None:
    if not HAS_IPV6:
        if host.strip("[]") == IPV6:
            pytest.skip("this machine has no IPv6 loopback address")
        reached = tuple(each for each in reached if each != IPV6)
    with Endpoint(probes(), host, 0) as endpoint:
        for each in reached:
            assert answers(each, endpoint.port) == 200
            assert answers(each, endpoint.port, "POST", "/debug/profile?steps=3") == 202
    with contextlib.ExitStack() as stack:  # all of it is closed
        for each in listening_sockets(host, endpoint.port):
            stack.enter_context(each)


@pytest.fixture
def two_addresses(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name of both loopback addresses, and of one that this machine does not have."""
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (IPV6, 0, 0, 0)),
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (IPV4, 0)),
    ]
    real = socket.getaddrinfo

    def resolve(host: str, *args: object, **kwargs: object) -> object:
        return found if host == "both.example" else real(host, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return "both.example"


@needs_ipv6
def test_a_name_of_several_addresses_is_served_at_each(two_addresses: str) -> None:
    with Endpoint(probes(), two_addresses, 0) as endpoint:
        assert answers(IPV4, endpoint.port) == 200
        assert answers(IPV6, endpoint.port) == 200
        with pytest.raises(EndpointError, match=f"both.example:{endpoint.port}: Address already in use"):
            Endpoint(probes(), two_addresses, endpoint.port)


def test_a_kernel_without_ipv6_serves_all_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *args: int, **kwargs: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return real(family, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(socket, "socket", without_ipv6)
        [bound] = listening_sockets(ALL_ADDRESSES, 0)
        assert loopback_host() == IPV4
    with bound:
        assert bound.getsockname()[0] == "0.0.0.0"  # noqa: S104


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "a" * 70])
def test_an_address_of_another_machine_is_an_error_that_names_it(host: str) -> None:
    with pytest.raises(EndpointError, match=r"cannot serve metrics on \[?" + host):
        Endpoint(probes(), host, 0)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_an_error(port: int) -> None:
    with pytest.raises(EndpointError, match=f"{port} is not a port"):
        Endpoint(probes(), IPV4, port)
