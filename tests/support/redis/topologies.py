"""Topologies of real Redis servers: a cluster, a master with replicas and Sentinels, a server that only speaks TLS."""

import ipaddress
import os
import random
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagestream_streams import EmbeddedRedis, ServerBinary
from redis import Redis, exceptions
from support.processes.part import Part
from support.processes.waiting import LIMIT_S
from support.redis.servers import emptied

HOST = "127.0.0.1"
NODE_TIMEOUT_MS = 1000
"""Milliseconds of silence after which a cluster's nodes, and Sentinels, count a server as dead."""


class TopologyError(RuntimeError):
    """The servers did not reach the state that was waited for."""


class Server(Part):
    """One server process; it can be killed and started again on its files."""

    def __init__(self, folder: Path, command: Sequence[str], port: int) -> None:
        super().__init__(f"the server on port {port}", command, folder / "log")
        self.folder = folder
        self.port = port

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        super().start()

    def kill(self) -> None:
        if self.process is not None:
            super().kill()
            self.process = None

    def ask(self, *command: str | bytes | int) -> object:
        with Redis(host=HOST, port=self.port, socket_timeout=5.0) as client:
            answer: object = client.execute_command(*command)
            return answer

    def check(self) -> None:
        """Raise TopologyError, with the end of its log, where the process has ended."""
        if self.process is not None and not self.is_alive():
            raise TopologyError(f"{self.name} ended with {self.wait()}: {self.log_tail()}")

    def answers(self) -> bool:
        try:
            return bool(self.ask("PING"))
        except (exceptions.RedisError, OSError):
            return False


