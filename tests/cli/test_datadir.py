import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pagestream_cli import DataDir, DataDirBusyError, DataDirError, DataDirLock, default_data_dir
from support.processes.waiting import LIMIT_S

HOLDER = """
import signal, sys
from pagestream_cli.datadir import DataDir, DataDirLock
with DataDirLock(DataDir.at(sys.argv[1])):
    print("held", flush=True)
    signal.pause()
"""


def test_the_default_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / "pagestream"
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".local" / "share" / "pagestream"


def test_the_folders_belong_to_their_owner_alone(tmp_path: Path) -> None:
    data_dir = DataDir.at(tmp_path / "a" / "b")
    data_dir.create()
    for folder in (data_dir.path, data_dir.redis, data_dir.logs):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataDirError, match="cannot create the data folder") as caught:
        DataDir.at(tmp_path / "file" / "below").create()
    assert "--data-dir" in caught.value.hint


def test_a_second_holder_hears_who_has_it_and_kill_9_frees_it(tmp_path: Path) -> None:
    data_dir = DataDir.at(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(DataDirBusyError, match=f"process {holder.pid}"), DataDirLock(data_dir):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait(LIMIT_S)
    with DataDirLock(data_dir):
        assert data_dir.lock_file.read_text() == f"{os.getpid()}\n"
    with DataDirLock(data_dir):
        pass
