"""The Lua scripts of `lua/`: one file for each step of the protocol.

A script's header states its keys, arguments and reply, and why a retry is harmless.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from importlib import resources


@dataclass(frozen=True)
class Script:
    """A script's text, with the shared helpers of prelude.lua before it."""

    name: str
    text: str
    repeat: bool = True
    """Whether it is run again after a lost connection."""

    @cached_property
    def sha(self) -> str:
        """SHA-1 of the text, by which Redis caches it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


def _load(name: str, *, repeat: bool = True) -> Script:
    folder = resources.files("pagestream_streams") / "lua"
    text = (folder / "prelude.lua").read_text() + (folder / f"{name}.lua").read_text()
    return Script(name, text, repeat)


ACCEPT = _load("accept")
ENLIST = _load("enlist")
CLAIM = _load("claim", repeat=False)  # a second run would claim more
APPEND = _load("append")
END = _load("end")
HAND_BACK = _load("hand_back")
HEARTBEAT = _load("heartbeat")
LEAVE = _load("leave")
MARK = _load("mark")
GATEWAY_HEARTBEAT = _load("gateway_heartbeat")
REGISTER = _load("register")
UNREGISTER = _load("unregister")
POLL = _load("poll")
VIEW = _load("view")
SWEEP = _load("sweep")
EXPIRE = _load("expire")
REVIVE = _load("revive")
RESERVE = _load("reserve")
RELEASE = _load("release")
REGISTRY = _load("registry")
QUEUE = _load("queue")
UNFINISHED = _load("unfinished")
FORGET = _load("forget")
RESERVE_LOG = _load("reserve_log")
SETTLE_LOGS = _load("settle_logs")
LOG_SIZES = _load("log_sizes")
