"""Servers of a topology: a port in use is reported at once."""

import socket
from pathlib import Path

import pytest
from pagestream_streams.connection.embedded import find_server
from support.redis.topologies import HOST, LIMIT_S, Topology, TopologyError, quiet_port, running, server, until


def first_port_of_outgoing_connections() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_quiet_ports_differ_and_are_none_that_the_kernel_gives_away() -> None:
    ports = [quiet_port() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) + 10_000 < first_port_of_outgoing_connections()


@pytest.mark.timeout(LIMIT_S)
def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, quiet_port()))
        taken.listen()
        one = server(find_server(), tmp_path, port=taken.getsockname()[1])
        with running(Topology("", [one])):
            one.start()
            with pytest.raises(TopologyError, match=r"ended with 1.*[Aa]ddress already in use"):
                until(lambda: False, "nothing", [one])