def until(condition: Callable[[], bool], what: str, servers: Sequence[Server] = ()) -> None:
    """Wait for a condition with a limit; TopologyError names what was waited for, or a server that has ended."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        for each in servers:
            each.check()
        if time.monotonic() > end:
            raise TopologyError(f"waited {LIMIT_S:.0f} s for {what}")
        time.sleep(0.05)


def server(binary: ServerBinary, folder: Path, *options: str) -> Server:
    """Return a server with append-only files, as the embedded one has."""
    port = quiet_port()
    command = [str(binary.path), "--port", str(port), "--bind", HOST, "--dir", str(folder), "--save", ""]
    return Server(folder, [*command, "--appendonly", "yes", "--appendfsync", "everysec", *options], port)


@dataclass
class Topology:
    """Servers and their address."""

    url: str
    servers: list[Server]
    sentinels: list[Server] = field(default_factory=list)

    def empty(self) -> str:
        """Delete keys and scripts on all masters; return the address."""
        for each in self.servers:
            try:
                each.ask("CONFIG", "SET", "maxmemory", 0)
                each.ask("FLUSHALL")
                each.ask("SCRIPT", "FLUSH")
            except exceptions.ReadOnlyError:
                continue
        return self.url

    def masters(self) -> list[Server]:
        """Return the running masters."""
        return [each for each in self.servers if each.process is not None and role(each) == "master"]

    def leads_to(self, masters: Sequence[Server]) -> bool:
        """Whether every Sentinel names one of some masters. Until it does, a master that is started again is one still,
        without what it had not written to its file: clients would be led to it."""
        ports = {each.port for each in masters}
        return all(_named_master(each) in ports for each in self.sentinels)


Place = EmbeddedRedis | Topology
"""A single server or a topology."""


def fresh(place: Place) -> str:
    """Delete keys and scripts of a place, and return its address."""
    return place.empty() if isinstance(place, Topology) else emptied(place)


def ask_all(place: Place, *command: str | int) -> list[Any]:
    """Send a command without a key to each master, and return their replies."""
    if isinstance(place, Topology):
        return [each.ask(*command) for each in place.masters()]
    with Redis(port=place.port) as client:
        return [client.execute_command(*command)]


def find_keys(place: Place, pattern: str) -> list[bytes]:
    """Return the matching keys of all servers."""
    return [key for found in ask_all(place, "KEYS", pattern) for key in found]


def role(each: Server) -> str:
    """Return "master" or "slave"."""
    return str(_role(each)[0].decode())


def num_replicas(master: Server) -> int:
    """Return the number of replicas that are connected to a master."""
    return len(_role(master)[2])


def _role(each: Server) -> list[Any]:
    answer = each.ask("ROLE")
    if not isinstance(answer, list):
        raise TopologyError(f"ROLE answered {answer!r}")
    return answer


@contextmanager
def running(topology: Topology) -> Iterator[Topology]:
    """Kill all servers at the end of the block."""
    try:
        yield topology
    finally:
        for each in (*topology.sentinels, *topology.servers):
            each.kill()


@contextmanager
def running_cluster(folder: Path, binary: ServerBinary, *, masters: int = 3, replicas: int = 1) -> Iterator[Topology]:
    """Run a cluster of masters with replicas, each master with its share of the slots."""
    count = masters * (1 + replicas)
    options: tuple[str, ...] = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS))
    options += ("--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0")
    servers = [
        server(binary, folder / str(number), *options, "--cluster-config-file", "nodes.conf") for number in range(count)
    ]
    url = "redis+cluster://" + ",".join(f"{HOST}:{each.port}" for each in servers)
    with running(Topology(url, servers)) as topology:
        for each in servers:
            each.start()
        until(lambda: all(each.answers() for each in servers), "the cluster's servers", servers)
        _join(servers, masters)
        yield topology


def quiet_port() -> int:
    """Return a port that is free, and stays so until a server is started on it, or restarted.

    It is below those that the kernel takes for outgoing connections, and differs from all that were returned before, in
    this or another worker of the test run. The port 10,000 higher is free, too: a cluster's nodes use it for their bus.
    """
    ports = _own_ports(range(12_000, 22_000))
    for port in random.sample(ports, len(ports)):
        if port not in _given and _is_free(port) and _is_free(port + 10_000):
            _given.add(port)
            return port
    raise TopologyError("no port is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _own_ports(all_ports: range) -> range:
    """Return this process' share of the ports: each worker of pytest-xdist has one, by its number ("gw0" and so on)."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # A worker that takes the place of one that died has a number past the count.
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % count
    return all_ports[number * len(all_ports) // count : (number + 1) * len(all_ports) // count]


_given: set[int] = set()


def _join(servers: Sequence[Server], masters: int) -> None:
    first = servers[0]
    for number, each in enumerate(servers):
        each.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for each in servers[1:]:
        first.ask("CLUSTER", "MEET", HOST, each.port)
    bounds = [16384 * number // masters for number in range(masters + 1)]
    for number, each in enumerate(servers[:masters]):
        each.ask("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
    until(lambda: all(_known(each) == len(servers) for each in servers), "the nodes to know each other")
    for number, each in enumerate(servers[masters:]):
        identity = servers[number % masters].ask("CLUSTER", "MYID")
        each.ask("CLUSTER", "REPLICATE", identity.decode() if isinstance(identity, bytes) else str(identity))
    until(lambda: all(_is_whole(each, len(servers) - masters) for each in servers), "the cluster to be whole")


def _known(each: Server) -> int:
    return int(_info(each)["cluster_known_nodes"])


def _info(each: Server) -> dict[str, str]:
    with Redis(host=HOST, port=each.port) as client:
        info: dict[str, str] = client.execute_command("CLUSTER INFO")
        return info


def _is_whole(each: Server, replicas: int) -> bool:
    with Redis(host=HOST, port=each.port) as client:
        nodes = client.execute_command("CLUSTER NODES")
    known = sum("slave" in node["flags"] and node["connected"] for node in nodes.values())
    info = _info(each)
    return known == replicas and (info["cluster_state"], info["cluster_slots_ok"]) == ("ok", "16384")


@contextmanager
def running_sentinels(folder: Path, binary: ServerBinary) -> Iterator[Topology]:
    """Run a master with a replica, and three Sentinels of which two have to agree on its death."""
    master = server(binary, folder / "0", "--repl-diskless-sync-delay", "0")
    options = ("--replicaof", f"{HOST} {master.port}", "--repl-diskless-sync-delay", "0")
    replica = server(binary, folder / "1", *options)
    sentinels = [_sentinel(binary, folder / f"sentinel-{number}", master.port) for number in range(3)]
    url = "redis+sentinel://" + ",".join(f"{HOST}:{each.port}" for each in sentinels) + "/pagestream"
    with running(Topology(url, [master, replica], sentinels)) as topology:
        for each in topology.servers:
            each.start()
        until(lambda: all(each.answers() for each in topology.servers), "master and replica", topology.servers)
        until(lambda: num_replicas(master) == 1, "the replica to follow")
        for each in sentinels:
            each.start()
        until(lambda: all(_sees(each) for each in sentinels), "the Sentinels to see each other", sentinels)
        yield topology


def _sentinel(binary: ServerBinary, folder: Path, master_port: int) -> Server:
    folder.mkdir(parents=True)
    port = quiet_port()
    lines = [
        f"port {port}",
        f"bind {HOST}",
        f"dir {folder}",
        f"sentinel monitor pagestream {HOST} {master_port} 2",
        f"sentinel down-after-milliseconds pagestream {NODE_TIMEOUT_MS}",
        "sentinel failover-timeout pagestream 3000",
        "sentinel parallel-syncs pagestream 1",
    ]
    config = folder / "sentinel.conf"
    config.write_text("\n".join(lines) + "\n")
    return Server(folder, [str(binary.path), str(config), "--sentinel"], port)


def _sees(sentinel: Server) -> bool:
    try:
        with Redis(host=HOST, port=sentinel.port) as client:
            state = client.sentinel_master("pagestream")
    except (exceptions.RedisError, OSError):
        return False
    return bool(state["num-other-sentinels"] == 2 and state["num-slaves"] == 1)


def _named_master(sentinel: Server) -> int:
    with Redis(host=HOST, port=sentinel.port) as client:
        _, port = client.sentinel_get_master_addr_by_name("pagestream")
    return int(port)


@dataclass(frozen=True)
class Certificates:
    """A certificate authority made for tests, and its certificate for this machine's loopback address."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make, with the openssl program, an authority and a certificate for 127.0.0.1 that serves clients too."""
    folder.mkdir(parents=True, exist_ok=True)
    made = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    ca_key, request, extensions = folder / "ca.key", folder / "server.csr", folder / "extensions"
    names = f"subjectAltName=IP:{ipaddress.ip_address(HOST)},DNS:localhost\n"
    extensions.write_text(names + "authorityKeyIdentifier=keyid\n")  # which Python asks for from 3.13 on
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority = (
        *curve,
        "-x509",
        "-days",
        "2",
        "-keyout",
        ca_key,
        "-out",
        made.authority,
        "-subj",
        "/CN=test authority",
        "-addext",
        "keyUsage=critical,keyCertSign",
    )
    asked = (*curve, "-keyout", made.key, "-out", request, "-subj", "/CN=localhost")
    signing = ("-req", "-in", request, "-CA", made.authority, "-CAkey", ca_key, "-CAcreateserial", "-days", "2")
    signed = (*signing, "-out", made.certificate, "-extfile", extensions)
    for command in (("req", *authority), ("req", *asked), ("x509", *signed)):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, timeout=LIMIT_S)
    return made


@contextmanager
def running_tls_server(folder: Path, binary: ServerBinary) -> Iterator[tuple[Topology, Certificates]]:
    """Run a server that only speaks TLS, requires client certificates, and has one user with the needed permissions."""
    made = make_certificates(folder / "certificates")
    port = quiet_port()
    data = folder / "data"
    data.mkdir(parents=True)
    lines = [
        "port 0",
        f"tls-port {port}",
        f"bind {HOST}",
        f"dir {data}",
        "appendonly yes",
        'save ""',
        f"tls-cert-file {made.certificate}",
        f"tls-key-file {made.key}",
        f"tls-ca-cert-file {made.authority}",
        f"user pagestream on >secret {ACL_RULES}",
        "user default off",
    ]
    config = data / "redis.conf"
    config.write_text("\n".join(lines) + "\n")
    each = Server(data, [str(binary.path), str(config)], port)
    options = f"ssl_ca_certs={made.authority}&ssl_certfile={made.certificate}&ssl_keyfile={made.key}"
    url = f"rediss://pagestream:secret@{HOST}:{port}/0?{options}"
    with running(Topology(url, [each])) as topology:
        each.start()

        def is_there() -> bool:
            try:
                with Redis.from_url(url, socket_timeout=2.0) as client:
                    return bool(client.ping())
            except (exceptions.RedisError, OSError):
                return False

        until(is_there, "the server behind TLS")
        yield topology, made


ACL_RULES = (
    "~ps:* &ps:* -@all +@read +@write +@stream +@hash +@set +@sortedset +@string +@scripting +@pubsub +@connection "
    "-@dangerous +time +info +wait"
)
"""Permissions that Pagestream's Redis user needs; docs/durability.md shows the same line."""
