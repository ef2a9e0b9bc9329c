"""A group of ranks on two machines: the same tokens as one process, and each way in which a machine can fail."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from fcntl import ioctl
from multiprocessing import active_children
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
from pagestream_engine import (
    ConfigError,
    Engine,
    EngineConfig,
    NodeRefused,
    NodesMissing,
    RankLost,
    ReasoningMarks,
    SamplingParams,
    StructuredOutputsParams,
)
from pagestream_engine.executor.nodes.follower import run_node
from pagestream_engine.executor.nodes.forming import RankListener
from pagestream_engine.executor.nodes.link import MAX_BYTES, Hello, Link, LinkKeys, join
from pagestream_engine.wire.codec import Codec
from support.engines.arithmetic_model import make_folder, undisturbed
from support.engines.faulty_runners import FACTS, FaultyRunner
from support.engines.nodes import TESTS, node_options, start_follower
from support.processes.waiting import LIMIT_S, children_of, is_running, wait_until

pytestmark = pytest.mark.served
PROMPTS = [[number, *range(1, 9)] for number in range(5)]
POOL = {"block_size": 4, "num_gpu_blocks_override": 24, "max_num_seqs": 8, "max_num_batched_tokens": 16}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    make_folder(tmp_path)
    return node_options(tmp_path, **POOL)


class Follower:
    """The process of machine 1, which is started anew as Kubernetes would."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._folder, self._options = folder, options
        self.start()

    def start(self) -> None:
        self.process = start_follower(self._folder, self._options)

    @property
    def ranks(self) -> list[int]:
        return [
            pid for pid in children_of(self.process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def end(self) -> str:
        """Wait for the end by an error; return what it has written."""
        _, written = self.process.communicate(timeout=LIMIT_S)
        assert self.process.returncode != 0
        return written

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def follower(tmp_path: Path, options: dict[str, Any]) -> Iterator[Follower]:
    follower = Follower(tmp_path, options)
    yield follower
    follower.kill()


def params(number: int) -> SamplingParams:
    return SamplingParams(seed=number, max_tokens=12, logit_bias={3: 0.5}, stop_token_ids=[30])


def run(engine: Engine, tokens: dict[str, list[int]], num_steps: int = 1000) -> None:
    """Step, at most so often; add to `tokens`."""
    for _ in range(num_steps):
        if not engine.has_unfinished_requests():
            return
        for output in engine.step():
            assert output.token_id is not None
            tokens[output.seq_id].append(output.token_id)


def test_lost_machines_end_the_group_and_requests_go_on_with_the_next_generation(
    tmp_path: Path, options: dict[str, Any], follower: Follower
) -> None:
    engine = Engine(tmp_path, EngineConfig.from_options(options), make_runner=FaultyRunner)
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params(number))
    for fault in ("killed", "its rank killed", "stopped"):
        run(engine, tokens, 3)
        assert engine.has_unfinished_requests()
        local = active_children()
        assert len(local) == 1, "one rank is this machine's, the other one the follower's"
        ranks, process = follower.ranks, follower.process
        if fault == "its rank killed":
            subprocess.run(["kill", "-KILL", str(ranks[0])], check=True)
        else:
            process.send_signal(signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        reason = r"rank 1 of 2 (closed|lost|was killed|sent nothing|takes no|made no)"
        with pytest.raises(RankLost, match=reason) as lost:
            run(engine, tokens)
        assert lost.value.is_link_lost == (fault == "stopped"), "what a request can cause is a death"
        assert [rank.exitcode for rank in local] == [-signal.SIGKILL]
        process.send_signal(signal.SIGCONT)
        follower.end()
        wait_until(lambda pids=ranks: not any(map(is_running, pids)), "the machine's ranks to end")  # type: ignore[misc]
        follower.start()
        engine.restart_executor()
    run(engine, tokens)
    length = engine.max_model_len
    assert tokens == {str(n): undisturbed(p, params(n), FACTS, length, seed=n) for n, p in enumerate(PROMPTS)}
    engine.check_invariants()
    engine.close()
    assert follower.process.wait(LIMIT_S) == 0, "the leader has ended the group orderly"


LEADER = """
import json, sys, time
from pathlib import Path
from pagestream_engine import Engine, EngineConfig
from support.engines.faulty_runners import FaultyRunner
if __name__ == "__main__":
    engine = Engine(Path(sys.argv[1]), EngineConfig.from_options(json.loads(sys.argv[2])), make_runner=FaultyRunner)
    print("loaded", flush=True)
    time.sleep(3600)
"""


def test_a_machine_ends_with_the_leader(tmp_path: Path, options: dict[str, Any], follower: Follower) -> None:
    program = tmp_path / "leader.py"
    program.write_text(LEADER)
    command = [sys.executable, str(program), str(tmp_path), json.dumps(options)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as leader:
        assert leader.stdout is not None
        assert leader.stdout.readline() == "loaded\n"
        ranks = follower.ranks
        assert len(ranks) == 1
        leader.kill()
    assert re.search("the leader (closed|lost) its connection", follower.end())
    wait_until(lambda: not any(map(is_running, ranks)), "the ranks to end")


@pytest.fixture
def listener(options: dict[str, Any]) -> Iterator[RankListener]:
    parallel = EngineConfig.from_options(options).parallel
    listener = RankListener(parallel, [1], "the leader's", store_port=1)
    yield listener
    listener.close()


def test_a_machine_without_the_secret_is_refused(
    tmp_path: Path, options: dict[str, Any], listener: RankListener
) -> None:
    other = tmp_path / "other"
    other.write_text("f" * 32)
    config = EngineConfig.from_options({**options, "node_rank": 1, "node_secret_file": str(other)})
    with pytest.raises(NodeRefused, match="expected the leader's secret"):
        run_node(tmp_path, config, FaultyRunner)
    assert listener.missing == [1]


def test_a_machine_with_other_options_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], listener: RankListener
) -> None:
    with pytest.raises(NodeRefused, match="settings: given others than the leader's"):
        run_node(tmp_path, EngineConfig.from_options({**options, "node_rank": 1}), FaultyRunner)
    assert listener.missing == [1]


def test_a_machine_of_another_group_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], listener: RankListener
) -> None:
    """Groups of one pool share a secret, and may have had each other's addresses."""
    with pytest.raises(NodeRefused, match="node_group: given 'another', expected ''"):
        run_node(tmp_path, EngineConfig.from_options({**options, "node_rank": 1, "node_group": "another"}))
    assert listener.missing == [1]


