"""The steps of the protocol: Lua scripts beside this file, one for each step, and the names they are run by.

A script's header states its keys, arguments and reply, and why a retry is harmless.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, partial
from importlib import resources


@dataclass(frozen=True)
class Script:
    """A script's text, with the shared helpers of prelude.lua before it."""

    name: str
    text: str
    repeat: bool = True
    """Whether it is run again after a lost connection."""
    num_arguments: int | None = None
    """Of a script that is for many partitions, see `connection.py`: their prefixes follow. None for others."""

    @cached_property
    def sha(self) -> str:
        """SHA-1 of the text, by which Redis caches it."""
        return hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


_FOR_MANY = """
local function step()
{step}
end
return on_each_partition({first}, step)
"""


def load_script(
    package: str, name: str, *, repeat: bool = True, num_arguments: int | None = None, helpers: str = ""
) -> Script:
    """Load a script from a package's folder `scripts`. With `num_arguments` of its own, it is for many partitions.

    `helpers`: name of further shared helpers, between prelude.lua and the script.
    """
    folder = resources.files(package) / "scripts"
    step = "".join((folder / f"{each}.lua").read_text() for each in (helpers, name) if each)
    if num_arguments is not None:
        step = _FOR_MANY.format(first=num_arguments + 1, step=step)
    prelude = resources.files("pagestream_streams") / "scripts" / "prelude.lua"
    return Script(name, prelude.read_text() + step, repeat, num_arguments)


_load = partial(load_script, "pagestream_streams")

ACCEPT = _load("accept")
ENLIST = _load("enlist")
DELIST = _load("delist")
CLAIM = _load("claim", repeat=False)  # a second run would claim more
APPEND = _load("append")
END = _load("end")
DISCARD = _load("discard")
HAND_BACK = _load("hand_back")
HEARTBEAT = _load("heartbeat", num_arguments=12)
ISOLATE = _load("isolate")
LEAVE = _load("leave")
MARK = _load("mark")
GATEWAY_HEARTBEAT = _load("gateway_heartbeat", num_arguments=2)
REGISTER = _load("register")
UNREGISTER = _load("unregister")
POLL = _load("poll")
VIEW = _load("view")
OUTLINE = _load("outline")
SWEEP = _load("sweep", num_arguments=8)
EXPIRE = _load("expire")
REVIVE = _load("revive")
RESERVE = _load("reserve")
RELEASE = _load("release")
FREE_KEY = _load("free_key")
REGISTRY = _load("registry")
ROSTER = _load("roster")
QUEUE = _load("queue")
FORGET = _load("forget")
FORGET_MODEL = _load("forget_model")
AMEND_MODEL = _load("amend_model")
RESERVE_LOG = _load("reserve_log")
SETTLE_LOGS = _load("settle_logs")
LOG_SIZES = _load("log_sizes")
ADMIT = _load("limits/admit", helpers="limits/helpers")
NOTE_STATES = _load("limits/note", helpers="limits/helpers")
FOLD_USAGE = _load("limits/fold", helpers="limits/helpers")
TAKE_ENDS = _load("limits/ends")
REQUEST_STATES = _load("limits/states")
