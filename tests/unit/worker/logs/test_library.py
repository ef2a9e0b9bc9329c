"""The library of C++: brought by an image, compiled at first use, or not to be had."""

import ctypes
from pathlib import Path

import pytest
from pagestream_engine import native_prebuild
from pagestream_engine.native_build import find_compiler
from pagestream_worker.logs import library, opening
from pagestream_worker.logs.divided_logs import DividedLogs
from pagestream_worker.logs.python_logs import PythonLogs


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have neither a compiler nor what was compiled before, and choose anew."""
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(opening, "load_library", library.load_library.__wrapped__)


def test_without_a_compiler_python_writes_the_logs_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(opening.open_logs(1), PythonLogs)
    assert "by Python" in caplog.text
    assert "no C++ compiler" in caplog.text


@pytest.mark.builds
def test_an_image_s_library_is_used_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    assert native_prebuild.main(["--out", str(tmp_path), library.__name__]) == 0
    folder = tmp_path / "pagestream_worker" / "logs" / "prebuilt"
    [made] = folder.iterdir()
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(library, "PREBUILT", folder)
    assert library.find_or_compile() == made
    monkeypatch.setattr(opening, "load_library", library.load_library.__wrapped__)
    logs = opening.open_logs(1)
    assert isinstance(logs, DividedLogs)
    assert isinstance(logs.native.library, ctypes.PyDLL)


def test_the_build_of_an_image_fails_without_a_compiler(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert native_prebuild.main(["--out", str(tmp_path), library.__name__]) == 1
    assert "g++" in capsys.readouterr().err
