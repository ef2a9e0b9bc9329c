"""How a group comes together: a machine's ranks, and the leader's open port while those of other machines
join. Who connects and proves the secret is that rank.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import NamedTuple

from pagestream_engine.config import EngineConfig, ParallelConfig
from pagestream_engine.errors import ConfigError, NodeProtocolError
from pagestream_engine.executor.nodes.link import Admission, Hello, Leader, LinkKeys, read_secret
from pagestream_engine.parallel.rank import OwnRank
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
            self.ranks = ranks_on(config, folder)
            return
        store_port = _free_port()
        others = range(options.num_ranks // options.nnodes, options.num_ranks)
        self._listener = RankListener(options, others, settings_digest(config), store_port)
        interface = interface_of(options.master_addr)
        self.ranks = ranks_on(config, folder, store=f"tcp://127.0.0.1:{store_port}", interface=interface)

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


def ranks_on(
    config: EngineConfig, folder: Path, *, store: str | None = None, interface: str | None = None
) -> list[OwnRank]:
    """Return the ranks of machine `node_rank`.

    Args:
        folder: that these ranks and their parent share.
        store: where the ranks of several machines find each other.
        interface: of this machine, for the others.
    """
    options = config.parallel
    num_local = options.num_ranks // options.nnodes
    first = options.node_rank * num_local
    return [
        OwnRank(
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
    nnodes, shared = config.parallel.nnodes, replace(config, parallel=parallel, rank=OwnRank())
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


_log = logging.getLogger(__name__)

_MAX_GREETINGS = 32
"""Connections that have proven nothing yet; more are closed at once."""


class Joined(NamedTuple):
    """A rank that has joined."""

    rank: int
    end: socket.socket
    keys: LinkKeys


class RankListener:
    """Takes each rank of other machines once, until it is closed.

    Args:
        options: addresses, sizes and the secret's file.
        ranks: that may join.
        settings: digest of the engine's settings, which those of a rank have to equal.

    Raises:
        ConfigError: the secret can't be read, or the port is taken.
    """

    def __init__(self, options: ParallelConfig, ranks: Iterable[int], settings: str, store_port: int) -> None:
        self._secret = read_secret(str(options.node_secret_file))
        self._size, self._settings, self._group = options.num_ranks, settings, options.node_group
        self._free = set(ranks)
        self._taking = threading.Lock()
        self._joined: SimpleQueue[Joined] = SimpleQueue()
        self._is_closed = False
        self._greetings = threading.Semaphore(_MAX_GREETINGS)
        self._admission = Admission(os.urandom(16).hex(), store_port)
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            address = ("", options.master_port)
            self._socket = socket.create_server(address, family=family, backlog=_MAX_GREETINGS, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError("master_port", options.master_port, f"a free port ({error.strerror})") from error
        threading.Thread(target=self._accept, name="joining ranks", daemon=True).start()

    @property
    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        with self._taking:
            return sorted(self._free)

    def take(self, timeout_s: float) -> Joined | None:
        """Return a rank that has joined, within the time; None: none has."""
        try:
            return self._joined.get(block=timeout_s > 0, timeout=timeout_s)
        except Empty:
            return None

    def close(self) -> None:
        """Close the port, and the connections of ranks that were not taken."""
        # A thread that accepts keeps the port open: it is woken first.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            _log.debug("the port of ranks was closed: %s", error)
        self._socket.close()
        with self._taking:
            self._is_closed = True
        while (joined := self.take(0.0)) is not None:
            joined.end.close()

    def _accept(self) -> None:
        while True:
            try:
                end, address = self._socket.accept()
            except OSError:
                return  # closed
            if not self._greetings.acquire(blocking=False):
                end.close()
                continue
            threading.Thread(target=self._greet, args=(end, str(address[0])), name="greeting", daemon=True).start()

    def _greet(self, end: socket.socket, address: str) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            leader = Leader(end, self._secret, self._admission.generation)
            hello = leader.greet()
            reason = self._objection(hello)
            if reason:
                leader.refuse(reason)
                raise NodeProtocolError(reason)
            self._admit(leader, hello.rank, end)
            _log.info("rank %d of %d has joined from %s", hello.rank, hello.size, address)
        except (OSError, EOFError, NodeProtocolError) as error:
            _log.warning("a connection from %s was refused: %s", address, error)
            end.close()
        finally:
            self._greetings.release()

    def _admit(self, leader: Leader, rank: int, end: socket.socket) -> None:
        try:
            keys = leader.admit(self._admission)
        except OSError:
            with self._taking:
                self._free.add(rank)
            raise
        with self._taking:
            if not self._is_closed:
                self._joined.put(Joined(rank, end, keys))
                return
        end.close()  # nobody takes it any more: the rank must not wait for a plan

    def _objection(self, hello: Hello) -> str:
        """Return why a rank may not join; empty: it may, and its place is taken."""
        if hello.group != self._group:
            return f"node_group: given {hello.group!r:.80}, expected {self._group!r}"
        if hello.size != self._size:
            return f"ranks: given a group of {hello.size}, expected {self._size}"
        if hello.settings != self._settings:
            return "settings: given others than the leader's; start all machines of a group with the same options"
        with self._taking:
            if hello.rank not in self._free:
                return f"rank: given {hello.rank}, expected one of {sorted(self._free)}, which have not joined"
            self._free.remove(hello.rank)
        return ""
