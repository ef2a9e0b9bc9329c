"""One connection between a group's leader and a rank elsewhere: the handshake, then frames with a proof each, and
heartbeats.

Both sides prove that they know the group's secret, and never send it. The leader sends its group's generation and a
random challenge. The rank answers with what it is and a challenge of its own, proven by an HMAC of all of it. The
leader's answer is proven likewise. Both then derive the keys of this connection alone from the challenges: what was
recorded of another connection, or of an earlier generation, proves nothing. Each frame is proven by its number and
content.

`multiprocessing.connection` would be less code and guarantee less: its authkey is asked for once (by HMAC-MD5 before
Python 3.12) and proves no message after that, so that whoever is on the path can inject plans and change them; and a
greeting has no limit in time. `torch.distributed` lets in whoever reaches its port.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from pagestream_engine.errors import ConfigError, NodeProtocolError, NodeRefused

PROTOCOL = 2
HANDSHAKE_LIMIT_S = 5.0
MIN_SECRET_BYTES = 16
_MAX_GREETING_BYTES = 4096


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself."""

    rank: int
    size: int
    """Ranks of its group."""
    settings: str
    """Digest of the engine's settings, which all ranks have to share."""
    group: str = ""
    """Name of its group, where groups have names."""


@dataclass(frozen=True)
class Admission:
    """What a rank is told when it may join."""

    generation: str
    store_port: int
    """TCP port at the leader where the ranks' collectives meet."""


def read_secret(path: str) -> bytes:
    """Read a group's secret from its file.

    Raises:
        ConfigError: it can't be read, or is short enough to be guessed.
    """
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError("node_secret_file", path, f"a file that can be read ({error.strerror})") from error
    if len(secret) < MIN_SECRET_BYTES:
        expected = f"a file with at least {MIN_SECRET_BYTES} bytes"
        raise ConfigError(
            "node_secret_file", f"{len(secret)} bytes", expected, "write random ones: openssl rand -hex 32"
        )
    return secret


class Leader:
    """The leader's side of one connection: `greet`, then `admit` or `refuse`."""

    def __init__(self, end: socket.socket, secret: bytes, generation: str) -> None:
        self._end, self._secret, self._generation = end, secret, generation
        self._transcript = b""

    def greet(self) -> Hello:
        """Send a challenge, and wait for what the rank is.

        Raises:
            NodeProtocolError: it does not prove that it knows the secret, or speaks another protocol.
            OSError: the connection ended, or it did not answer in time.
        """
        self._end.settimeout(HANDSHAKE_LIMIT_S)
        challenge = {"protocol": PROTOCOL, "generation": self._generation, "challenge": os.urandom(16).hex()}
        sent = _send(self._end, challenge)
        received = _receive(self._end)
        answer = _read(received)
        self._transcript = sent + _unproven(answer)
        if not _is_proven(answer, _prove(self._secret, b"join", self._transcript)):
            raise NodeProtocolError("it does not know this group's secret")
        try:
            return Hello(int(answer["rank"]), int(answer["size"]), str(answer["settings"]), str(answer["group"]))
        except (KeyError, ValueError, TypeError) as error:
            raise NodeProtocolError(f"it does not say what it is: {error!r}") from error

    def admit(self, admission: Admission) -> LinkKeys:
        """Let the rank join; return the keys of the connection."""
        self._answer({"store_port": admission.store_port})
        return LinkKeys(
            sending=_key(self._secret, b"leader", self._transcript),
            receiving=_key(self._secret, b"rank", self._transcript),
        )

    def refuse(self, reason: str) -> None:
        """Send why it may not."""
        self._answer({"refused": reason})

    def _answer(self, answer: dict[str, Any]) -> None:
        proof = _prove(self._secret, b"answer", self._transcript + _body(answer))
        _send(self._end, {**answer, "proof": proof})


