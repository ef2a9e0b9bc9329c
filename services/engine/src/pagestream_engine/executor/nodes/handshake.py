"""How a rank elsewhere joins a group: both sides prove that they know the group's secret, and never send it.

The leader sends its group's generation and a random challenge. The rank answers with what it is and a challenge of its
own, proven by an HMAC of all of it. The leader's answer is proven likewise. Both then derive the keys of this
connection alone from the challenges: what was recorded of another connection, or of an earlier generation, proves
nothing.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pagestream_engine.errors import ConfigError, NodeProtocolError, NodeRefused
from pagestream_engine.executor.nodes.link import LinkKeys

PROTOCOL = 2
HANDSHAKE_LIMIT_S = 5.0
MIN_SECRET_BYTES = 16
_MAX_BYTES = 4096
_LENGTH = struct.Struct(">I")


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
    if size > _MAX_BYTES:
        raise NodeProtocolError(f"a greeting of {size} bytes, expected at most {_MAX_BYTES}")
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
