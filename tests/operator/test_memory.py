"""What the operator has freed goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from support.processes.waiting import LIMIT_S

_FREED = """
import asyncio
from pathlib import Path
from pagestream_operator.supervision import keep_memory_small

def resident_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024

async def main():
    freed = [bytes(4000) for _ in range(16_000)]
    stays = bytes(4000)
    freed.clear()
    before = resident_mib()
    stop = asyncio.Event()
    task = asyncio.create_task(keep_memory_small(stop, period_s=0.01))
    async with asyncio.timeout(100):
        while resident_mib() > before - 40:
            await asyncio.sleep(0.01)
    stop.set()
    await task
    print(len(stays))

asyncio.run(main())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_freed_memory_below_what_stays_goes_back_to_the_system() -> None:
    ended = subprocess.run([sys.executable, "-c", _FREED], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (0, "4000\n"), ended.stderr
