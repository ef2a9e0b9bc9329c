"""How much memory the cache may take."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pagestream_engine.runner import memory


def _machine(folder: Path, available_kib: int | None, limit: str | None = None, used: int = 0) -> tuple[Path, Path]:
    meminfo, cgroup = folder / "meminfo", folder / "cgroup"
    cgroup.mkdir()
    if available_kib is not None:
        meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    if limit is not None:
        (cgroup / "memory.max").write_text(limit + "\n")
        (cgroup / "memory.current").write_text(f"{used}\n")
    return meminfo, cgroup


@pytest.mark.parametrize(
    ("available_kib", "limit", "used", "expected"),
    [
        (1000, None, 0, 1000 * 1024),
        (1000, "max", 5, 1000 * 1024),
        (1000, "500000", 100000, 400000),
        (1000, "100", 200, 0),
        (None, None, 0, 4 << 30),
    ],
)
def test_available_is_the_lesser_of_machine_and_container(
    tmp_path: Path, available_kib: int | None, limit: str | None, used: int, expected: int
) -> None:
    assert memory.available_bytes(*_machine(tmp_path, available_kib, limit, used)) == expected


def test_a_cpu_gives_a_bounded_share() -> None:
    given = memory.cache_bytes(torch.device("cpu"), 0.9)
    assert 0 < given <= memory.CPU_LIMIT_BYTES
    assert given <= memory.available_bytes()
