from pathlib import Path

import pytest
from pagestream_worker.ladder.host_memory import host_share


def test_this_machine_uses_some() -> None:
    assert 0.0 < host_share() < 1.0


@pytest.mark.parametrize(
    ("limit", "used", "files", "share"),
    [
        ("max", 900, 0, 0.25),
        ("1000", 900, 0, 0.9),
        ("1000", 900, 300, 0.6),
        ("1000", 100, 0, 0.25),
        ("1000", None, 0, 0.25),
    ],
)
def test_the_fuller_of_machine_and_container(
    tmp_path: Path, limit: str, used: int | None, files: int, share: float
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  4000 kB\nMemFree:  100 kB\nMemAvailable:  3000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    if used is not None:
        (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {files // 3}\nactive_file {files - files // 3}\n")
    assert host_share(tmp_path, tmp_path) == pytest.approx(share)


def test_a_system_without_such_files_is_never_short(tmp_path: Path) -> None:
    assert host_share(tmp_path, tmp_path) == 0.0