def join(end: socket.socket, secret: bytes, hello: Hello) -> tuple[Admission, LinkKeys]:
    """Do the rank's side of the handshake.

    Raises:
        NodeRefused: the leader says why it may not join, or does not know the secret.
        NodeProtocolError: the other side is no leader.
        OSError: the connection ended, or there was no answer in time.
    """
    end.settimeout(HANDSHAKE_LIMIT_S)
    received = _receive(end)
    challenge = _read(received)
    if challenge.get("protocol") != PROTOCOL:
        raise NodeRefused(f"the leader speaks protocol {challenge.get('protocol')!r:.20}, expected {PROTOCOL}")
    said = {**asdict(hello), "challenge": os.urandom(16).hex()}
    transcript = received + _body(said)
    _send(end, {**said, "proof": _prove(secret, b"join", transcript)})
    try:
        answer = _read(_receive(end))
    except EOFError as error:
        raise NodeRefused("the leader has closed the connection: expected the leader's secret") from error
    if not _is_proven(answer, _prove(secret, b"answer", transcript + _unproven(answer))):
        raise NodeRefused("the leader does not know this group's secret")
    if "refused" in answer:
        raise NodeRefused(str(answer["refused"]))
    keys = LinkKeys(sending=_key(secret, b"rank", transcript), receiving=_key(secret, b"leader", transcript))
    return Admission(str(challenge["generation"]), int(answer["store_port"])), keys


def _prove(secret: bytes, purpose: bytes, transcript: bytes) -> str:
    return hmac.digest(secret, purpose + b"\0" + transcript, "sha256").hex()


def _is_proven(content: dict[str, Any], expected: str) -> bool:
    return hmac.compare_digest(str(content.get("proof")).encode(), expected.encode())


def _key(secret: bytes, sender: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"key of " + sender + b"\0" + transcript, "sha256")


