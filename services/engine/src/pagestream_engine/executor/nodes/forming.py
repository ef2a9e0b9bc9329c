"""How a group comes together: the places of a machine's ranks, and the port at which those of other machines join."""

from __future__ import annotations

import hashlib
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from pagestream_engine.config import EngineConfig
from pagestream_engine.executor.nodes.listener import Joined, RankListener
from pagestream_engine.parallel.place import RankPlace
from pagestream_engine.wire.executor import ANSWERS, PLANS

_SIOCGIFADDR = 0x8915  # linux/sockios.h


class Forming:
    """A group on machine 0 until all of its ranks are there. Closes the port at its end.

    Args:
        folder: for the ranks of this machine.

    Raises:
        ConfigError: the secret can't be read, or the port is taken.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        options = config.parallel
        self.limit_s = options.node_join_timeout_s
        self._listener: RankListener | None = None
        if options.nnodes == 1:
            self.places = places_on(config, folder)
            return
        store_port = _free_port()
        others = range(options.num_ranks // options.nnodes, options.num_ranks)
        self._listener = RankListener(options, others, settings_digest(config), store_port)
        interface = interface_of(options.master_addr)
        self.places = places_on(config, folder, store=f"tcp://127.0.0.1:{store_port}", interface=interface)

    def __enter__(self) -> Forming:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._listener is not None:
            self._listener.close()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined, or that were not taken."""
        return [] if self._listener is None else self._listener.missing

    def take(self, timeout_s: float) -> Joined | None:
        """Return a rank that has joined, within the time; None: none has."""
        return None if self._listener is None else self._listener.take(timeout_s)


def places_on(
    config: EngineConfig, folder: Path, *, store: str | None = None, interface: str | None = None
) -> list[RankPlace]:
    """Return the places of the ranks of machine `node_rank`.

    Args:
        folder: that these ranks and their parent share.
        store: where the ranks of several machines find each other.
        interface: of this machine, for the others.
    """
    options = config.parallel
    num_local = options.num_ranks // options.nnodes
    first = options.node_rank * num_local
    return [
        RankPlace(
            rank,
            options.num_ranks,
            folder,
            num_stages=options.pipeline_parallel_size,
            first_local=first,
            num_on_machine=num_local,
            store=store,
            interface=interface,
        )
        for rank in range(first, first + num_local)
    ]


def settings_digest(config: EngineConfig) -> str:
    """Return a digest of what all ranks of a group have to share: settings, and the form of the records."""
    parallel = replace(
        config.parallel,
        nnodes=1,
        node_rank=0,
        master_addr="-",
        node_secret_file=None,
        node_group="",
        node_join_timeout_s=1.0,
    )
    nnodes, shared = config.parallel.nnodes, replace(config, parallel=parallel, place=RankPlace())
    return hashlib.sha256(f"{PLANS.schema} {ANSWERS.schema} {nnodes} {shared!r}".encode()).hexdigest()


def interface_of(host: str) -> str | None:
    """Return the name of this machine's network interface with an IPv4 address; None: it has none, or it can't be
    found. Of an interface with IPv6 alone gloo might take a link-local address; without one it takes that of the host's
    name, which in a pod is the pod's.

    Args:
        host: the address, or a name of it.
    """
    if sys.platform != "linux":
        return None
    import fcntl

    try:
        wanted = socket.inet_aton(socket.gethostbyname(host))
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
            except OSError:
                continue  # it has no IPv4 address
            if found[20:24] == wanted:
                return name
    return None


def _free_port() -> int:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as probe:
        port: int = probe.getsockname()[1]
        return port
