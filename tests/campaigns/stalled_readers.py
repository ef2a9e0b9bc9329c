"""Clients of a gateway process that ask for a stream and stop reading it, and what the process has taken."""

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

from campaigns.bulk_engine import MODEL, token_text
from support.processes.stack import Gateway


def peak_mib(gateway: Gateway) -> float:
    """Return the most resident memory that the process has had."""
    if gateway.process is None:
        raise RuntimeError("the gateway is not running")
    status = Path(f"/proc/{gateway.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


class StalledReader:
    """Asks for a stream, reads its header, and stops reading until `rest`."""

    def __init__(self, gateway: Gateway, number: int, tokens: int) -> None:
        self._gateway = gateway
        self._is_chat = number % 2 == 0
        self._tokens = tokens
        self._socket = socket.socket()

    async def open(self) -> None:
        """Send the request, and read until it is accepted."""
        loop = asyncio.get_running_loop()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        self._socket.setblocking(False)
        await loop.sock_connect(self._socket, ("127.0.0.1", self._gateway.http_port))
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        if self._is_chat:
            asked |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
        else:
            asked |= {"prompt": "x", "logprobs": 20}
        path, body = "/v1/chat/completions" if self._is_chat else "/v1/completions", json.dumps(asked)
        head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        await loop.sock_sendall(self._socket, (head + body).encode())
        received = b""
        while not received.endswith(b"\r\n\r\n"):
            part = await loop.sock_recv(self._socket, 1)
            if not part:
                raise RuntimeError(f"refused: {received!r}")
            received += part
        if b" 200 " not in received:
            raise RuntimeError(f"refused: {received!r}")

    async def rest(self) -> None:
        """Read to the end, and compare. RuntimeError where a token is missing, repeated or out of order."""
        loop, received = asyncio.get_running_loop(), b""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        while part := await loop.sock_recv(self._socket, 1 << 20):
            received += part
        text, num_logprobs = "", 0
        for event in received.split(b"\n\n"):
            data = event.partition(b"data: ")[2]
            for choice in json.loads(data)["choices"] if data.startswith(b"{") else ():
                text += choice["delta"].get("content", "") if self._is_chat else choice["text"]
                found = choice["logprobs"] or {}
                num_logprobs += len(found.get("content" if self._is_chat else "tokens", ()))
        if text != "".join(map(token_text, range(self._tokens))) or num_logprobs != self._tokens:
            raise RuntimeError(f"{len(text)} characters with {num_logprobs} log probabilities differ from the log")

    def close(self) -> None:
        """Leave."""
        self._socket.close()