SECRET = b"0123456789abcdef" * 2
HELLO = Hello(1, 2, "the leader's")


def test_what_was_recorded_of_a_rank_proves_nothing_to_the_next_generation(
    options: dict[str, Any], listener: RankListener
) -> None:
    """A rank joins through a proxy that keeps what it sends; a process without the secret then repeats it."""
    address = ("127.0.0.1", options["master_port"])
    recorded = bytearray()
    near, far = socket.socketpair()
    with socket.create_connection(address) as leader, near, far:

        def relay(source: socket.socket, target: socket.socket, record: bytearray) -> None:
            with suppress(OSError):  # the other direction may have closed both
                while part := source.recv(4096):
                    record += part
                    target.sendall(part)

        for arguments in ((leader, far, bytearray()), (far, leader, recorded)):
            threading.Thread(target=relay, args=arguments, daemon=True).start()
        join(near, SECRET, HELLO)
        joined = listener.take(30)
        assert joined is not None
        joined.end.close()
        near.shutdown(socket.SHUT_RDWR)
    listener.close()
    following = RankListener(EngineConfig.from_options(options).parallel, [1], "the leader's", store_port=1)
    try:
        with socket.create_connection(address, 30) as again:
            again.recv(4096)
            again.sendall(recorded)
            with suppress(ConnectionResetError):  # where it closes before it has read all of this
                assert again.recv(4096) == b"", "closed without an answer"
        assert following.missing == [1]
        with socket.create_connection(address, 30) as right:
            join(right, SECRET, HELLO)
        with socket.create_connection(address, 30) as twice, pytest.raises(NodeRefused, match="rank: given 1"):
            join(twice, SECRET, HELLO)
    finally:
        following.close()


def test_a_rank_that_joins_as_the_port_closes_is_let_go(options: dict[str, Any], listener: RankListener) -> None:
    with socket.create_connection(("127.0.0.1", options["master_port"]), 30) as rank:
        assert rank.recv(1, socket.MSG_PEEK), "it is being greeted"
        listener.close()
        join(rank, SECRET, HELLO)
        assert rank.recv(1) == b""