def _body(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _unproven(content: dict[str, Any]) -> bytes:
    return _body({name: value for name, value in content.items() if name != "proof"})


def _send(end: socket.socket, content: dict[str, Any]) -> bytes:
    body = _body(content)
    end.sendall(_LENGTH.pack(len(body)) + body)
    return body


def _receive(end: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    if size > _MAX_GREETING_BYTES:
        raise NodeProtocolError(f"a greeting of {size} bytes, expected at most {_MAX_GREETING_BYTES}")
    return _exactly(end, size)


def _exactly(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            raise EOFError("the connection ended")
        data += part
    return data


def _read(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except ValueError as error:
        raise NodeProtocolError(f"a greeting that is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise NodeProtocolError("a greeting that is no JSON object")
    return content


BEAT_S = 0.2
SILENCE_LIMIT_S = 5.0
"""Without a byte from the other side, while the group serves. On a machine with too much to do, processes that only
send heartbeats have waited for a processor for more than 1.5 s, and a group that ends has to load its model again."""
LOADING_LIMIT_S = 30.0
"""The same until it does: a process that imports or compiles may hold its interpreter's lock for seconds."""
MAX_BYTES = 1 << 28
"""Of a frame: more than the plan of any step."""
_LENGTH = struct.Struct(">I")
_COUNT = struct.Struct(">Q")
_PROOF_BYTES = 32
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET}
_BEAT, _MESSAGE, _SERVING, _END = b"B", b"M", b"S", b"E"


@dataclass(frozen=True)
class LinkKeys:
    """Keys of one connection, which no other connection has."""

    sending: bytes
    receiving: bytes


class Link:
    """Sends and receives from two threads of its own, from `start` until either side ends it.

    Each frame is proven by HMAC-SHA256 over its number and content: what another process injects, repeats or leaves out
    ends the link.

    Args:
        end: connected, after the handshake.
        on_message: called with each message's bytes, on the reading thread; what it raises ends the link.
        on_beat: called with the count that each heartbeat brings, likewise.
        on_end: called once with the reason, on whatever thread finds it; empty: the other side has ended it orderly.
        count: returns the number that a heartbeat brings.
    """

    def __init__(
        self,
        end: socket.socket,
        keys: LinkKeys,
        *,
        on_message: Callable[[bytes], None],
        on_end: Callable[[str], None],
        on_beat: Callable[[int], None] = lambda _: None,
        count: Callable[[], int] = lambda: 0,
    ) -> None:
        self._socket, self._keys = end, keys
        self._on_message, self._on_beat, self._on_end, self._count = on_message, on_beat, on_end, count
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()
        self._ending = threading.Lock()
        self._is_over = threading.Event()
        self._heard_at = monotonic()
        self.is_cut_off = False
        """Whether it ended because nothing came any more. A process that dies has its connection closed instead."""
        self._reader = threading.Thread(target=self._receive, name="rank's link", daemon=True)
        self._limit(LOADING_LIMIT_S)

    def start(self) -> None:
        """Begin to read, and to send heartbeats."""
        self._reader.start()
        threading.Thread(target=self._beat, name="rank's heartbeats", daemon=True).start()

    def send(self, message: bytes | bytearray) -> None:
        """Send a message.

        Raises:
            OSError: the link is over, or takes nothing for its limit; or the message is too large.
        """
        self._send(_MESSAGE, message)

    @property
    def silence_s(self) -> float:
        """Seconds since the last byte from the other side."""
        return monotonic() - self._heard_at

    def note_loaded(self) -> None:
        """Note that the group serves, on both sides: silence has the shorter limit from now on."""
        self._limit(SILENCE_LIMIT_S)
        self._send(_SERVING)

    def close(self, reason: str | None = None) -> None:
        """End the link. `on_end` is not called for it.

        Args:
            reason: for the other side; empty: an orderly end. None: the connection just ends.
        """
        with self._ending:
            was_over = self._is_over.is_set()
            self._is_over.set()
        if reason is not None and not was_over:
            with suppress(OSError):
                self._transmit(_END, reason.encode())
                self._socket.shutdown(socket.SHUT_WR)
                # What is unread when a socket closes resets the connection, which may cost the other side the end.
                self._reader.join(BEAT_S * 5)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _limit(self, seconds: float) -> None:
        self._socket.settimeout(seconds)
        self._limit_s = seconds

    def _send(self, kind: bytes, content: bytes | bytearray = b"") -> None:
        if self._is_over.is_set():
            raise ConnectionResetError("the link is over")
        self._transmit(kind, content)

    def _transmit(self, kind: bytes, content: bytes | bytearray = b"") -> None:
        body = kind + content
        if len(body) > MAX_BYTES:
            raise OSError(errno.EMSGSIZE, f"a frame of {len(body)} bytes, expected at most {MAX_BYTES}")
        with self._sending:
            proof = self._proof(self._keys.sending, self._num_sent, body)
            self._num_sent += 1
            self._socket.sendall(b"".join((_LENGTH.pack(len(body)), proof, body)))

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            try:
                self._send(_BEAT, _COUNT.pack(self._count()))
            except OSError as error:
                self._end(f"takes no heartbeats: {error}", is_cut_off=error.errno in _UNREACHABLE)

    def _receive(self) -> None:
        try:
            while True:
                self._take(self._frame())
        except TimeoutError:
            self._end(f"sent nothing for {self._limit_s:g} s", is_cut_off=True)
        except _Ended as end:
            self._end(str(end))
        except (EOFError, OSError, NodeProtocolError) as error:
            is_cut_off = isinstance(error, OSError) and error.errno in _UNREACHABLE
            reason = f"lost its connection: {error}" if str(error) else "closed its connection"
            self._end(reason, is_cut_off=is_cut_off)
        except Exception as error:
            self._end(f"sent what can't be used: {type(error).__name__}: {error}")
            raise

    def _frame(self) -> bytes:
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if not 0 < size <= MAX_BYTES:
            raise NodeProtocolError(f"a frame of {size} bytes, expected 1 to {MAX_BYTES}")
        proof, body = self._read(_PROOF_BYTES), self._read(size)
        if not hmac.compare_digest(proof, self._proof(self._keys.receiving, self._num_received, body)):
            raise NodeProtocolError("a frame without a valid proof")
        self._num_received += 1
        return body

    def _take(self, body: bytes) -> None:
        kind, content = body[:1], body[1:]
        if kind == _BEAT:
            self._on_beat(_COUNT.unpack(content)[0])
        elif kind == _SERVING:
            self._limit(SILENCE_LIMIT_S)
        elif kind == _END:
            raise _Ended(content.decode(errors="replace"))
        else:
            self._on_message(content)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            num_read = self._socket.recv_into(view)
            if not num_read:
                raise EOFError
            self._heard_at = monotonic()
            view = view[num_read:]
        return bytes(data)

    def _end(self, reason: str, *, is_cut_off: bool = False) -> None:
        with self._ending:
            if self._is_over.is_set():
                return
            self.is_cut_off = is_cut_off
            self._is_over.set()
        self.close()
        self._on_end(reason)

    @staticmethod
    def _proof(key: bytes, number: int, body: bytes) -> bytes:
        digest = hmac.new(key, _COUNT.pack(number), "sha256")
        digest.update(body)
        return digest.digest()


class _Ended(Exception):  # noqa: N818 - reads as what happened
    """The other side has ended the link, for this reason."""
