"""How much of the host's memory is in use: the machine's, or this container's where that is fuller."""

from __future__ import annotations

from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def host_share(proc: Path = PROC, cgroup: Path = CGROUP) -> float:
    """Return used / all, in [0, 1]; 0 where the system says nothing of it.

    What the kernel can take back at once, the cache of files above all, is not in use.

    Args:
        proc: with `meminfo`.
        cgroup: of version 2, with `memory.max`, `memory.current` and `memory.stat`; without a limit it does not count.
    """
    return max(_machine_share(proc / "meminfo"), _container_share(cgroup))


def _machine_share(meminfo: Path) -> float:
    fields = _fields(meminfo)
    total, available = fields.get("MemTotal:"), fields.get("MemAvailable:")
    return 0.0 if not total or available is None else 1.0 - available / total


def _container_share(cgroup: Path) -> float:
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if not limit or used is None:
        return 0.0
    fields = _fields(cgroup / "memory.stat")
    files = fields.get("active_file", 0) + fields.get("inactive_file", 0)
    return max(0, used - files) / limit


def _fields(path: Path) -> dict[str, int]:
    """Return the first number of each line by the line's first word; {} where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _number(path: Path) -> int | None:
    """Return the number of a one-line file; None where there is none, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