def test_a_message_that_the_other_side_would_refuse_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagestream_engine.executor.nodes.link.MAX_BYTES", 8)
    near, end = socket.socketpair()
    with near, end:
        sender = Link(near, LinkKeys(b"a", b"b"), on_message=lambda _: None, on_end=lambda _: None)
        with pytest.raises(OSError, match="a frame of 9 bytes, expected at most 8"):
            sender.send(b"12345678")
        sender.send(b"1234567")


@pytest.mark.parametrize("size", [0, MAX_BYTES + 1])
def test_a_frame_of_no_possible_size_ends_the_link(size: int) -> None:
    tap, end = socket.socketpair()
    received: list[bytes] = []
    reasons: SimpleQueue[str] = SimpleQueue()
    receiver = Link(end, LinkKeys(b"b", b"a"), on_message=received.append, on_end=reasons.put)
    receiver.start()
    with tap:
        tap.sendall(size.to_bytes(4, "big") + bytes(100))
        assert (
            reasons.get(timeout=LIMIT_S) == f"lost its connection: a frame of {size} bytes, expected 1 to {MAX_BYTES}"
        )
    assert not received


def test_messages_are_read_however_they_are_cut() -> None:
    near, far = socket.socketpair()
    tap, end = socket.socketpair()
    received: list[bytes] = []
    sender = Link(near, LinkKeys(b"a", b"b"), on_message=received.append, on_end=lambda _: None)
    receiver = Link(end, LinkKeys(b"b", b"a"), on_message=received.append, on_end=lambda _: None)
    receiver.start()
    sent, sizes = [b"", b"plan", bytes(range(256)), b"x"], Random(0)
    for message in sent:
        sender.send(message)
    stream = far.recv(1 << 16)
    while stream:
        size = sizes.randint(1, 50)
        tap.sendall(stream[:size])
        stream = stream[size:]
        wait_until(lambda: not ioctl(tap, termios.TIOCOUTQ, bytes(4)).strip(b"\0"), "this piece to be received")
    wait_until(lambda: len(received) == len(sent), "all messages")
    assert received == sent
    for each in (sender, receiver, far, tap):
        each.close()


def test_an_injected_frame_ends_the_link() -> None:
    """Each frame is proven by its number, too: one that is repeated is refused as one that is made up."""
    near, far = socket.socketpair(socket.AF_UNIX)
    tap, end = socket.socketpair(socket.AF_UNIX)
    received: list[bytes] = []
    reasons: SimpleQueue[str] = SimpleQueue()
    sender = Link(near, LinkKeys(b"a", b"b"), on_message=received.append, on_end=lambda _: None)
    receiver = Link(end, LinkKeys(b"b", b"a"), on_message=received.append, on_end=reasons.put)
    receiver.start()
    sender.send(b"plan")
    frame = far.recv(4096)
    tap.sendall(frame)
    wait_until(lambda: received == [b"plan"], "the message")
    tap.sendall(frame)
    assert reasons.get(timeout=LIMIT_S) == "lost its connection: a frame without a valid proof"
    assert received == [b"plan"]
    for each in (sender, receiver):
        each.close()
    far.close()
    tap.close()


def test_a_leader_and_a_machine_alone_give_up(tmp_path: Path, options: dict[str, Any]) -> None:
    alone = {**options, "node_join_timeout_s": 0.1}
    with pytest.raises(NodesMissing, match=r"ranks \[1\] have not joined within 0.1 s"):
        Engine(tmp_path, EngineConfig.from_options(alone), make_runner=FaultyRunner)
    assert not active_children()
    with pytest.raises(NodesMissing, match=r"no leader has answered at 127\.0\.0\.1"):
        run_node(tmp_path, EngineConfig.from_options({**alone, "node_rank": 1}), FaultyRunner)
    Path(options["node_secret_file"]).write_text("short")
    with pytest.raises(ConfigError, match="at least 16 bytes"):
        Engine(tmp_path, EngineConfig.from_options(options), make_runner=FaultyRunner)


def test_a_constraint_arrives_with_its_marks_of_reasoning() -> None:
    marks = ReasoningMarks(end=[8], openings=[[7], [9, 7]])
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}, reasoning=marks))
    codec = Codec(SamplingParams)
    assert codec.decode(codec.encode(params)) == params
