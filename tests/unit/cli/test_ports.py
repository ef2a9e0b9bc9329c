import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from pagestream_cli.errors import PortTakenError, UsageError
from pagestream_cli.ports import free_port, is_free, require_free


@contextmanager
def listener(*, reuse_port: bool = False) -> Iterator[int]:
    with socket.socket() as server:
        if reuse_port:  # as gRPC servers do
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


@pytest.mark.parametrize("reuse_port", [False, True])
def test_a_port_with_a_listener_is_taken(reuse_port: bool) -> None:
    with listener(reuse_port=reuse_port) as port:
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)


def test_a_closed_connection_that_lingers_does_not_count() -> None:
    with listener() as port, socket.create_connection(("127.0.0.1", port)):
        pass
    assert is_free("127.0.0.1", port)


def test_a_free_port_is_free() -> None:
    assert is_free("127.0.0.1", free_port())


def test_the_option_of_a_taken_port_is_named() -> None:
    with listener() as port, pytest.raises(PortTakenError, match=rf"port {port} \(--grpc-port\) is in use") as caught:
        require_free("127.0.0.1", {"--http-port": free_port(), "--grpc-port": port})
    assert "--grpc-port" in caught.value.hint


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_number_that_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match="not a port"):
        require_free("127.0.0.1", {"--http-port": port})


def test_one_port_for_two_is_refused() -> None:
    port = free_port()
    with pytest.raises(UsageError, match=f"--grpc-port and --http-port both ask for port {port}"):
        require_free("127.0.0.1", {"--http-port": port, "--grpc-port": port})


@pytest.mark.parametrize("host", ["no.such.host.invalid", "999.1.1.1", "192.0.2.1", f"{'a' * 64}.invalid"])
@pytest.mark.parametrize("ask", [lambda host: is_free(host, 8000), free_port], ids=["is_free", "free_port"])
def test_a_host_of_another_machine_is_refused(ask: Callable[[str], object], host: str) -> None:
    with pytest.raises(UsageError, match="cannot listen"):
        ask(host)


def test_a_port_is_chosen_on_an_address_of_the_newer_family() -> None:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no ::1")
    assert is_free("::1", free_port("::1"))
