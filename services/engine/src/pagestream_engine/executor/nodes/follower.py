"""The ranks of a machine that is not the leader's: they join, compute what they are sent, and end with the group."""

from __future__ import annotations

import logging
import multiprocessing
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from queue import SimpleQueue
from time import monotonic, sleep

from pagestream_engine.config import EngineConfig
from pagestream_engine.errors import ConfigError, NodeRefused, NodesMissing
from pagestream_engine.executor.base import RunnerFactory, make_model_runner
from pagestream_engine.executor.nodes.forming import interface_of, ranks_on, settings_digest
from pagestream_engine.executor.nodes.link import Admission, Hello, Link, LinkKeys, join, read_secret
from pagestream_engine.executor.nodes.remote_rank import Wakeup
from pagestream_engine.executor.rank_process import RankProcess
from pagestream_engine.models.folder import resolve_model
from pagestream_engine.parallel.rank import OwnRank, Progress
from pagestream_engine.wire.executor import ANSWERS, PLANS

_log = logging.getLogger(__name__)

_RETRY_S = 0.3
_CONNECT_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 5.0


def run_node(
    model: str | Path,
    config: EngineConfig,
    make_runner: RunnerFactory = make_model_runner,
    on_joined: Callable[[], None] = lambda: None,
) -> str:
    """Join the group of machine 0 with this machine's ranks, and compute until the group ends.

    A process joins one group once: the next generation of the group is for the next process.

    Args:
        model: a model folder, or the name of a Hugging Face repository: the leader's.
        config: settings: the leader's, with this machine's `node_rank` of at least 1.
        make_runner: loads a rank's part of the model.
        on_joined: called when the leader has taken this machine's ranks.

    Returns:
        Why it ended; empty where the leader has ended the group orderly.

    Raises:
        ConfigError: the settings are not those of such a machine.
        NodeRefused: the leader refuses this machine's ranks, or is none.
        NodesMissing: there was no leader within `node_join_timeout_s`.
    """
    options = config.parallel
    if options.nnodes == 1 or options.node_rank == 0:
        raise ConfigError(
            "node_rank", options.node_rank, "at least 1, and below nnodes, to join another machine's group"
        )
    secret = read_secret(str(options.node_secret_file))
    folder = resolve_model(model)
    until = monotonic() + options.node_join_timeout_s
    shared = Path(tempfile.mkdtemp(prefix="pagestream-ranks-"))
    node = _Node(Progress(shared, options.num_ranks, create=True))
    try:
        for own in ranks_on(config, shared):
            hello = Hello(own.index, own.size, settings_digest(config), options.node_group)
            end, admission, keys = _join(options.master_addr, options.master_port, secret, hello, until)
            host, here = end.getpeername()[0], end.getsockname()[0]
            met = replace(own, store=f"tcp://{_shown(host)}:{admission.store_port}", interface=interface_of(here))
            node.add(met, partial(_start, make_runner, folder, config, met), end, keys)
        on_joined()
        return node.run()
    finally:
        node.end()
        shutil.rmtree(shared, ignore_errors=True)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _join(host: str, port: int, secret: bytes, hello: Hello, until: float) -> tuple[socket.socket, Admission, LinkKeys]:
    """Connect to the leader, which may not be there yet, and join."""
    while True:
        try:
            end = socket.create_connection((host, port), _CONNECT_LIMIT_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                return end, *join(end, secret, hello)
            except BaseException:
                end.close()
                raise
        except NodeRefused:
            raise
        except (OSError, EOFError) as error:
            if monotonic() > until:
                raise NodesMissing(f"no leader has answered at {_shown(host)}:{port}: {error}") from error
        sleep(_RETRY_S)


def _start(make_runner: RunnerFactory, folder: Path, config: EngineConfig, own: OwnRank) -> RankProcess:
    context = multiprocessing.get_context("spawn")
    return RankProcess(context, make_runner, folder, replace(config, rank=own))


class _Node:
    """This machine's ranks, each with its connection to the leader. What ends one ends all."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._members: list[tuple[RankProcess, Link]] = []
        self._wakeup = Wakeup()
        self._ends: SimpleQueue[str] = SimpleQueue()

    def add(self, own: OwnRank, start: partial[RankProcess], end: socket.socket, keys: LinkKeys) -> None:
        """Start a rank that has joined."""
        process = start()
        link = Link(
            end,
            keys,
            on_message=partial(_relay, process),
            on_end=self._note_end,
            count=partial(self._progress.count, own.index),
        )
        self._members.append((process, link))
        link.start()

    def run(self) -> str:
        """Send the leader what the ranks answer, until the group ends; return why, empty for an orderly end."""
        by_connection = {process.connection: (process, link) for process, link in self._members}
        while True:
            sentinels = [process.sentinel for process, _ in self._members]
            ready = wait([self._wakeup.end, *by_connection, *sentinels])
            if not self._ends.empty():
                return self._ends.get()
            for connection, (process, link) in by_connection.items():
                if connection in ready:
                    try:
                        process.receive()
                    except (EOFError, OSError):
                        process.join(_CLOSE_LIMIT_S)
                    self._forward(process, link)
            for process, link in self._members:
                if process.end_reason:
                    link.close(process.end_reason)
                    return f"rank {process.rank} {process.end_reason}"

    def end(self) -> None:
        """Kill the ranks, and end the connections."""
        for process, link in self._members:
            process.kill()
            link.close()
        for process, _ in self._members:
            process.end()
        self._wakeup.close()

    def _forward(self, process: RankProcess, link: Link) -> None:
        try:
            while process.answers:
                link.send(ANSWERS.encode(process.answers.popleft()))
            while process.prepared:
                link.send(ANSWERS.encode(process.prepared.pop(0)))
        except OSError as error:
            self._note_end(f"the leader takes no answers: {error}")

    def _note_end(self, reason: str) -> None:
        self._ends.put(reason and f"the leader {reason}")
        self._wakeup.set()


def _relay(process: RankProcess, body: bytes) -> None:
    """Give a rank what the leader has sent; MessageError where that is none of its messages."""
    PLANS.decode(body)
    process.connection.send_bytes(body)
