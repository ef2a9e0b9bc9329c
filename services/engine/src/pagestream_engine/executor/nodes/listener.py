"""The leader's open port, while its group forms: who connects and proves the secret gets the place of its rank."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from pagestream_engine.config import ParallelConfig
from pagestream_engine.errors import ConfigError, NodeProtocolError
from pagestream_engine.executor.nodes.handshake import Admission, Hello, Leader, read_secret
from pagestream_engine.executor.nodes.link import LinkKeys

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
