import os
from pathlib import Path

import pytest
from pagestream_cli import DataDir, ProcessRecord, ServeRecord, ServerNotFoundError, UsageError, write_record
from pagestream_cli.client import API_KEY_VARIABLE, Endpoint, find_endpoint
from pagestream_cli.doctor import Verdict, check_serve


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)


def record_of(pid: int) -> ServeRecord:
    gateways = (ProcessRecord("gateway-0", 7, {"http": 81}), ProcessRecord("gateway-1", 8, {"http": 82}))
    return ServeRecord("demo", "redis://x", "127.0.0.1", (ProcessRecord("serve", pid), *gateways), 0.0)


def test_a_running_serve_is_found_by_its_file(tmp_path: Path) -> None:
    write_record(tmp_path / "serve.json", record_of(os.getpid()))
    found = find_endpoint(None, DataDir.at(tmp_path))
    assert found == Endpoint(("http://127.0.0.1:81", "http://127.0.0.1:82"), model="demo")
    assert found.headers == {}


@pytest.mark.parametrize("left_behind", [False, True])
def test_without_one_the_way_out_is_named(tmp_path: Path, left_behind: bool) -> None:
    if left_behind:
        write_record(tmp_path / "serve.json", record_of(2**22 + 1))  # above the largest process id
    with pytest.raises(ServerNotFoundError, match="no pagestream serve runs") as caught:
        find_endpoint(None, DataDir.at(tmp_path))
    assert "pagestream serve" in caught.value.hint
    assert "--url" in caught.value.hint


def test_a_left_number_that_is_another_users_process_now_is_no_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(pid, number)

    data_dir = DataDir.at(tmp_path)
    write_record(data_dir.serve_file, record_of(os.getpid()))
    monkeypatch.setattr(os, "kill", refuse)
    with pytest.raises(ServerNotFoundError, match="no pagestream serve runs"):
        find_endpoint(None, data_dir)
    [finding] = check_serve(data_dir)
    assert finding.verdict is Verdict.WARNING
    assert "was killed" in finding.found


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_is_taken_in_any_usual_form(tmp_path: Path, url: str) -> None:
    assert find_endpoint(url, DataDir.at(tmp_path)).urls == ("http://h:1",)


def test_another_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--url localhost:8000"):
        find_endpoint("localhost:8000", DataDir.at(tmp_path))


def test_the_key_comes_from_the_option_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, "from-environment")
    assert find_endpoint("http://h", DataDir.at(tmp_path)).headers == {"Authorization": "Bearer from-environment"}
    assert find_endpoint("http://h", DataDir.at(tmp_path), "given").api_key == "given"
