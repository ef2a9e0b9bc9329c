"""How long this process has been running."""

from __future__ import annotations

import os
import time
from pathlib import Path

_IMPORTED = time.monotonic()
_START_FIELD = 19  # of /proc/<pid>/stat, after the name in parentheses: start in clock ticks since boot


def process_age_s() -> float:
    """Seconds since the process was started; where the system doesn't tell, since this module was loaded."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, uptime - int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED
