"""Tests take from the PATH a program that can do what they need, not the first of its name, or say what it lacks."""

import os
from pathlib import Path

import pytest
from support.redis.servers import server_of_seven
from support.telemetry.collector import COMPONENTS, collector_binary

pytestmark = pytest.mark.served

WITHOUT_TLS = """
[ "$1" = - ] || { echo "Redis server v=99.0.0 sha=00000000:0 malloc=libc bits=64 build=0"; exit; }
while read line; do echo ">>> '$line'" "Bad directive or wrong number of arguments"; exit 1; done
"""
SMALL = """
[ "$1" = components ] && for name in otlp batch debug; do echo "    - name: $name"; done
"""
WHOLE = "\n".join(f'echo "    - name: {name}"' for name in sorted(COMPONENTS))


def program(folder: Path, name: str, script: str) -> str:
    """Write a program; returns its folder."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh{script}" if script.startswith("\n") else f"#!/bin/sh\n{script}")
    file.chmod(0o755)
    return str(folder)


def test_a_redis_without_tls_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = server_of_seven()
    small = program(tmp_path / "bin", "redis-server", WITHOUT_TLS)
    monkeypatch.setenv("PATH", f"{small}:{os.environ['PATH']}")
    assert server_of_seven() == wanted
    monkeypatch.setenv("PATH", f"{small}:/nowhere")
    monkeypatch.delenv("PAGESTREAM_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{small}/redis-server is built without TLS"):
        server_of_seven()


def test_a_small_collector_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = program(tmp_path / "small", "otelcol", SMALL)
    whole = program(tmp_path / "whole", "otelcol-contrib", WHOLE)
    monkeypatch.setenv("PATH", f"{small}:{whole}")
    assert collector_binary() == f"{whole}/otelcol-contrib"
    monkeypatch.setenv("PATH", small)
    monkeypatch.delenv("PAGESTREAM_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match=f"{small}/otelcol is built without .*k8s_attributes"):
        collector_binary()
