"""A conversation in a terminal: which model, which commands, and what is remembered."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from support.clients.scripted_gateway import ScriptedGateway, served
from support.processes.waiting import LIMIT_S

pytestmark = pytest.mark.served


def talk(url: str, data_dir: Path, *lines: str) -> str:
    """Type lines into `pagestream chat` at a terminal; return what it shows."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pagestream_cli", "chat", "--url", url, "--data-dir", str(data_dir)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as chat:
        os.close(theirs)
        os.write(ours, "".join(f"{line}\n" for line in lines).encode())
        said = b""
        with suppress(OSError):  # the terminal is gone when its last process has ended
            while data := os.read(ours, 1 << 16):
                said += data
        assert chat.wait(LIMIT_S) == 0, said
    os.close(ours)
    return said.decode()


def test_commands_change_the_system_message_and_forget(tmp_path: Path) -> None:
    with served(ScriptedGateway()) as gateway:
        said = talk(
            gateway.url, tmp_path, "/system Be brief.", "Hello", "/reset", "Again", "/nothing", "/model", "/quit"
        )
    bodies = [call.body["messages"] for call in gateway.calls if call.method == "POST"]
    system = {"role": "system", "content": "Be brief."}
    assert bodies == [[system, {"role": "user", "content": "Hello"}], [system, {"role": "user", "content": "Again"}]]
    assert "/system [TEXT]" in said
    history = tmp_path / "chat_history"
    assert "Hello" in history.read_text()
    assert history.stat().st_mode & 0o77 == 0


def test_completion_knows_the_commands(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pagestream_cli", "completion", "bash"]
    script = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    (tmp_path / "completion").write_text(script)
    code = (
        f"source {json.dumps(str(tmp_path / 'completion'))}; COMP_WORDS=(pagestream dem); COMP_CWORD=1; "
        "_shtab_pagestream; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.split() == ["demo"]
